//! The driver's C types, as laid out by `cuda.h` of CUDA 12.8 and newer.
//!
//! Only the types that ckpt-run uses are here. Every argument struct is 64 bytes in every driver that has the
//! interface; fields beyond those named are reserved and zero, so one layout fits all of them.

use std::ffi::{c_char, c_int, c_uint, c_void};
use std::mem::{offset_of, size_of};

/// `CUresult`: 0 is success.
pub(super) type CuResult = c_int;

pub(super) const SUCCESS: CuResult = 0;
#[cfg(test)]
pub(super) const INVALID_VALUE: CuResult = 1;
pub(super) const OUT_OF_MEMORY: CuResult = 2;
pub(super) const NOT_INITIALIZED: CuResult = 3;
#[cfg(test)]
pub(super) const OPERATING_SYSTEM: CuResult = 304;
#[cfg(test)]
pub(super) const ILLEGAL_STATE: CuResult = 401;
pub(super) const NOT_READY: CuResult = 600;
#[cfg(test)]
pub(super) const NOT_SUPPORTED: CuResult = 801;

/// `CUcheckpointLockArgs`.
#[repr(C)]
pub(super) struct LockArgs {
    /// The timeout in milliseconds; 0 would wait forever.
    pub(super) timeout_ms: c_uint,
    reserved: [c_uint; 15],
}

impl LockArgs {
    pub(super) fn new(timeout_ms: c_uint) -> Self {
        Self {
            timeout_ms,
            reserved: [0; 15],
        }
    }
}

/// `CUcheckpointUnlockArgs`, all reserved, and `CUcheckpointCheckpointArgs`, which in newer headers begins with a
/// pointer to storage of the caller; null means host memory.
#[repr(C)]
#[derive(Default)]
pub(super) struct ReservedArgs {
    reserved: [u64; 8],
}

/// `CUcheckpointGpuPair`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct GpuPair {
    pub(super) old: [u8; 16],
    pub(super) new: [u8; 16],
}

/// `CUcheckpointRestoreArgs`. The map was added in CUDA 13.0; before, its bytes were reserved and had to be zero, as
/// they are without a map.
#[repr(C)]
pub(super) struct RestoreArgs {
    gpu_pairs: *mut GpuPair,
    gpu_pairs_count: c_uint,
    padding: c_uint,
    custom_storage: *mut *mut c_void,
    reserved: [u64; 5],
}

impl RestoreArgs {
    /// Creates args that point to `pairs`, which must outlive the call. Without pairs, each GPU is restored onto
    /// itself.
    pub(super) fn onto(pairs: &mut [GpuPair]) -> Self {
        let gpu_pairs = if pairs.is_empty() {
            std::ptr::null_mut()
        } else {
            pairs.as_mut_ptr()
        };
        Self {
            gpu_pairs,
            // A saturated number would still not exceed the number of pairs.
            gpu_pairs_count: c_uint::try_from(pairs.len()).unwrap_or(c_uint::MAX),
            padding: 0,
            custom_storage: std::ptr::null_mut(),
            reserved: [0; 5],
        }
    }
}

const _: () = {
    assert!(size_of::<LockArgs>() == 64);
    assert!(offset_of!(LockArgs, timeout_ms) == 0);
    assert!(size_of::<ReservedArgs>() == 64);
    assert!(size_of::<GpuPair>() == 32);
    assert!(align_of::<GpuPair>() == 1);
    assert!(offset_of!(GpuPair, old) == 0);
    assert!(offset_of!(GpuPair, new) == 16);
    assert!(size_of::<RestoreArgs>() == 64);
    assert!(offset_of!(RestoreArgs, gpu_pairs) == 0);
    assert!(offset_of!(RestoreArgs, gpu_pairs_count) == 8);
    assert!(offset_of!(RestoreArgs, padding) == 12);
    assert!(offset_of!(RestoreArgs, custom_storage) == 16);
    assert!(offset_of!(RestoreArgs, reserved) == 24);
};

pub(super) type Init = unsafe extern "C" fn(flags: c_uint) -> CuResult;
pub(super) type DriverGetVersion = unsafe extern "C" fn(version: *mut c_int) -> CuResult;
pub(super) type GetErrorText =
    unsafe extern "C" fn(error: CuResult, text: *mut *const c_char) -> CuResult;
pub(super) type GetState = unsafe extern "C" fn(pid: c_int, state: *mut c_int) -> CuResult;
pub(super) type GetRestoreThreadId = unsafe extern "C" fn(pid: c_int, tid: *mut c_int) -> CuResult;
pub(super) type Lock = unsafe extern "C" fn(pid: c_int, args: *mut LockArgs) -> CuResult;
pub(super) type WithReserved =
    unsafe extern "C" fn(pid: c_int, args: *mut ReservedArgs) -> CuResult;
pub(super) type Restore = unsafe extern "C" fn(pid: c_int, args: *mut RestoreArgs) -> CuResult;

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the eight bytes that the driver reads at an offset.
    fn word(args: &RestoreArgs, offset: usize) -> u64 {
        match offset {
            0 => args.gpu_pairs as u64,
            8 => u64::from(args.gpu_pairs_count) | u64::from(args.padding) << 32,
            16 => args.custom_storage as u64,
            _ => args.reserved[(offset - 24) / 8],
        }
    }

    #[test]
    fn without_a_map_all_64_bytes_are_zero() {
        let args = RestoreArgs::onto(&mut []);
        assert!((0..64).step_by(8).all(|offset| word(&args, offset) == 0));
    }

    #[test]
    fn a_map_is_a_pointer_and_a_count() {
        let mut pairs = [GpuPair {
            old: [1; 16],
            new: [2; 16],
        }; 3];
        let args = RestoreArgs::onto(&mut pairs);
        assert_eq!(word(&args, 0), pairs.as_ptr() as u64);
        assert_eq!(word(&args, 8), 3);
        assert!((16..64).step_by(8).all(|offset| word(&args, offset) == 0));
    }
}
