//! Host memory at a fixed place, so that the GPU copies to and from it by itself.
#![allow(
    unsafe_code,
    reason = "calls into libcuda, which has no safe interface"
)]

use std::ffi::c_void;
use std::fmt;

use super::context::Context;
use super::device_types;
use super::error::DeviceError;
use crate::shared_memory::SharedMemory;

/// Pinned memory that another process has mapped as well; all contexts of this process may use it. This process never
/// reads its bytes; only the GPU does. Pinning takes 0.35 s per GiB, so the memory should be created once and used
/// often.
pub struct Pinned {
    context: Context,
    memory: SharedMemory,
}

impl Pinned {
    /// Pins the memory.
    ///
    /// # Errors
    /// The driver's error if the host locks no more memory.
    pub(crate) fn new(context: &Context, memory: SharedMemory) -> Result<Self, DeviceError> {
        let functions = context.enter()?;
        let (start, len) = (memory.start().as_ptr().cast(), memory.len());
        // SAFETY: this is a whole mapping, which is unmapped only after it is unpinned.
        let result = unsafe { (functions.host_register)(start, len, device_types::HOST_PORTABLE) };
        context.check("cuMemHostRegister", result)?;
        Ok(Self {
            context: context.clone(),
            memory,
        })
    }

    /// Returns the address for a copy of `len` bytes from `offset` on.
    pub(super) fn at(&self, offset: u64, len: u64) -> Result<*mut c_void, DeviceError> {
        let available = self.memory.len() as u64;
        let range = DeviceError::Range {
            offset,
            len,
            available,
        };
        let (Some(end), Ok(start)) = (offset.checked_add(len), usize::try_from(offset)) else {
            return Err(range);
        };
        if end > available {
            return Err(range);
        }
        // SAFETY: the address is within the mapping, or at its end.
        Ok(unsafe { self.memory.start().as_ptr().add(start) }.cast())
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        let Ok(functions) = self.context.enter() else {
            return;
        };
        // SAFETY: pinned once, unpinned once; no copy uses it, because a copy borrows it.
        let result = unsafe { (functions.host_unregister)(self.memory.start().as_ptr().cast()) };
        self.context.check_end("cuMemHostUnregister", result);
    }
}

impl fmt::Debug for Pinned {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Pinned").field(&self.memory).finish()
    }
}
