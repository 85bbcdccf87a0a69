//! NVIDIA's management library, for facts that libcuda reports only at the cost of a context: free memory, driver
//! version, persistence mode.
//!
//! The library is loaded at run time and unloaded with the last value of `Nvml`. This module must not know how its
//! results are used.

use std::ffi::OsStr;
use std::sync::Mutex;

use nvml_wrapper::Device;
use nvml_wrapper::enums::device::UsedGpuMemory;
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::struct_wrappers::device::ProcessInfo;

use super::error::GpuError;
use super::gpu::{ComputeMode, GpuMemory};
use super::loader::available;
use crate::sync::locked;

/// The library's name without its development files.
const LIBRARY: &str = "libnvidia-ml.so.1";
/// Limit on tries to list processes while new ones appear.
const TRIES_MAX: u32 = 10;

/// The facts that NVML reports about one GPU.
pub(super) struct Facts {
    pub(super) name: String,
    pub(super) uuid: String,
    pub(super) memory: Option<GpuMemory>,
    pub(super) persistent: Option<bool>,
    pub(super) mig: Option<bool>,
    pub(super) mode: Option<ComputeMode>,
}

/// The way in which a process uses the GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Route {
    /// Through its own context.
    Own,
    /// Through an MPS server.
    Mps,
}

/// An initialized NVML; dropping the last one shuts the library down and unloads it.
pub(super) struct Nvml(nvml_wrapper::Nvml);

impl Nvml {
    /// Loads and initializes the library; returns `Ok(None)` if it does not exist.
    pub(super) fn load() -> Result<Option<Self>, GpuError> {
        let mut builder = nvml_wrapper::Nvml::builder();
        match builder.lib_path(OsStr::new(LIBRARY)).init() {
            Ok(nvml) => Ok(Some(Self(nvml))),
            Err(NvmlError::LibloadingError(_)) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    pub(super) fn driver_release(&self) -> Result<String, GpuError> {
        Ok(self.0.sys_driver_version()?)
    }

    pub(super) fn count(&self) -> Result<u32, GpuError> {
        Ok(self.0.device_count()?)
    }

    pub(super) fn facts(&self, index: u32) -> Result<Facts, GpuError> {
        let device = self.0.device_by_index(index)?;
        Ok(Facts {
            name: device.name()?,
            uuid: device.uuid()?,
            memory: device.memory_info().ok().map(|memory| GpuMemory {
                total_bytes: memory.total,
                free_bytes: memory.free,
            }),
            persistent: device.is_in_persistent_mode().ok(),
            mig: is_split(&device),
            mode: device.compute_mode().ok().map(ComputeMode::from),
        })
    }

    /// Returns each process that uses the GPU in this way: its pid, and the bytes of device memory if the driver
    /// reports them.
    pub(super) fn processes(
        &self,
        index: u32,
        route: Route,
    ) -> Result<Vec<(i32, Option<u64>)>, GpuError> {
        let device = self.0.device_by_index(index)?;
        let list = || match route {
            Route::Own => device.running_compute_processes(),
            Route::Mps => device.mps_running_compute_processes(),
        };
        // The crate asks for the number first and leaves little room for processes that appear meanwhile.
        let is_final = |found: &Result<_, _>| !matches!(found, Err(NvmlError::InsufficientSize(_)));
        let found: Vec<ProcessInfo> = (0..TRIES_MAX)
            .map(|_| list())
            .find(is_final)
            .unwrap_or_else(list)?;
        let used = |memory| match memory {
            UsedGpuMemory::Used(bytes) => Some(bytes),
            UsedGpuMemory::Unavailable => None,
        };
        Ok(found
            .into_iter()
            .filter_map(|process| {
                let pid = i32::try_from(process.pid).ok()?;
                Some((pid, used(process.used_gpu_memory)))
            })
            .collect())
    }

    /// Returns the percentage of the last moments (up to a second) in which the GPU executed any work.
    pub(super) fn utilization(&self, index: u32) -> Result<u32, GpuError> {
        Ok(self.0.device_by_index(index)?.utilization_rates()?.gpu)
    }
}

/// Returns true if the GPU is split up; false for a model that cannot be split; `None` if the library does not report
/// it.
fn is_split(device: &Device<'_>) -> Option<bool> {
    match device.mig_mode() {
        Ok(mode) => Some(mode.current == 1),
        Err(NvmlError::NotSupported) => Some(false),
        Err(_) => None,
    }
}

/// An NVML that stays initialized, so that repeated queries ([`inventory`](super::inventory), [`uses`](super::uses))
/// need no initialization. NVML counts its initializations and executes only one; it is most of a query's cost.
///
/// The kept library has the GPUs' device files open, which prevents other programs from resetting a GPU or changing its
/// partition (MIG), and it knows only the GPUs that existed when it was initialized.
#[derive(Default)]
pub struct KeptNvml(Mutex<Option<Nvml>>);

impl KeptNvml {
    /// Keeps the library initialized, if it is not kept already and exists. Blocks as long as a query does.
    pub fn keep(&self) {
        let mut kept = locked(&self.0);
        if kept.is_none() && available() {
            // Without the library, every query reports why there is none.
            *kept = Nvml::load().ok().flatten();
        }
    }

    /// Releases the library, so that the next query finds the GPUs of that time.
    pub fn release(&self) {
        *locked(&self.0) = None;
    }
}

impl std::fmt::Debug for KeptNvml {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("KeptNvml").finish_non_exhaustive()
    }
}
