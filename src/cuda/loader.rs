//! The loader of `libcuda.so.1`: looks up the checkpoint functions and calls them.
//!
//! This is the one file that calls the driver's C functions for checkpoints; everything above it is safe code. It must
//! not know the purpose of the calls.
#![allow(
    unsafe_code,
    reason = "calls into libcuda, which has no safe interface"
)]

use std::ffi::{CStr, c_char};
use std::fmt;
use std::path::Path;
use std::sync::{Arc, Once};

use libloading::Library;

use super::cuda_process::{CheckpointApi, CudaProcess};
use super::driver_version::{Capabilities, DriverVersion};
use super::error::{Code, LoadError, MapError};
use super::map::GpuMap;
use super::state::State;
use super::{gpu, sys};

pub(super) const LIBRARY: &str = "libcuda.so.1";

/// Returns true if this machine (or container) has GPU device nodes. The check is cheap: make it before
/// [`Driver::load`], so that libcuda is never loaded without need.
#[must_use]
pub fn available() -> bool {
    ["/dev/nvidiactl", "/dev/nvidia0"]
        .iter()
        .any(|node| Path::new(node).exists())
}

/// The loaded CUDA driver. Clones share it. Loading it makes no CUDA context.
#[derive(Clone)]
pub struct Driver {
    api: Arc<dyn CheckpointApi>,
    version: DriverVersion,
}

impl Driver {
    /// Loads `libcuda.so.1` and finds the checkpoint functions in it.
    ///
    /// The library stays mapped until the process exits, even after the value is dropped: it registers handlers that
    /// run at exit. Load it once.
    ///
    /// # Errors
    /// There is no GPU, no driver library, or one older than 570. None of these keeps a job from running.
    pub fn load() -> Result<Self, LoadError> {
        if !available() {
            return Err(LoadError::NoDevice);
        }
        let (functions, version) = Functions::load(LIBRARY)?;
        tracing::debug!(%version, "CUDA driver loaded");
        Ok(Self {
            api: Arc::new(functions),
            version,
        })
    }

    /// Returns the driver's version.
    #[must_use]
    pub fn version(&self) -> DriverVersion {
        self.version.clone()
    }

    /// Returns a process by its pid as the calling process sees it. No call is made yet.
    #[must_use]
    pub fn process(&self, pid: i32) -> CudaProcess {
        CudaProcess::new(self.clone(), pid)
    }

    /// Returns the driver's capabilities. Every `Driver` can suspend and resume: [`Driver::load`] refuses one that
    /// cannot.
    #[must_use]
    pub fn capabilities(&self) -> Capabilities {
        Capabilities {
            gpu_map: self.version.takes_gpu_map(),
            version: self.version.clone(),
        }
    }

    /// Checks that a restore accepts this map.
    pub(super) fn check_map(&self, map: &GpuMap) -> Result<(), MapError> {
        if map.is_empty() || self.capabilities().gpu_map {
            return Ok(());
        }
        Err(MapError {
            version: self.version.clone(),
        })
    }

    pub(super) fn api(&self) -> &Arc<dyn CheckpointApi> {
        &self.api
    }

    /// Returns a driver with a fake API, for tests of the code above it.
    #[cfg(test)]
    pub(crate) fn fake(api: Arc<dyn CheckpointApi>) -> Self {
        Self::fake_of(api, 13000)
    }

    /// Returns a fake driver of another version, in the form of `cuDriverGetVersion`.
    #[cfg(test)]
    pub(crate) fn fake_of(api: Arc<dyn CheckpointApi>, raw: i32) -> Self {
        Self {
            api,
            version: DriverVersion::from_raw(raw, None),
        }
    }
}

impl fmt::Debug for Driver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Driver").field(&self.version).finish()
    }
}

/// The driver's functions. They are always valid, because the library is never unloaded.
struct Functions {
    init: sys::Init,
    error_name: sys::GetErrorText,
    error_string: sys::GetErrorText,
    get_state: sys::GetState,
    get_restore_thread_id: sys::GetRestoreThreadId,
    lock: sys::Lock,
    checkpoint: sys::WithReserved,
    restore: sys::Restore,
    unlock: sys::WithReserved,
    prepared: Once,
}

impl Functions {
    fn load(library: &'static str) -> Result<(Self, DriverVersion), LoadError> {
        let library = open(library)?;
        let get_version: sys::DriverGetVersion = find(library, "cuDriverGetVersion", None)?;
        let mut raw = 0;
        // SAFETY: the driver writes one int to the pointer, which is valid for it.
        let result = unsafe { get_version(&raw mut raw) };
        let version = DriverVersion::from_raw(raw, gpu::driver_release());
        let functions = Self {
            init: find(library, "cuInit", Some(&version))?,
            error_name: find(library, "cuGetErrorName", Some(&version))?,
            error_string: find(library, "cuGetErrorString", Some(&version))?,
            get_state: find(library, "cuCheckpointProcessGetState", Some(&version))?,
            get_restore_thread_id: find(
                library,
                "cuCheckpointProcessGetRestoreThreadId",
                Some(&version),
            )?,
            lock: find(library, "cuCheckpointProcessLock", Some(&version))?,
            checkpoint: find(library, "cuCheckpointProcessCheckpoint", Some(&version))?,
            restore: find(library, "cuCheckpointProcessRestore", Some(&version))?,
            unlock: find(library, "cuCheckpointProcessUnlock", Some(&version))?,
            prepared: Once::new(),
        };
        functions
            .check(result)
            .map_err(|code| LoadError::Version { code })?;
        Ok((functions, version))
    }

    fn check(&self, result: sys::CuResult) -> Result<(), Code> {
        code(self.error_name, self.error_string, result)
    }
}

/// Opens the driver's library, or a substitute for it.
pub(super) fn open(library: &'static str) -> Result<&'static Library, LoadError> {
    // SAFETY: libcuda's constructors are written to run in any program that
    // loads it; this is the only way it is ever loaded.
    let library = unsafe { Library::new(library) }
        .map_err(|source| LoadError::Library { library, source })?;
    // The library is never unloaded, because its functions are stored.
    Ok(Box::leak(Box::new(library)))
}

/// Converts the result of a call; a failure gets the driver's texts.
pub(super) fn code(
    name: sys::GetErrorText,
    meaning: sys::GetErrorText,
    result: sys::CuResult,
) -> Result<(), Code> {
    if result == sys::SUCCESS {
        return Ok(());
    }
    Err(Code {
        number: result,
        name: text(name, result),
        meaning: text(meaning, result),
    })
}

/// Looks up `symbol` in the library as a `T`, which must be its type.
pub(super) fn find<T: Copy>(
    library: &'static Library,
    symbol: &'static str,
    version: Option<&DriverVersion>,
) -> Result<T, LoadError> {
    // SAFETY: every caller names a type from `sys` that was written for exactly
    // this symbol; the driver's interface is stable for a given name.
    let found = unsafe { library.get::<T>(symbol.as_bytes()) };
    found
        .map(|function| *function)
        .map_err(|_| LoadError::TooOld {
            symbol,
            version: version.map_or_else(|| "found here".to_owned(), ToString::to_string),
        })
}

/// Returns the driver's text for a code; empty if there is none.
fn text(function: sys::GetErrorText, result: sys::CuResult) -> String {
    let mut text: *const c_char = std::ptr::null();
    // SAFETY: the driver stores one pointer; the call needs no initialization.
    let answer = unsafe { function(result, &raw mut text) };
    if answer != sys::SUCCESS || text.is_null() {
        return String::new();
    }
    // SAFETY: on success it points to a constant string inside the library.
    let text = unsafe { CStr::from_ptr(text) };
    text.to_string_lossy().into_owned()
}

impl CheckpointApi for Functions {
    /// Initializes CUDA where a restore needs it. A restore on a GPU without persistence mode needs `cuInit` in the
    /// caller (the driver's documentation), because nothing else keeps such a GPU awake after the job has released it.
    /// If every GPU is known to have persistence mode, `cuInit` is skipped and all its memory saved. The first call
    /// decides.
    fn prepare(&self) {
        self.prepared.call_once(|| {
            if gpu::all_persistent() {
                return;
            }
            // SAFETY: the flags must be 0, and are; any thread may call it.
            let result = unsafe { (self.init)(0) };
            match self.check(result) {
                Ok(()) => tracing::debug!("CUDA initialized: persistence mode is off or unknown"),
                Err(code) => tracing::warn!(%code, "cannot initialize CUDA; restores may fail"),
            }
        });
    }

    fn state(&self, pid: i32) -> Result<State, Code> {
        let mut state = -1;
        // SAFETY: the driver writes one int-sized enum to a valid pointer.
        let result = unsafe { (self.get_state)(pid, &raw mut state) };
        self.check(result)?;
        Ok(State::from_raw(state))
    }

    fn restore_thread(&self, pid: i32) -> Result<i32, Code> {
        let mut tid = -1;
        // SAFETY: the driver writes one int to a valid pointer.
        let result = unsafe { (self.get_restore_thread_id)(pid, &raw mut tid) };
        self.check(result)?;
        Ok(tid)
    }

    fn lock(&self, pid: i32, timeout_ms: u32) -> Result<(), Code> {
        let mut args = sys::LockArgs::new(timeout_ms);
        // SAFETY: the args are 64 zeroed bytes with the timeout set, valid during the call.
        let result = unsafe { (self.lock)(pid, &raw mut args) };
        self.check(result)
    }

    fn checkpoint(&self, pid: i32) -> Result<(), Code> {
        let mut args = sys::ReservedArgs::default();
        // SAFETY: the args are 64 zeroed bytes, valid during the call.
        let result = unsafe { (self.checkpoint)(pid, &raw mut args) };
        self.check(result)
    }

    fn restore(&self, pid: i32, map: &GpuMap) -> Result<(), Code> {
        let pairs = map.pairs().iter().map(|pair| sys::GpuPair {
            old: *pair.old.as_bytes(),
            new: *pair.new.as_bytes(),
        });
        let mut pairs: Vec<sys::GpuPair> = pairs.collect();
        let mut args = sys::RestoreArgs::onto(&mut pairs);
        // SAFETY: the args are 64 bytes, zero except for the pairs, whose number equals the count and which outlive the
        // call; a driver that does not support pairs gets none.
        let result = unsafe { (self.restore)(pid, &raw mut args) };
        self.check(result)
    }

    fn unlock(&self, pid: i32) -> Result<(), Code> {
        let mut args = sys::ReservedArgs::default();
        // SAFETY: the args are 64 zeroed bytes, valid during the call.
        let result = unsafe { (self.unlock)(pid, &raw mut args) };
        self.check(result)
    }

    fn exists(&self, pid: i32) -> bool {
        super::cuda_process::exists(pid)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_drivers_that_know_gpu_pairs_are_given_a_map() {
        let driver = |raw| Driver::fake_of(crate::cuda::fake::Fake::new(&[]), raw);
        let gpu = crate::cuda::GpuUuid::from_bytes([7; 16]);
        let map: GpuMap = format!("{gpu}={gpu}").parse().unwrap();
        for (raw, can) in [(12080, false), (12090, false), (13000, true), (13040, true)] {
            assert_eq!(driver(raw).capabilities().gpu_map, can, "{raw}");
            assert_eq!(driver(raw).check_map(&map).is_ok(), can, "{raw}");
            assert!(driver(raw).check_map(&GpuMap::default()).is_ok(), "{raw}");
        }
        let text = driver(12080).check_map(&map).unwrap_err().to_string();
        assert!(text.contains("12.8") && text.contains("580"), "{text}");
    }

    #[test]
    fn a_machine_without_a_gpu_is_an_ordinary_error() {
        if available() {
            eprintln!("SKIPPED: this machine has a GPU");
            return;
        }
        let error = Driver::load().unwrap_err();
        assert!(matches!(error, LoadError::NoDevice), "{error}");
    }

    #[test]
    fn missing_library_is_named() {
        let error = Functions::load("libcuda-is-not-here.so.1").err().unwrap();
        assert!(matches!(error, LoadError::Library { .. }), "{error}");
        assert!(
            error.to_string().contains("libcuda-is-not-here.so.1"),
            "{error}"
        );
    }

    #[test]
    fn old_library_error_names_the_required_driver() {
        // Any library other than libcuda can stand in for an old one.
        let error = Functions::load("libm.so.6").err().unwrap();
        assert!(matches!(error, LoadError::TooOld { .. }), "{error}");
        let text = error.to_string();
        assert!(
            text.contains("cuDriverGetVersion") && text.contains("570"),
            "{text}"
        );
    }
}
