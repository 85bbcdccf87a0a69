//! Finds `libcuda.so.1`, takes the checkpoint functions out of it, calls them.
//!
//! The one file that speaks C to the driver; everything above it is safe code.
//! It must not know what the calls are for.
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

/// Whether this machine (or container) has GPU device nodes. Cheap: ask this
/// before [`Driver::load`], so that libcuda is never loaded in vain.
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
    /// The library stays mapped until the process ends, whatever becomes of
    /// the value: it registers handlers that run at exit. Load it once.
    ///
    /// # Errors
    /// When there is no GPU, no driver library, or one older than 570. None of
    /// these keeps a job from running.
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

    /// Which driver this is.
    #[must_use]
    pub fn version(&self) -> DriverVersion {
        self.version.clone()
    }

    /// A process by its pid as this process sees it. Asks nothing yet.
    #[must_use]
    pub fn process(&self, pid: i32) -> CudaProcess {
        CudaProcess::new(self.clone(), pid)
    }

    /// What this driver can do. That it can suspend and resume at all, the
    /// value itself says: [`Driver::load`] refuses one that cannot.
    #[must_use]
    pub fn capabilities(&self) -> Capabilities {
        Capabilities {
            gpu_map: self.version.takes_gpu_map(),
            version: self.version.clone(),
        }
    }

    /// Whether a restore may be given this map.
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

    /// A driver that is not there, for tests of what happens above it.
    #[cfg(test)]
    pub(crate) fn fake(api: Arc<dyn CheckpointApi>) -> Self {
        Self::fake_of(api, 13000)
    }

    /// One of another version, in the form of `cuDriverGetVersion`.
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

/// The driver's functions. Valid for ever, because the library is never unloaded.
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

/// Opens the driver's library, or the one that stands in for it.
pub(super) fn open(library: &'static str) -> Result<&'static Library, LoadError> {
    // SAFETY: libcuda's constructors are written to run in any program that
    // loads it; this is the only way it is ever loaded.
    let library = unsafe { Library::new(library) }
        .map_err(|source| LoadError::Library { library, source })?;
    // Never unloaded: the functions that are taken out of it are kept.
    Ok(Box::leak(Box::new(library)))
}

/// What a call answered, in the driver's words if it failed.
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

/// Takes `symbol` out of the library as a `T`, which must be its type.
pub(super) fn find<T: Copy>(
    library: &'static Library,
    symbol: &'static str,
    version: Option<&DriverVersion>,
) -> Result<T, LoadError> {
    // SAFETY: every caller names a type from `sys` that was written for exactly
    // this symbol; the driver's interface is stable for a given name.
    let found = unsafe { library.get::<T>(symbol) };
    found
        .map(|function| *function)
        .map_err(|_| LoadError::TooOld {
            symbol,
            version: version.map_or_else(|| "found here".to_owned(), ToString::to_string),
        })
}

/// The driver's text for a code; empty when it has none.
fn text(function: sys::GetErrorText, result: sys::CuResult) -> String {
    let mut text: *const c_char = std::ptr::null();
    // SAFETY: the driver stores one pointer; needs no initialization.
    let answer = unsafe { function(result, &raw mut text) };
    if answer != sys::SUCCESS || text.is_null() {
        return String::new();
    }
    // SAFETY: on success it points to a constant string inside the library.
    let text = unsafe { CStr::from_ptr(text) };
    text.to_string_lossy().into_owned()
}

impl CheckpointApi for Functions {
    /// A restore on a GPU without persistence mode needs `cuInit` in the caller
    /// (the driver's documentation): nothing else keeps such a GPU awake while
    /// the job has let go of it. Where every GPU is known to have persistence
    /// mode, all of `cuInit`'s memory is saved. Decided at the first call.
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
        // SAFETY: the args are 64 bytes, zero but for the pairs, of which there are as many as
        // counted and which outlive the call; a driver that knows no pairs is given none.
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
    fn a_missing_library_names_what_was_sought() {
        let error = Functions::load("libcuda-is-not-here.so.1").err().unwrap();
        assert!(matches!(error, LoadError::Library { .. }), "{error}");
        assert!(
            error.to_string().contains("libcuda-is-not-here.so.1"),
            "{error}"
        );
    }

    #[test]
    fn a_library_without_the_functions_names_the_driver_that_has_them() {
        // Any library that is not libcuda stands in for an old one.
        let error = Functions::load("libm.so.6").err().unwrap();
        assert!(matches!(error, LoadError::TooOld { .. }), "{error}");
        let text = error.to_string();
        assert!(
            text.contains("cuDriverGetVersion") && text.contains("570"),
            "{text}"
        );
    }
}
