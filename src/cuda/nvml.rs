//! NVIDIA's management library, for facts that libcuda reports only at the cost of a context: free memory, driver
//! version, persistence mode.
//!
//! The library is unloaded with the last value of `Nvml`. This module must not know how its results are used.
#![allow(
    unsafe_code,
    reason = "calls into libnvidia-ml, which has no safe interface"
)]

use std::ffi::{CStr, c_char, c_int, c_uint, c_ulonglong, c_void};
use std::sync::Mutex;

use libloading::{Library, Symbol};

use super::error::GpuError;
use super::loader::available;
use crate::sync::locked;

/// `nvmlReturn_t`: 0 is success.
type Answer = c_int;
/// `NVML_ERROR_NOT_SUPPORTED`.
const NOT_SUPPORTED: Answer = 3;
/// `nvmlDevice_t`.
type Handle = *mut c_void;

/// `nvmlMemory_t`, bytes.
#[repr(C)]
#[derive(Default)]
struct RawMemory {
    total: c_ulonglong,
    free: c_ulonglong,
    used: c_ulonglong,
}

const _: () = assert!(size_of::<RawMemory>() == 24);

/// `nvmlUtilization_t`, percent of the last moments.
#[repr(C)]
#[derive(Default)]
struct RawUtilization {
    gpu: c_uint,
    memory: c_uint,
}

const _: () = assert!(size_of::<RawUtilization>() == 8);

/// `nvmlProcessInfo_t`.
#[repr(C)]
#[derive(Clone, Default)]
struct RawProcess {
    pid: c_uint,
    used: c_ulonglong,
    gpu_instance: c_uint,
    compute_instance: c_uint,
}

const _: () = assert!(size_of::<RawProcess>() == 24);

/// Limit on the listed processes of one GPU.
const PROCESSES_MAX: usize = 4096;

/// Size of the longest text that any of the calls returns (`nvml.h`: 96).
const TEXT_BYTES: usize = 96;

/// The facts that NVML reports about one GPU.
pub(super) struct Device {
    pub(super) name: String,
    pub(super) uuid: String,
    pub(super) memory: Option<(u64, u64)>,
    pub(super) persistent: Option<bool>,
    pub(super) mig: Option<bool>,
    pub(super) mode: Option<u32>,
}

/// The way in which a process uses the GPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Route {
    /// Through its own context.
    Own,
    /// Through an MPS server.
    Mps,
}

impl Route {
    const fn call(self) -> &'static str {
        match self {
            Self::Own => "nvmlDeviceGetComputeRunningProcesses_v3",
            Self::Mps => "nvmlDeviceGetMPSComputeRunningProcesses_v3",
        }
    }
}

/// An initialized NVML; dropping the last one shuts the library down and unloads it.
pub(super) struct Nvml {
    library: Library,
}

impl Nvml {
    /// Loads and initializes the library; returns `Ok(None)` if it does not exist.
    pub(super) fn load() -> Result<Option<Self>, GpuError> {
        // SAFETY: the library's constructors are written to run in any program.
        let Ok(library) = (unsafe { Library::new("libnvidia-ml.so.1") }) else {
            return Ok(None);
        };
        let init: Symbol<unsafe extern "C" fn() -> Answer> = symbol(&library, "nvmlInit_v2")?;
        // SAFETY: takes no arguments; any thread may call it, any number of times.
        let answer = unsafe { init() };
        check(&library, "nvmlInit_v2", answer)?;
        Ok(Some(Self { library }))
    }

    pub(super) fn driver_release(&self) -> Result<String, GpuError> {
        const CALL: &str = "nvmlSystemGetDriverVersion";
        let function: Symbol<unsafe extern "C" fn(*mut c_char, c_uint) -> Answer> =
            symbol(&self.library, CALL)?;
        self.text(CALL, |buffer, bytes| {
            // SAFETY: the buffer has as many bytes as the call passes.
            unsafe { function(buffer, bytes) }
        })
    }

    pub(super) fn count(&self) -> Result<u32, GpuError> {
        const CALL: &str = "nvmlDeviceGetCount_v2";
        let function: Symbol<unsafe extern "C" fn(*mut c_uint) -> Answer> =
            symbol(&self.library, CALL)?;
        let mut count = 0;
        // SAFETY: writes one unsigned int to a valid pointer.
        let answer = unsafe { function(&raw mut count) };
        check(&self.library, CALL, answer)?;
        Ok(count)
    }

    pub(super) fn device(&self, index: u32) -> Result<Device, GpuError> {
        let handle = self.handle(index)?;
        Ok(Device {
            name: self.device_text("nvmlDeviceGetName", handle)?,
            uuid: self.device_text("nvmlDeviceGetUUID", handle)?,
            memory: self.memory(handle).ok(),
            persistent: self.persistent(handle).ok(),
            mig: self.mig(handle),
            mode: self.mode(handle).ok(),
        })
    }

    /// Returns each process that uses the GPU in this way: its pid, and the bytes of device memory if the driver
    /// reports them.
    pub(super) fn processes(
        &self,
        index: u32,
        route: Route,
    ) -> Result<Vec<(i32, Option<u64>)>, GpuError> {
        type Function<'lib> =
            Symbol<'lib, unsafe extern "C" fn(Handle, *mut c_uint, *mut RawProcess) -> Answer>;
        let call = route.call();
        let function: Function = symbol(&self.library, call)?;
        let handle = self.handle(index)?;
        let mut found = vec![RawProcess::default(); PROCESSES_MAX];
        let mut count = c_uint::try_from(found.len()).unwrap_or(0);
        // SAFETY: the handle is NVML's own; the array has as many elements as `count` says.
        let answer = unsafe { function(handle, &raw mut count, found.as_mut_ptr()) };
        check(&self.library, call, answer)?;
        found.truncate(count as usize);
        let told = |bytes| Some(bytes).filter(|bytes| *bytes != c_ulonglong::MAX);
        Ok(found
            .into_iter()
            .filter_map(|process| Some((i32::try_from(process.pid).ok()?, told(process.used))))
            .collect())
    }

    fn handle(&self, index: u32) -> Result<Handle, GpuError> {
        const CALL: &str = "nvmlDeviceGetHandleByIndex_v2";
        let function: Symbol<unsafe extern "C" fn(c_uint, *mut Handle) -> Answer> =
            symbol(&self.library, CALL)?;
        let mut handle = std::ptr::null_mut();
        // SAFETY: writes one pointer to a valid pointer.
        let answer = unsafe { function(index, &raw mut handle) };
        check(&self.library, CALL, answer)?;
        Ok(handle)
    }

    fn device_text(&self, call: &'static str, handle: Handle) -> Result<String, GpuError> {
        let function: Symbol<unsafe extern "C" fn(Handle, *mut c_char, c_uint) -> Answer> =
            symbol(&self.library, call)?;
        self.text(call, |buffer, bytes| {
            // SAFETY: the handle is NVML's own; the buffer is as long as the call passes.
            unsafe { function(handle, buffer, bytes) }
        })
    }

    fn memory(&self, handle: Handle) -> Result<(u64, u64), GpuError> {
        const CALL: &str = "nvmlDeviceGetMemoryInfo";
        let function: Symbol<unsafe extern "C" fn(Handle, *mut RawMemory) -> Answer> =
            symbol(&self.library, CALL)?;
        let mut memory = RawMemory::default();
        // SAFETY: the handle is NVML's own; writes one struct to a valid pointer.
        let answer = unsafe { function(handle, &raw mut memory) };
        check(&self.library, CALL, answer)?;
        Ok((memory.total, memory.free))
    }

    /// Returns the percentage of the last moments (up to a second) in which the GPU executed any work.
    pub(super) fn utilization(&self, index: u32) -> Result<u32, GpuError> {
        const CALL: &str = "nvmlDeviceGetUtilizationRates";
        let function: Symbol<unsafe extern "C" fn(Handle, *mut RawUtilization) -> Answer> =
            symbol(&self.library, CALL)?;
        let handle = self.handle(index)?;
        let mut rates = RawUtilization::default();
        // SAFETY: the handle is NVML's own; writes one struct to a valid pointer.
        let answer = unsafe { function(handle, &raw mut rates) };
        check(&self.library, CALL, answer)?;
        Ok(rates.gpu)
    }

    fn persistent(&self, handle: Handle) -> Result<bool, GpuError> {
        const CALL: &str = "nvmlDeviceGetPersistenceMode";
        let function: Symbol<unsafe extern "C" fn(Handle, *mut c_uint) -> Answer> =
            symbol(&self.library, CALL)?;
        let mut mode = 0;
        // SAFETY: the handle is NVML's own; writes one int-sized enum to a valid pointer.
        let answer = unsafe { function(handle, &raw mut mode) };
        check(&self.library, CALL, answer)?;
        Ok(mode == 1)
    }

    /// Returns true if the GPU is split up; false for a model that cannot be split; `None` if the library does not
    /// report it.
    fn mig(&self, handle: Handle) -> Option<bool> {
        const CALL: &str = "nvmlDeviceGetMigMode";
        type Function<'lib> =
            Symbol<'lib, unsafe extern "C" fn(Handle, *mut c_uint, *mut c_uint) -> Answer>;
        let function: Function = symbol(&self.library, CALL).ok()?;
        let (mut current, mut pending) = (0, 0);
        // SAFETY: the handle is NVML's own; writes one unsigned int to each of two valid pointers.
        match unsafe { function(handle, &raw mut current, &raw mut pending) } {
            0 => Some(current == 1),
            NOT_SUPPORTED => Some(false),
            _ => None,
        }
    }

    /// Returns the `nvmlComputeMode_t`.
    fn mode(&self, handle: Handle) -> Result<c_uint, GpuError> {
        const CALL: &str = "nvmlDeviceGetComputeMode";
        let function: Symbol<unsafe extern "C" fn(Handle, *mut c_uint) -> Answer> =
            symbol(&self.library, CALL)?;
        let mut mode = 0;
        // SAFETY: the handle is NVML's own; writes one int-sized enum to a valid pointer.
        let answer = unsafe { function(handle, &raw mut mode) };
        check(&self.library, CALL, answer)?;
        Ok(mode)
    }

    fn text(
        &self,
        call: &'static str,
        fill: impl FnOnce(*mut c_char, c_uint) -> Answer,
    ) -> Result<String, GpuError> {
        let mut bytes = [0_u8; TEXT_BYTES];
        let room = c_uint::try_from(bytes.len()).unwrap_or(0);
        let answer = fill(bytes.as_mut_ptr().cast(), room);
        check(&self.library, call, answer)?;
        let text = CStr::from_bytes_until_nul(&bytes).unwrap_or_default();
        Ok(text.to_string_lossy().into_owned())
    }
}

impl Drop for Nvml {
    fn drop(&mut self) {
        type Shutdown<'lib> = Symbol<'lib, unsafe extern "C" fn() -> Answer>;
        let Ok(shutdown) = symbol(&self.library, "nvmlShutdown") else {
            return;
        };
        let shutdown: Shutdown = shutdown;
        // SAFETY: pairs with the nvmlInit_v2 that made this value; no handle is used after.
        let _ = unsafe { shutdown() };
    }
}

/// Returns the function `name` as a `T`, which must be its type.
fn symbol<'lib, T>(
    library: &'lib Library,
    name: &'static str,
) -> Result<Symbol<'lib, T>, GpuError> {
    // SAFETY: every caller names the type that `nvml.h` declares for this symbol.
    let found = unsafe { library.get::<T>(name) };
    found.map_err(|error| GpuError::Nvml {
        call: name,
        number: 0,
        meaning: error.to_string(),
    })
}

fn check(library: &Library, call: &'static str, answer: Answer) -> Result<(), GpuError> {
    if answer == 0 {
        return Ok(());
    }
    Err(GpuError::Nvml {
        call,
        number: answer,
        meaning: meaning(library, answer),
    })
}

fn meaning(library: &Library, answer: Answer) -> String {
    let Ok(function) =
        symbol::<unsafe extern "C" fn(Answer) -> *const c_char>(library, "nvmlErrorString")
    else {
        return "no explanation".to_owned();
    };
    // SAFETY: takes any number and needs no initialization.
    let text = unsafe { function(answer) };
    if text.is_null() {
        return "no explanation".to_owned();
    }
    // SAFETY: the pointer refers to a constant string inside the library.
    let text = unsafe { CStr::from_ptr(text) };
    text.to_string_lossy().into_owned()
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
