//! Errors of the CUDA driver, with a remedy where one is known.
//!
//! A failed call names the pid, the call and CUDA's own code. Errors of operations on many processes are in
//! [`super::job_processes`].

use std::fmt;
use std::time::Duration;

use thiserror::Error;

use super::driver_version::DriverVersion;
use super::state::State;
use super::sys;
use crate::known_errors::{self, Symptom};

/// The reason why the CUDA driver cannot be used on this machine.
#[derive(Debug, Error)]
pub enum LoadError {
    /// No GPU driver is loaded, or no GPU was given to this container.
    #[error("cannot find an NVIDIA GPU: neither /dev/nvidiactl nor /dev/nvidia0 exists")]
    NoDevice,
    /// The device nodes exist but the driver's library does not.
    #[error(
        "cannot load {library}: install the NVIDIA driver, which contains it (in a container: \
         NVIDIA_DRIVER_CAPABILITIES needs \"compute\")"
    )]
    Library {
        /// The library's name.
        library: &'static str,
        /// The dynamic loader's error.
        #[source]
        source: libloading::Error,
    },
    /// The library exists but lacks a required function.
    #[error(
        "cannot use the NVIDIA driver {version}: it has no {symbol}; install driver 570 or newer \
         (without it, jobs run, but their GPU memory cannot be snapshotted)"
    )]
    TooOld {
        /// The missing function.
        symbol: &'static str,
        /// The installed driver.
        version: String,
    },
    /// The library does not return its version.
    #[error("cannot query the version of the CUDA driver: {code}")]
    Version {
        /// The driver's result.
        code: Code,
    },
}

/// The reason why the machine's GPUs cannot be listed.
#[derive(Debug, Error)]
pub enum GpuError {
    /// A file of the kernel driver cannot be read.
    #[error("cannot read {path}")]
    Read {
        /// The file or folder.
        path: String,
        /// The system's error.
        #[source]
        source: std::io::Error,
    },
    /// Neither source of the list exists.
    #[error("cannot list the GPUs: neither libnvidia-ml.so.1 nor /proc/driver/nvidia/gpus exists")]
    NoSource,
    /// The management library returned an error.
    #[error("cannot list the GPUs with NVML")]
    Nvml(#[from] nvml_wrapper::error::NvmlError),
}

/// A CUDA error code with the driver's name and text for it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Code {
    /// `CUresult`.
    pub number: i32,
    /// The name, such as `CUDA_ERROR_NOT_SUPPORTED`; empty if the driver does not know the code.
    pub name: String,
    /// The driver's own explanation; may be empty.
    pub meaning: String,
}

impl Code {
    /// Returns true if the process does not use CUDA, or not yet.
    #[must_use]
    pub fn is_not_initialized(&self) -> bool {
        self.number == sys::NOT_INITIALIZED
    }
}

impl fmt::Display for Code {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.name.as_str(), self.meaning.as_str()) {
            ("", _) => write!(f, "CUDA error {}", self.number),
            (name, "") => write!(f, "{name} ({})", self.number),
            (name, meaning) => write!(f, "{name} ({}: {meaning})", self.number),
        }
    }
}

/// The driver's calls on a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Call {
    /// `cuCheckpointProcessGetState`
    GetState,
    /// `cuCheckpointProcessGetRestoreThreadId`
    GetRestoreThreadId,
    /// `cuCheckpointProcessLock`
    Lock,
    /// `cuCheckpointProcessCheckpoint`
    Checkpoint,
    /// `cuCheckpointProcessRestore`
    Restore,
    /// `cuCheckpointProcessUnlock`
    Unlock,
}

impl fmt::Display for Call {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::GetState => "query",
            Self::GetRestoreThreadId => "find the restore thread of",
            Self::Lock => "lock",
            Self::Checkpoint => "checkpoint",
            Self::Restore => "restore",
            Self::Unlock => "unlock",
        })
    }
}

/// A failed driver call on one process.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("cannot {call} CUDA process {pid}: {code}{}", Advice(*call, code.number))]
pub struct CallError {
    /// The process, by its pid as the calling process sees it.
    pub pid: i32,
    /// The call.
    pub call: Call,
    /// The driver's result.
    pub code: Code,
}

/// The known meaning of a code, and the remedy.
struct Advice(Call, i32);

impl fmt::Display for Advice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let call = self.0.to_string();
        match known_errors::find(&[Symptom::Cuda(&call, self.1)]) {
            Some((known, _)) => write!(f, "; {}; {}", known.cause, known.remedy),
            None => Ok(()),
        }
    }
}

/// A failed lock of one process.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum LockError {
    /// The submitted GPU work was not finished in time. The process continues to compute.
    #[error("cannot lock CUDA process {pid}: its GPU work did not finish within {timeout:?}")]
    TimedOut {
        /// The process.
        pid: i32,
        /// The time limit of the wait.
        timeout: Duration,
    },
    /// The driver refused.
    #[error(transparent)]
    Call(#[from] CallError),
}

/// The driver does not support a map of GPUs. Nothing was done.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error(
    "cannot restore onto other GPUs with the NVIDIA driver {version}: install driver 580 or newer (CUDA 13.0), \
     or restore onto the same GPUs"
)]
pub struct MapError {
    /// The driver.
    pub version: DriverVersion,
}

/// A process was not restored onto other GPUs. It stays checkpointed, unless the driver's code means something else.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum RestoreOntoError {
    /// The driver does not support a map.
    #[error(transparent)]
    Map(#[from] MapError),
    /// The driver refused.
    #[error(transparent)]
    Call(#[from] CallError),
}

/// A process did not reach a state. Waiting does not change the process.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum WaitError {
    /// The process was in another state the whole time.
    #[error("CUDA process {pid} was not {wanted} within {waited:.1?}: it is {last}")]
    TimedOut {
        /// The process.
        pid: i32,
        /// The expected state.
        wanted: State,
        /// The state at the end of the wait.
        last: State,
        /// The duration of all attempts.
        waited: Duration,
    },
    /// The driver reports the process as failed: its state will never change.
    #[error(
        "CUDA process {pid} cannot become {wanted}: its CUDA state has failed permanently; end the process"
    )]
    Failed {
        /// The process.
        pid: i32,
        /// The expected state.
        wanted: State,
    },
    /// The driver does not report the state.
    #[error(transparent)]
    Call(#[from] CallError),
}
