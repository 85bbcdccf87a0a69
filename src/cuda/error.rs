//! What can go wrong with the driver, in words a user can act on.
//!
//! A failed call names the pid, the call and CUDA's own code; a failed
//! operation on the whole job adds in what state it left each process.

use std::fmt;
use std::time::Duration;

use thiserror::Error;

use super::process::State;
use super::sys;

/// Why the CUDA driver cannot be used on this machine.
#[derive(Debug, Error)]
pub enum LoadError {
    /// No GPU driver is loaded, or no GPU was given to this container.
    #[error("find an NVIDIA GPU: neither /dev/nvidiactl nor /dev/nvidia0 exists")]
    NoDevice,
    /// The device nodes exist but the driver's library does not.
    #[error(
        "load {library}: it comes with the NVIDIA driver (in a container: \
         NVIDIA_DRIVER_CAPABILITIES needs \"compute\")"
    )]
    Library {
        /// The name that was sought.
        library: &'static str,
        /// The dynamic loader's words.
        #[source]
        source: libloading::Error,
    },
    /// The library is there and lacks what is needed.
    #[error(
        "use the NVIDIA driver {version}: it has no {symbol}; drivers 570 and newer have \
         (the job still runs, without snapshots of GPU memory)"
    )]
    TooOld {
        /// The missing function.
        symbol: &'static str,
        /// The driver that was found.
        version: String,
    },
    /// The library does not answer.
    #[error("ask the CUDA driver for its version: {code}")]
    Version {
        /// What it answered.
        code: Code,
    },
}

/// Why the machine's GPUs cannot be listed.
#[derive(Debug, Error)]
pub enum GpuError {
    /// A file of the kernel driver cannot be read.
    #[error("read {path}")]
    Read {
        /// The file or folder.
        path: String,
        /// Why.
        #[source]
        source: std::io::Error,
    },
    /// Neither source of the list exists.
    #[error("list the GPUs: no libnvidia-ml.so.1 and no /proc/driver/nvidia/gpus")]
    NoSource,
    /// The management library answered with an error.
    #[error("list the GPUs: {call} answered {number} ({meaning})")]
    Nvml {
        /// The function.
        call: &'static str,
        /// NVML's code.
        number: i32,
        /// NVML's words.
        meaning: String,
    },
}

/// A CUDA error code with the driver's name and words for it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Code {
    /// `CUresult`.
    pub number: i32,
    /// Such as `CUDA_ERROR_NOT_SUPPORTED`; empty when the driver does not know it.
    pub name: String,
    /// The driver's own explanation; may be empty.
    pub meaning: String,
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

/// One call on one process failed.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{call} CUDA process {pid}: {code}{}", Advice(advice(*call, code.number)))]
pub struct CallError {
    /// The process, as this process sees it.
    pub pid: i32,
    /// What was asked.
    pub call: Call,
    /// What the driver answered.
    pub code: Code,
}

struct Advice(Option<&'static str>);

impl fmt::Display for Advice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.map_or(Ok(()), |advice| write!(f, "; {advice}"))
    }
}

/// What the user can do about a code, where that is known (driver 580.159).
fn advice(call: Call, number: i32) -> Option<&'static str> {
    match (call, number) {
        (Call::Checkpoint | Call::Restore, sys::NOT_SUPPORTED) => Some(
            "the job uses managed memory, CUDA IPC or peer-mapped GPU memory, which this driver \
             cannot suspend; for NCCL set NCCL_P2P_DISABLE=1 NCCL_CUMEM_ENABLE=0 \
             NCCL_CUMEM_HOST_ENABLE=0",
        ),
        (Call::Restore, sys::INVALID_VALUE) => Some(
            "a GPU that the process used is not visible here, or the process shares GPU memory \
             with another one",
        ),
        (Call::Restore, sys::OUT_OF_MEMORY) => {
            Some("the GPU has less free memory than the process had in use")
        }
        (Call::Checkpoint, sys::OUT_OF_MEMORY) => {
            Some("the host has too little memory for a copy of the GPU memory")
        }
        (_, sys::NOT_INITIALIZED) => Some("the process does not use CUDA"),
        (_, sys::NO_DEVICE) => Some("the driver sees no GPU"),
        (_, sys::OPERATING_SYSTEM) => {
            Some("the process has ended, or may not be controlled by this user")
        }
        (_, sys::ILLEGAL_STATE) => {
            Some("something else is suspending or resuming this process at the same time")
        }
        (_, sys::NOT_PERMITTED) => Some("run as the job's user or as root"),
        (_, sys::SYSTEM_DRIVER_MISMATCH) => {
            Some("libcuda.so.1 and the kernel driver are of different versions")
        }
        _ => None,
    }
}

/// A lock of one process failed.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum LockError {
    /// Its submitted GPU work was not done in time. The process goes on computing.
    #[error("lock CUDA process {pid}: its GPU work did not finish within {timeout:?}")]
    TimedOut {
        /// The process.
        pid: i32,
        /// How long it was waited for.
        timeout: Duration,
    },
    /// The driver refused.
    #[error(transparent)]
    Call(#[from] CallError),
}

/// An operation on the whole job failed. What could be undone was undone.
#[derive(Debug, Error)]
pub enum TreeError {
    /// More processes than threads that are reasonable to wait with.
    #[error("suspend {count} CUDA processes at once: at most {most} are supported")]
    TooMany {
        /// How many there are.
        count: usize,
        /// How many are supported.
        most: usize,
    },
    /// The job's GPU work never stood still in all processes at once.
    #[error(
        "lock the job's CUDA processes: GPU work of {} did not finish in {attempts} attempts \
         over {:.1} s; {aftermath}",
        Pids(busy), waited.as_secs_f64()
    )]
    TimedOut {
        /// The processes that were still busy in the last attempt.
        busy: Vec<i32>,
        /// How often all were tried together.
        attempts: u32,
        /// For how long.
        waited: Duration,
        /// What was left.
        aftermath: Aftermath,
    },
    /// A process cannot be locked.
    #[error("lock the job's CUDA processes; {aftermath}")]
    Lock {
        /// The first failure.
        #[source]
        source: CallError,
        /// What was left.
        aftermath: Aftermath,
    },
    /// GPU memory could not be moved to the host.
    #[error("suspend the job's GPU state; {aftermath}")]
    Suspend {
        /// The first failure.
        #[source]
        source: CallError,
        /// What was left.
        aftermath: Aftermath,
    },
    /// GPU memory could not be moved back, or a process could not be let go.
    #[error("resume the job's GPU state; {aftermath}")]
    Resume {
        /// What was left.
        aftermath: Aftermath,
    },
}

impl TreeError {
    /// What the failed operation left behind.
    #[must_use]
    pub fn aftermath(&self) -> Option<&Aftermath> {
        match self {
            Self::TooMany { .. } => None,
            Self::TimedOut { aftermath, .. }
            | Self::Lock { aftermath, .. }
            | Self::Suspend { aftermath, .. }
            | Self::Resume { aftermath } => Some(aftermath),
        }
    }

    /// Whether every process that still exists computes.
    #[must_use]
    pub fn is_computing(&self) -> bool {
        self.aftermath().is_none_or(Aftermath::is_computing)
    }
}

/// The processes that an operation and its undo did not leave running.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Aftermath {
    /// Empty when all of the job computes.
    pub stuck: Vec<Left>,
}

impl Aftermath {
    /// Whether every process that still exists computes.
    #[must_use]
    pub fn is_computing(&self) -> bool {
        self.stuck.is_empty()
    }
}

impl fmt::Display for Aftermath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.is_computing() {
            return f.write_str("the job computes");
        }
        f.write_str("the job does not compute:")?;
        for (index, left) in self.stuck.iter().enumerate() {
            write!(f, "{} {left}", if index == 0 { "" } else { "," })?;
        }
        Ok(())
    }
}

/// A process that does not compute and could not be made to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Left {
    /// The process.
    pub pid: i32,
    /// Its state, if the driver still tells.
    pub state: Option<State>,
    /// The last call that failed on it.
    pub failure: Option<CallError>,
}

impl fmt::Display for Left {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "process {} is left ", self.pid)?;
        match self.state {
            Some(state) => write!(f, "{state}")?,
            None => f.write_str("in an unknown state")?,
        }
        self.failure
            .as_ref()
            .map_or(Ok(()), |failure| write!(f, " (cannot {failure})"))
    }
}

/// "process 300" or "processes 300, 301".
struct Pids<'a>(&'a [i32]);

impl fmt::Display for Pids<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.0.len() == 1 {
            "process"
        } else {
            "processes"
        })?;
        for (index, pid) in self.0.iter().enumerate() {
            write!(f, "{} {pid}", if index == 0 { "" } else { "," })?;
        }
        Ok(())
    }
}
