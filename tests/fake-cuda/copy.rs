//! Copies and fills. All are complete when they return.

use std::ffi::c_void;

use super::code::{Answer, INVALID_CONTEXT, INVALID_VALUE};
use super::context::current;
use super::gate::calls;
use super::process::process;

/// End of a copy.
#[derive(Clone, Copy)]
enum End {
    Device(u64),
    Host(*mut c_void),
    /// Unified address: device or host.
    Either(u64),
}

impl End {
    fn check(self, len: usize) -> Result<*mut u8, i32> {
        let address = match self {
            Self::Device(address) => {
                process().check_range(address, len as u64)?;
                address
            }
            Self::Either(address) => {
                if process().mapping_at(address).is_some() {
                    process().check_range(address, len as u64)?;
                }
                address
            }
            Self::Host(pointer) => pointer as u64,
        };
        if address == 0 && len > 0 {
            Err(INVALID_VALUE)
        } else {
            Ok(address as *mut u8)
        }
    }
}

fn copy(to: End, from: End, len: usize) -> Answer {
    if current() == 0 {
        return Err(INVALID_CONTEXT);
    }
    let (to, from) = (to.check(len)?, from.check(len)?);
    // SAFETY: device ranges were checked; the caller guarantees those of the host.
    unsafe { to.copy_from(from, len) };
    Ok(())
}

/// Fills `count` values.
fn fill<T: Copy>(to: u64, value: T, count: usize) -> Answer {
    if current() == 0 {
        return Err(INVALID_CONTEXT);
    }
    let len = count.checked_mul(size_of::<T>()).ok_or(INVALID_VALUE)?;
    if !to.is_multiple_of(size_of::<T>() as u64) {
        return Err(INVALID_VALUE);
    }
    let to = End::Device(to).check(len)?;
    // SAFETY: checked, and aligned.
    unsafe { std::slice::from_raw_parts_mut(to.cast(), count) }.fill(value);
    Ok(())
}

calls! {
    3020 fn cuMemcpyDtoH_v2(to: *mut c_void, from: u64, len: usize) {
        copy(End::Host(to), End::Device(from), len)
    }
    3020 fn cuMemcpyHtoD_v2(to: u64, from: *const c_void, len: usize) {
        copy(End::Device(to), End::Host(from.cast_mut()), len)
    }
    3020 fn cuMemcpyDtoD_v2(to: u64, from: u64, len: usize) {
        copy(End::Device(to), End::Device(from), len)
    }
    3020 fn cuMemcpyDtoHAsync_v2(to: *mut c_void, from: u64, len: usize, _stream: usize) {
        copy(End::Host(to), End::Device(from), len)
    }
    3020 fn cuMemcpyHtoDAsync_v2(to: u64, from: *const c_void, len: usize, _stream: usize) {
        copy(End::Device(to), End::Host(from.cast_mut()), len)
    }
    3020 fn cuMemcpyDtoDAsync_v2(to: u64, from: u64, len: usize, _stream: usize) {
        copy(End::Device(to), End::Device(from), len)
    }
    4000 fn cuMemcpy(to: u64, from: u64, len: usize) {
        copy(End::Either(to), End::Either(from), len)
    }
    4000 fn cuMemcpyAsync(to: u64, from: u64, len: usize, _stream: usize) {
        copy(End::Either(to), End::Either(from), len)
    }
    3020 fn cuMemsetD8_v2(to: u64, value: u8, count: usize) {
        fill(to, value, count)
    }
    3020 fn cuMemsetD32_v2(to: u64, value: u32, count: usize) {
        fill(to, value, count)
    }
    3020 fn cuMemsetD8Async(to: u64, value: u8, count: usize, _stream: usize) {
        fill(to, value, count)
    }
    3020 fn cuMemsetD32Async(to: u64, value: u32, count: usize, _stream: usize) {
        fill(to, value, count)
    }
}
