//! The reasons why an image did not become a running job.

use std::io;
use std::time::Duration;

use crate::cuda;
use crate::files::RollbackError;
use crate::gpu::mapping::Refusal;
use crate::gpu::resident::ResidentError;
use crate::job::{self, RewindError};
use crate::sandbox::SandboxError;
use crate::store::ReadError;

/// The reason why an image did not become a running job. No process of the image runs.
#[derive(Debug, thiserror::Error)]
pub enum RestoreError {
    /// The image cannot be read.
    #[error("cannot read the image")]
    Read(#[source] Box<ReadError>),
    /// The image's facts are not valid.
    #[error("cannot understand the image's facts")]
    Facts(#[source] serde_json::Error),
    /// The image contains GPU state that this machine cannot accept. Nothing was changed.
    #[error("cannot restore GPU state")]
    Gpu(#[from] Refusal),
    /// Files of the job cannot be put back.
    #[error("cannot put the job's files back")]
    Files(#[from] RewindError),
    /// Files that the job writes cannot be made what they were.
    #[error("cannot put the job's files back")]
    Rollback(#[from] RollbackError),
    /// The list of the files that the job writes is none.
    #[error("cannot understand the image's list of files")]
    KeptList(#[source] io::Error),
    /// The dead job's sockets still hold its addresses.
    #[error("cannot free the job's network addresses")]
    Sockets(#[from] job::SocketsError),
    /// A stream or socket of ckpt-run failed.
    #[error("cannot prepare the restore")]
    Prepare(#[source] io::Error),
    /// The sandbox failed.
    #[error("cannot run CRIU in the sandbox")]
    Sandbox(#[from] SandboxError),
    /// CRIU failed.
    #[error("cannot restore the processes: {reason}")]
    Criu {
        /// CRIU's reason, and the path of its log.
        reason: String,
    },
    /// CRIU was killed, perhaps by the kernel for lack of memory: the image is not at fault.
    #[error(
        "cannot restore the processes: CRIU was killed by signal {signal}{log}; is there enough memory?"
    )]
    Killed {
        /// The signal.
        signal: i32,
        /// CRIU's log file in brackets, if it exists.
        log: String,
    },
    /// CRIU did not finish in time; none of its processes runs any more.
    #[error("cannot restore the processes within {0:?} (snapshot.timeout)")]
    Slow(Duration),
    /// A thread of ckpt-run panicked, which is a bug in ckpt-run.
    #[error("cannot restore: a mistake in ckpt-run, please report it")]
    Panicked,
    /// The restored processes do not exist.
    #[error("cannot find the restored processes")]
    Tree(#[from] job::TreeError),
    /// A restored timer does not run.
    #[error("cannot start the job's timers again")]
    Timers(#[from] job::TimersError),
    /// The CUDA driver's library could not be used.
    #[error("cannot load the CUDA driver")]
    Driver(#[from] cuda::LoadError),
    /// A process of the image that used CUDA no longer exists.
    #[error(
        "cannot find process {pid}, whose GPU state the image holds: it ended as soon as it was restored"
    )]
    CudaProcessMissing {
        /// Pid as the job sees it.
        pid: i32,
    },
    /// The image's GPUs cannot be identified.
    #[error("cannot tell the image's GPUs")]
    Gpus(#[from] cuda::GpuMapError),
    /// The threads of a CUDA process could not be stopped.
    #[error("cannot stop the job's threads")]
    Halt(#[from] job::HaltError),
    /// Device memory could not be restored.
    #[error("cannot restore GPU memory")]
    Resident(#[source] Box<ResidentError>),
    /// The GPU state could not be resumed.
    #[error("cannot resume the GPU state")]
    Resume(#[source] Box<cuda::TreeError>),
}

impl RestoreError {
    /// Returns true if another attempt later may succeed because the image itself is not at fault: pids, addresses,
    /// memory and GPUs belong to the machine. Every byte that CRIU receives was verified.
    #[must_use]
    pub fn image_may_be_good(&self) -> bool {
        match self {
            Self::Read(error) => !error.condemns(),
            Self::Facts(_) => false,
            Self::Resident(error) => error.image_may_be_good(),
            _ => true,
        }
    }
}

impl From<ResidentError> for RestoreError {
    fn from(error: ResidentError) -> Self {
        Self::Resident(Box::new(error))
    }
}

impl From<ReadError> for RestoreError {
    fn from(error: ReadError) -> Self {
        Self::Read(Box::new(error))
    }
}
