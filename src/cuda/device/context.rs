//! The primary context of a GPU, shared by all threads of a process.
#![allow(
    unsafe_code,
    reason = "calls into libcuda, which has no safe interface"
)]

use std::fmt;
use std::sync::Arc;

use super::api::{DeviceApi, Functions};
use super::device_types;
use super::error::DeviceError;
use crate::cuda::GpuUuid;
use crate::cuda::sys::CuResult;

/// A context of a GPU. Clones share it, and so do all values created with it. The context is released with the last of
/// them.
#[derive(Clone)]
pub struct Context {
    shared: Arc<Shared>,
}

struct Shared {
    api: DeviceApi,
    gpu: GpuUuid,
    device: device_types::Device,
    handle: device_types::Opaque,
}

/// Memory of a GPU, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Room {
    /// Memory that is currently unused.
    pub free: u64,
    /// Memory in total.
    pub total: u64,
}

impl Context {
    pub(super) fn retain(
        api: &DeviceApi,
        gpu: GpuUuid,
        device: device_types::Device,
    ) -> Result<Self, DeviceError> {
        let functions = api.functions();
        if let Some(set_flags) = functions.primary_set_flags {
            // SAFETY: a device number from the driver, and one of the driver's flags.
            let result = unsafe { set_flags(device, device_types::SCHEDULE_BLOCKING) };
            api.check("cuDevicePrimaryCtxSetFlags", result)?;
        }
        let mut handle = 0;
        // SAFETY: the driver writes one pointer-sized value to a valid pointer.
        let result = unsafe { (functions.primary_retain)(&raw mut handle, device) };
        api.check("cuDevicePrimaryCtxRetain", result)?;
        let shared = Arc::new(Shared {
            api: api.clone(),
            gpu,
            device,
            handle,
        });
        Ok(Self { shared })
    }

    /// Returns the GPU's UUID.
    #[must_use]
    pub fn gpu(&self) -> GpuUuid {
        self.shared.gpu
    }

    /// Returns the free and the total memory of the GPU.
    ///
    /// # Errors
    /// The driver's error, for example after a fault of the GPU.
    pub fn free_and_total(&self) -> Result<Room, DeviceError> {
        let functions = self.enter()?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: the driver writes two sizes to valid pointers.
        let result = unsafe { (functions.info)(&raw mut free, &raw mut total) };
        self.check("cuMemGetInfo", result)?;
        Ok(Room {
            free: free as u64,
            total: total as u64,
        })
    }

    pub(super) fn device(&self) -> device_types::Device {
        self.shared.device
    }

    /// Makes the context current in the calling thread and returns the driver's functions.
    pub(super) fn enter(&self) -> Result<&Functions, DeviceError> {
        let functions = self.shared.api.functions();
        // SAFETY: the context was retained and is released only when it is no longer used.
        let result = unsafe { (functions.set_current)(self.shared.handle) };
        self.check("cuCtxSetCurrent", result)?;
        Ok(functions)
    }

    pub(super) fn check(&self, call: &'static str, result: CuResult) -> Result<(), DeviceError> {
        self.shared.api.check(call, result)
    }

    /// Logs the reason why a resource could not be released. It is released at the latest when the process exits.
    pub(super) fn check_end(&self, call: &'static str, result: CuResult) {
        if let Err(error) = self.check(call, result) {
            tracing::debug!(%error, gpu = %self.gpu(), "cannot release a GPU resource");
        }
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        // SAFETY: retained once by `retain`, and every value created with the context is gone.
        let result = unsafe { (self.api.functions().primary_release)(self.device) };
        if let Err(error) = self.api.check("cuDevicePrimaryCtxRelease", result) {
            tracing::debug!(%error, gpu = %self.gpu, "cannot release a CUDA context");
        }
    }
}

impl fmt::Debug for Context {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Context").field(&self.gpu()).finish()
    }
}
