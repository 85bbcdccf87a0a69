//! The driver's functions for contexts, memory and copies, and the texts of their results.
#![allow(
    unsafe_code,
    reason = "calls into libcuda, which has no safe interface"
)]

use std::ffi::c_int;
use std::fmt;
use std::sync::Arc;

use libloading::Library;

use super::context::Context;
use super::device_types;
use super::error::DeviceError;
use crate::cuda::loader::{LIBRARY, code, find, open};
use crate::cuda::sys::{CuResult, GetErrorText, Init};
use crate::cuda::{GpuUuid, LoadError};

/// Limit on the driver's device count, more than any machine has.
const GPUS_MAX: c_int = 256;

/// The CUDA driver, initialized in this process. Clones share it.
#[derive(Clone)]
pub struct DeviceApi {
    functions: Arc<Functions>,
}

impl DeviceApi {
    /// Loads `libcuda.so.1` and initializes CUDA. The library stays loaded until the process exits.
    ///
    /// # Errors
    /// [`DeviceError::Load`] if there is no driver or it lacks a function; [`DeviceError::Call`] if the driver does not
    /// work, for example without a GPU.
    pub fn load() -> Result<Self, DeviceError> {
        let functions = Functions::load(LIBRARY)?;
        // SAFETY: the flags must be 0, and are; any thread may call it.
        let result = unsafe { (functions.init)(0) };
        functions.check("cuInit", result)?;
        Ok(Self {
            functions: Arc::new(functions),
        })
    }

    /// Returns the context of a GPU, and creates it unless this process already has one.
    ///
    /// # Errors
    /// CUDA shows no such GPU (`CUDA_VISIBLE_DEVICES` hides some), or has no memory for a context.
    pub fn context(&self, gpu: GpuUuid) -> Result<Context, DeviceError> {
        let devices = self.devices()?;
        let found = devices.iter().find(|(uuid, _)| *uuid == gpu);
        let &(_, device) = found.ok_or(DeviceError::NoSuchGpu {
            gpu,
            count: devices.len(),
        })?;
        Context::retain(self, gpu, device)
    }

    fn devices(&self) -> Result<Vec<(GpuUuid, device_types::Device)>, DeviceError> {
        let mut count = 0;
        // SAFETY: the driver writes one int to a valid pointer.
        let result = unsafe { (self.functions.device_count)(&raw mut count) };
        self.check("cuDeviceGetCount", result)?;
        (0..count.min(GPUS_MAX))
            .map(|ordinal| {
                let mut device = 0;
                // SAFETY: the driver writes one int to a valid pointer.
                let result = unsafe { (self.functions.device)(&raw mut device, ordinal) };
                self.check("cuDeviceGet", result)?;
                let mut uuid = [0; 16];
                // SAFETY: the driver writes 16 bytes, and the array has 16.
                let result = unsafe { (self.functions.device_uuid)(&raw mut uuid, device) };
                self.check("cuDeviceGetUuid", result)?;
                Ok((GpuUuid::from_bytes(uuid), device))
            })
            .collect()
    }

    pub(super) fn functions(&self) -> &Functions {
        &self.functions
    }

    /// Checks the result of `call`, which has just been made.
    pub(super) fn check(&self, call: &'static str, result: CuResult) -> Result<(), DeviceError> {
        self.functions.check(call, result)
    }
}

impl fmt::Debug for DeviceApi {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("DeviceApi")
    }
}

/// The driver's functions. They are always valid, because the library is never unloaded.
pub(super) struct Functions {
    init: Init,
    error_name: GetErrorText,
    error_string: GetErrorText,
    device_count: device_types::DeviceGetCount,
    device: device_types::DeviceGet,
    device_uuid: device_types::DeviceGetUuid,
    /// A function since CUDA 11; without it, threads that wait for the GPU keep a core busy.
    pub(super) primary_set_flags: Option<device_types::PrimaryCtxSetFlags>,
    pub(super) primary_retain: device_types::PrimaryCtxRetain,
    pub(super) primary_release: device_types::PrimaryCtxRelease,
    pub(super) set_current: device_types::OfHandle,
    pub(super) info: device_types::MemGetInfo,
    pub(super) allocate: device_types::MemAlloc,
    pub(super) free: device_types::MemFree,
    pub(super) granularity: device_types::GetGranularity,
    pub(super) create: device_types::MemCreate,
    pub(super) release: device_types::MemRelease,
    pub(super) reserve: device_types::AddressReserve,
    pub(super) free_address: device_types::OfRange,
    pub(super) map: device_types::MemMap,
    pub(super) unmap: device_types::OfRange,
    pub(super) set_access: device_types::MemSetAccess,
    pub(super) export: device_types::Export,
    pub(super) import: device_types::Import,
    pub(super) host_register: device_types::HostRegister,
    pub(super) host_unregister: device_types::HostUnregister,
    pub(super) stream_create: device_types::StreamCreate,
    pub(super) stream_destroy: device_types::OfHandle,
    pub(super) stream_synchronize: device_types::OfHandle,
    pub(super) copy_to_host: device_types::CopyToHost,
    pub(super) copy_to_device: device_types::CopyToDevice,
    pub(super) copy_on_device: device_types::CopyOnDevice,
    /// Functions for programs on the GPU; without them all memory is copied.
    pub(super) programs: Option<Programs>,
}

/// The driver's functions for programs on the GPU.
pub(super) struct Programs {
    pub(super) load: device_types::ModuleLoad,
    pub(super) unload: device_types::OfHandle,
    pub(super) function: device_types::ModuleFunction,
    pub(super) launch: device_types::Launch,
    pub(super) read: device_types::CopyToHostNow,
    pub(super) write: device_types::CopyToDeviceNow,
}

impl Functions {
    fn load(library: &'static str) -> Result<Self, LoadError> {
        let library = open(library)?;
        // The newer function returns the own UUID of a part of a GPU (MIG); drivers before 11.4 do not have it.
        let device_uuid = find(library, "cuDeviceGetUuid_v2", None)
            .or_else(|_| find(library, "cuDeviceGetUuid", None))?;
        Ok(Self {
            init: find(library, "cuInit", None)?,
            error_name: find(library, "cuGetErrorName", None)?,
            error_string: find(library, "cuGetErrorString", None)?,
            device_count: find(library, "cuDeviceGetCount", None)?,
            device: find(library, "cuDeviceGet", None)?,
            device_uuid,
            primary_set_flags: find(library, "cuDevicePrimaryCtxSetFlags_v2", None).ok(),
            primary_retain: find(library, "cuDevicePrimaryCtxRetain", None)?,
            primary_release: find(library, "cuDevicePrimaryCtxRelease_v2", None)?,
            set_current: find(library, "cuCtxSetCurrent", None)?,
            info: find(library, "cuMemGetInfo_v2", None)?,
            allocate: find(library, "cuMemAlloc_v2", None)?,
            free: find(library, "cuMemFree_v2", None)?,
            granularity: find(library, "cuMemGetAllocationGranularity", None)?,
            create: find(library, "cuMemCreate", None)?,
            release: find(library, "cuMemRelease", None)?,
            reserve: find(library, "cuMemAddressReserve", None)?,
            free_address: find(library, "cuMemAddressFree", None)?,
            map: find(library, "cuMemMap", None)?,
            unmap: find(library, "cuMemUnmap", None)?,
            set_access: find(library, "cuMemSetAccess", None)?,
            export: find(library, "cuMemExportToShareableHandle", None)?,
            import: find(library, "cuMemImportFromShareableHandle", None)?,
            host_register: find(library, "cuMemHostRegister_v2", None)?,
            host_unregister: find(library, "cuMemHostUnregister", None)?,
            stream_create: find(library, "cuStreamCreate", None)?,
            stream_destroy: find(library, "cuStreamDestroy_v2", None)?,
            stream_synchronize: find(library, "cuStreamSynchronize", None)?,
            copy_to_host: find(library, "cuMemcpyDtoHAsync_v2", None)?,
            copy_to_device: find(library, "cuMemcpyHtoDAsync_v2", None)?,
            copy_on_device: find(library, "cuMemcpyDtoDAsync_v2", None)?,
            programs: Programs::load(library).ok(),
        })
    }

    fn check(&self, call: &'static str, result: CuResult) -> Result<(), DeviceError> {
        code(self.error_name, self.error_string, result)
            .map_err(|code| DeviceError::Call { call, code })
    }
}

impl Programs {
    fn load(library: &'static Library) -> Result<Self, LoadError> {
        Ok(Self {
            load: find(library, "cuModuleLoadData", None)?,
            unload: find(library, "cuModuleUnload", None)?,
            function: find(library, "cuModuleGetFunction", None)?,
            launch: find(library, "cuLaunchKernel", None)?,
            read: find(library, "cuMemcpyDtoH_v2", None)?,
            write: find(library, "cuMemcpyHtoD_v2", None)?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_function_of_a_library_is_named() {
        // Any library other than libcuda can stand in for an old one.
        let error = Functions::load("libm.so.6").err().unwrap();
        assert!(matches!(error, LoadError::TooOld { .. }), "{error}");
        assert!(error.to_string().contains("cuDeviceGetUuid"), "{error}");
    }

    #[test]
    fn a_missing_library_is_an_ordinary_error() {
        let error = Functions::load("libcuda-is-not-here.so.1").err().unwrap();
        assert!(matches!(error, LoadError::Library { .. }), "{error}");
    }
}
