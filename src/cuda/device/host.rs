//! Host memory that stays where it is, so that the GPU copies to and from it by itself.
#![allow(
    unsafe_code,
    reason = "memory of libcuda's, which has no safe interface"
)]

use std::fmt;
use std::ops::{Deref, DerefMut};
use std::ptr::{self, NonNull};
use std::slice;

use super::context::Context;
use super::error::DeviceError;
use super::sys;

/// A buffer of pinned host memory, which all contexts of the process may use; zeros at first. Pinning takes 0.35 s a
/// GiB: make it once, use it often.
pub struct Pinned {
    context: Context,
    start: NonNull<u8>,
    len: usize,
}

impl Pinned {
    /// Pins `len` bytes.
    ///
    /// # Errors
    /// The driver's, when the host has too little memory or locks no more of it.
    pub fn new(context: &Context, len: usize) -> Result<Self, DeviceError> {
        let functions = context.enter()?;
        let mut start = ptr::null_mut();
        // SAFETY: the driver writes one pointer to a valid pointer.
        let result = unsafe { (functions.host_allocate)(&raw mut start, len, sys::HOST_PORTABLE) };
        context.check("cuMemHostAlloc", result)?;
        let start = NonNull::new(start.cast::<u8>()).ok_or(DeviceError::Nothing {
            call: "cuMemHostAlloc",
        })?;
        // SAFETY: the driver has just given these bytes, to nobody else.
        unsafe { ptr::write_bytes(start.as_ptr(), 0, len) };
        Ok(Self {
            context: context.clone(),
            start,
            len,
        })
    }
}

// SAFETY: plain memory that belongs to the value alone; the driver's calls on it may come from any thread.
unsafe impl Send for Pinned {}

impl Deref for Pinned {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: initialized in `new`, of that length, and lent for as long as `self` is.
        unsafe { slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }
}

impl DerefMut for Pinned {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: initialized in `new`, of that length, and lent for as long as `self` is.
        unsafe { slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        let Ok(functions) = self.context.enter() else {
            return;
        };
        // SAFETY: from cuMemHostAlloc, freed once; no copy uses it, for a copy borrows it.
        let result = unsafe { (functions.host_free)(self.start.as_ptr().cast()) };
        self.context.check_end("cuMemFreeHost", result);
    }
}

impl fmt::Debug for Pinned {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pinned")
            .field("len", &self.len)
            .finish_non_exhaustive()
    }
}
