//! Why there is no new image.

use std::io;
use std::time::Duration;

use super::describe::size;
use super::obstacle::Obstacle;
use super::resident::ResidentError;
use crate::copier::CopierError;
use crate::cuda::{self, CallError, TreeError};
use crate::job;
use crate::resident::AgentError;
use crate::sandbox::SandboxError;
use crate::store::WriteError;

/// `CUresult`s that say why a process could not be suspended.
const CUDA_ERROR_OUT_OF_MEMORY: i32 = 2;
const CUDA_ERROR_OPERATING_SYSTEM: i32 = 304;
const CUDA_ERROR_NOT_PERMITTED: i32 = 800;
const CUDA_ERROR_DEINITIALIZED: i32 = 4;
const CUDA_ERROR_NOT_SUPPORTED: i32 = 801;

/// Why there is no new image. The job computes, and older images are untouched, unless a variant says otherwise.
#[derive(Debug, thiserror::Error)]
pub enum SnapshotError {
    /// The process tree could not be read.
    #[error("cannot read the job's process tree")]
    Tree(#[source] job::TreeError),
    /// The open files could not be listed.
    #[error("cannot list the job's open files")]
    Files(#[from] job::FilesError),
    /// The TCP sockets could not be listed.
    #[error("cannot list the job's sockets")]
    Sockets(#[from] job::SocketsError),
    /// The timers could not be listed.
    #[error("cannot list the job's timers")]
    Timers(#[from] job::TimersError),
    /// A file's content could not be kept.
    #[error("cannot keep the content of {path}")]
    Content {
        /// The job's file.
        path: String,
        /// The reason.
        #[source]
        source: io::Error,
    },
    /// The store failed.
    #[error("cannot write the image")]
    Store(#[source] Box<WriteError>),
    /// There is no room for the image.
    #[error(
        "cannot write the image, the disk is full: free space where the store is, keep fewer images (--keep-last), or choose another --store"
    )]
    DiskFull(#[source] Box<WriteError>),
    /// The image would leave too little of the disk free. Nothing was frozen or written.
    #[error(
        "cannot begin the image: it needs about {} and {} must stay free (snapshot.min_free), but {} are free where the \
         store is: free space there, keep fewer images (--keep-last, `ckpt-run forget`), or choose another --store",
        size(*image),
        size(*floor),
        size(*free)
    )]
    NoRoom {
        /// Bytes that the image is expected to have.
        image: u64,
        /// Bytes that must stay free.
        floor: u64,
        /// Bytes that are free.
        free: u64,
    },
    /// The GPU's content does not fit into host memory; the kernel would kill the job.
    #[error(
        "cannot suspend the GPU state: it needs {} of host memory and {} to spare, and {} are available; free some, or          raise the memory limit of the container",
        size(*needed),
        size(*headroom),
        size(*available)
    )]
    NoMemory {
        /// Bytes of GPU memory.
        needed: u64,
        /// Bytes of host memory that are wanted beyond it.
        headroom: u64,
        /// Bytes of host memory.
        available: u64,
    },
    /// The job has what the driver could not bring back. Nothing was frozen.
    #[error("cannot suspend the GPU state")]
    Obstacle(#[from] Obstacle),
    /// The driver says nothing about a stopped process. Nothing was frozen.
    #[error(
        "cannot suspend the GPU state of process {pid}, which is stopped (SIGSTOP or a debugger): let it go on, as with \
         kill -CONT"
    )]
    Stopped {
        /// Pid as the job sees it.
        pid: i32,
    },
    /// The CUDA driver's library could not be used.
    #[error("cannot load the CUDA driver")]
    Driver(#[from] cuda::LoadError),
    /// The GPU state could not be suspended. The job computes, unless the cause says otherwise.
    #[error("cannot suspend the GPU state")]
    Suspend(#[source] Box<cuda::TreeError>),
    /// The GPU state did not come back: the job does not compute.
    #[error("cannot resume the GPU state; the job does not compute any more and will be restored")]
    Resume(#[source] Box<cuda::TreeError>),
    /// The threads of a CUDA process could not be stopped.
    #[error("cannot stop the job's threads")]
    Halt(#[from] job::HaltError),
    /// Device memory could not stay on the GPUs, or did not come back from there.
    #[error("cannot keep GPU memory for the image")]
    Resident(#[source] Box<ResidentError>),
    /// A process has the GPU's devices open, and whether it uses them is not to be known now; or it has come to share
    /// memory there since the snapshot was begun.
    #[error(
        "cannot take a snapshot while process {pid} begins to use the GPU; it is tried again later"
    )]
    Device {
        /// Pid as the job sees it.
        pid: i32,
    },
    /// A process is about to end: the driver has ended in it.
    #[error(
        "cannot take a snapshot while process {pid} ends its use of the GPU; it is tried again later"
    )]
    Leaving {
        /// Pid as the job sees it.
        pid: i32,
    },
    /// A socket or a stream of our own failed.
    #[error("cannot prepare the dump")]
    Prepare(#[source] io::Error),
    /// The sandbox failed.
    #[error("cannot run CRIU in the sandbox")]
    Sandbox(#[from] SandboxError),
    /// CRIU failed.
    #[error("cannot dump the processes: {reason}")]
    Criu {
        /// Its reason, and where its log is.
        reason: String,
    },
    /// A thread of ours panicked, which is a mistake in this program.
    #[error("cannot take the snapshot: a mistake in ckpt-run, please report it")]
    Panicked,
    /// The image stream broke.
    #[error("cannot receive the image from CRIU")]
    Stream(#[source] io::Error),
    /// CRIU did not finish in time.
    #[error("cannot dump the processes within {0:?} (snapshot.timeout)")]
    Slow(Duration),
    /// A hook called it off. Nothing was frozen.
    #[error("the hook before_snapshot called it off (exit code 75)")]
    Vetoed,
    /// The job died while it was dumped.
    #[error("cannot take a snapshot of a job that has ended")]
    Ended,
    /// CRIU was killed at work in the job: that computes, but nobody knows whether as before.
    #[error("cannot trust process {pid} of the job any more: CRIU was killed at work in it")]
    Doubtful {
        /// Pid as the job sees it.
        pid: i32,
        /// What CRIU's end meant for the snapshot.
        #[source]
        source: Box<SnapshotError>,
    },
}

/// Why snapshots fail, in a word for logs and counters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FailureKind {
    /// The GPU work did not stand still in time.
    Busy,
    /// Processes came to the GPU all the time.
    Changed,
    /// The job uses what cannot be brought back.
    Unsupported,
    /// Too little host memory.
    Memory,
    /// Too little disk space.
    Disk,
    /// We may not control the job's processes.
    Privilege,
    /// The CUDA driver cannot do it, or failed.
    Driver,
    /// CRIU cannot do it, or failed.
    Criu,
    /// The store failed.
    Store,
    /// A hook called it off.
    Vetoed,
    /// The job ended.
    Ended,
    /// Something of the system's, or a mistake of ours.
    System,
}

impl FailureKind {
    /// The word.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Busy => "busy",
            Self::Changed => "changed",
            Self::Unsupported => "unsupported",
            Self::Memory => "memory",
            Self::Disk => "disk",
            Self::Privilege => "privilege",
            Self::Driver => "driver",
            Self::Criu => "criu",
            Self::Store => "store",
            Self::Vetoed => "vetoed",
            Self::Ended => "ended",
            Self::System => "system",
        }
    }
}

impl FailureKind {
    /// The kind of a halt that failed.
    pub(super) fn of_halt(error: &job::HaltError) -> Self {
        match error {
            job::HaltError::Trace { .. } => Self::Privilege,
            job::HaltError::Slow { .. } => Self::Busy,
            job::HaltError::Threads { .. } => Self::Ended,
        }
    }

    /// The kind of a suspend that failed.
    pub(super) fn of(error: &TreeError) -> Self {
        match error {
            TreeError::TimedOut { .. } => Self::Busy,
            TreeError::Lock { source, .. }
            | TreeError::Suspend { source, .. }
            | TreeError::Query(source) => kind_of(source),
            TreeError::Map(_)
            | TreeError::NotRunning { .. }
            | TreeError::Mixed { .. }
            | TreeError::TooMany { .. }
            | TreeError::Resume { .. } => Self::Driver,
        }
    }
}

/// What kind of failure a code of the driver's is, of a call that was to stop a process.
fn kind_of(error: &CallError) -> FailureKind {
    match error.code.number {
        CUDA_ERROR_NOT_SUPPORTED => FailureKind::Unsupported,
        CUDA_ERROR_NOT_PERMITTED | CUDA_ERROR_OPERATING_SYSTEM => FailureKind::Privilege,
        CUDA_ERROR_OUT_OF_MEMORY => FailureKind::Memory,
        _ => FailureKind::Driver,
    }
}

impl SnapshotError {
    /// The kind of failure.
    #[must_use]
    pub fn kind(&self) -> FailureKind {
        match self {
            Self::Store(_) => FailureKind::Store,
            Self::DiskFull(_) | Self::NoRoom { .. } => FailureKind::Disk,
            Self::NoMemory { .. } => FailureKind::Memory,
            Self::Obstacle(_)
            | Self::Files(job::FilesError::Semaphore { .. } | job::FilesError::Name(_)) => {
                FailureKind::Unsupported
            }
            Self::Device { .. } | Self::Leaving { .. } => FailureKind::Changed,
            Self::Stopped { .. } => FailureKind::Busy,
            Self::Driver(_) | Self::Resume(_) => FailureKind::Driver,
            Self::Suspend(error) => FailureKind::of(error),
            Self::Resident(error) => error.kind(),
            Self::Halt(error) => FailureKind::of_halt(error),
            Self::Criu { .. } | Self::Slow(_) | Self::Stream(_) => FailureKind::Criu,
            Self::Vetoed => FailureKind::Vetoed,
            Self::Ended => FailureKind::Ended,
            Self::Doubtful { source, .. } => source.kind(),
            Self::Tree(_)
            | Self::Files(job::FilesError::Process { .. })
            | Self::Sockets(_)
            | Self::Timers(_)
            | Self::Content { .. }
            | Self::Prepare(_)
            | Self::Sandbox(_)
            | Self::Panicked => FailureKind::System,
        }
    }

    /// Whether the job may be left in a state in which it cannot compute.
    #[must_use]
    pub fn job_is_lost(&self) -> bool {
        match self {
            Self::Resume(_) => true,
            Self::Suspend(error) => !error.is_computing(),
            Self::Resident(error) => error.job_is_lost(),
            _ => false,
        }
    }

    /// Whether it is over in a moment: the snapshot is worth another attempt.
    pub(super) fn is_passing(&self) -> bool {
        matches!(self, Self::Device { .. } | Self::Leaving { .. })
    }

    /// Whether the job computes, but is better restored.
    #[must_use]
    pub fn job_is_doubtful(&self) -> bool {
        matches!(self, Self::Doubtful { .. })
    }
}

impl From<job::TreeError> for SnapshotError {
    fn from(error: job::TreeError) -> Self {
        match error {
            // The tree's root ends with the job.
            job::TreeError::NoRoot => Self::Ended,
            job::TreeError::Process { .. } | job::TreeError::TooMany => Self::Tree(error),
        }
    }
}

impl From<ResidentError> for SnapshotError {
    fn from(error: ResidentError) -> Self {
        match error {
            ResidentError::Newcomer { pid } => Self::Device { pid },
            ResidentError::Agent {
                source:
                    AgentError::Driver {
                        pid,
                        code: CUDA_ERROR_DEINITIALIZED,
                        ..
                    },
                ..
            } => Self::Leaving { pid },
            error => Self::Resident(Box::new(error)),
        }
    }
}

impl From<CopierError> for SnapshotError {
    fn from(error: CopierError) -> Self {
        ResidentError::from(error).into()
    }
}

impl From<WriteError> for SnapshotError {
    fn from(error: WriteError) -> Self {
        if error.is_disk_full() {
            Self::DiskFull(Box::new(error))
        } else {
            Self::Store(Box::new(error))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::{Aftermath, Call, Code};

    #[test]
    fn the_driver_s_answer_tells_the_kind_of_failure() {
        let cases = [
            (CUDA_ERROR_NOT_SUPPORTED, FailureKind::Unsupported),
            (CUDA_ERROR_NOT_PERMITTED, FailureKind::Privilege),
            (CUDA_ERROR_OPERATING_SYSTEM, FailureKind::Privilege),
            (CUDA_ERROR_OUT_OF_MEMORY, FailureKind::Memory),
            (999, FailureKind::Driver),
        ];
        for (number, kind) in cases {
            let source = CallError {
                pid: 7,
                call: Call::Checkpoint,
                code: Code {
                    number,
                    name: String::new(),
                    meaning: String::new(),
                },
            };
            let aftermath = Aftermath::default();
            let error = TreeError::Suspend { source, aftermath };
            assert_eq!(
                SnapshotError::Suspend(Box::new(error)).kind(),
                kind,
                "{number}"
            );
        }
    }
}
