//! Reasons why device memory could not stay on the GPUs, or was not restored there.

use std::io;

use crate::agent_client::AgentError;
use crate::copier::CopierError;
use crate::cuda::TreeError;
use crate::job::HaltError;
use crate::store::ReadError;

use crate::run::failure_kind::FailureKind;

/// Error of resident memory. The job computes, unless [`ResidentError::job_is_lost`] returns true.
#[derive(Debug, thiserror::Error)]
pub enum ResidentError {
    /// The threads of a process could not be stopped.
    #[error("cannot stop the job's threads")]
    Halt(#[from] HaltError),
    /// The driver failed in a preceding or following step.
    #[error(transparent)]
    Cuda(Box<TreeError>),
    /// In every attempt a thread was halted within a CUDA call that blocks all others.
    #[error(
        "cannot stop the job between two CUDA calls in {tries} attempts; another attempt follows later (a job started \
         with cuda.memory = \"driver\" avoids this)"
    )]
    Busy {
        /// Number of attempts.
        tries: u32,
    },
    /// A request to an agent failed.
    #[error("the agent in process {pid} cannot handle its GPU memory")]
    Agent {
        /// Pid as the job sees it.
        pid: i32,
        /// The reason.
        #[source]
        source: AgentError,
    },
    /// A process shares device memory in a way that cannot be restored.
    #[error(
        "process {pid} shares GPU memory with other processes in a way that cannot be restored: by CUDA IPC in pieces \
         below 2 MiB or after a restore onto other GPUs, or by exported handles of cuMemCreate (NCCL: set \
         NCCL_CUMEM_ENABLE=0) or of memory pools"
    )]
    Shares {
        /// Pid as the job sees it.
        pid: i32,
    },
    /// A process maps device memory in a way that the agent does not follow.
    #[error(
        "process {pid} maps GPU memory in a way that cannot be restored: NVLink multicast (set NCCL_NVLS_ENABLE=0 and \
         TORCH_SYMM_MEM_DISABLE_MULTICAST=1), memory of cuMemCreate on the host, for sparse arrays or with access of \
         the host, or more than 16,384 mappings"
    )]
    Opaque {
        /// Pid as the job sees it.
        pid: i32,
    },
    /// The descriptor limit is too low. Released memory arrives as descriptors; if one does not arrive, its memory is
    /// lost.
    #[error(
        "the job's {pieces} pieces of GPU memory need more open descriptors than the limit of {limit}: raise it \
         (ulimit -Hn, or LimitNOFILE= of a systemd service)"
    )]
    Descriptors {
        /// Number of pieces of all processes.
        pieces: u64,
        /// The limit.
        limit: u64,
    },
    /// A process got memory that only an agent can save, after the snapshot was planned without it.
    #[error("process {pid} has begun to share GPU memory during the snapshot")]
    Newcomer {
        /// Pid as the job sees it.
        pid: i32,
    },
    /// Stopped processes could not be halted again, or cannot be resumed.
    #[error("cannot resume the job; it will be restored")]
    Stuck {
        /// The system's error.
        #[source]
        source: Box<ResidentError>,
    },
    /// The memory could not be restored, so its processes cannot compute.
    #[error("GPU memory of process {pid} is lost; the job will be restored")]
    Lost {
        /// Pid as the job sees it.
        pid: i32,
        /// The system's error.
        #[source]
        source: Box<ResidentError>,
    },
    /// A paused job's memory was not read from its image.
    #[error("the memory is in the image only")]
    Evicted,
    /// The copier failed.
    #[error("cannot copy GPU memory")]
    Copier(#[from] CopierError),
    /// A socket or pipe failed.
    #[error("cannot communicate with the agents")]
    Socket(#[from] io::Error),
    /// The image cannot be read.
    #[error("cannot read GPU memory from the image")]
    Read(#[source] Box<ReadError>),
    /// Memory was altered on its way from the GPU into the image, or back.
    #[error(
        "GPU memory differs from that of the snapshot, though the image's hashes are right: it was altered on its way \
         from the GPU or back. The GPU, its bus or main memory may be faulty: look for Xid or EDAC in the kernel's log"
    )]
    Altered,
    /// The image's facts are not valid.
    #[error("the image's description of its GPU memory is not valid")]
    Facts,
    /// A thread panicked, which is a bug of this program.
    #[error("this is a bug of ckpt-run, please report it")]
    Panicked,
}

impl ResidentError {
    /// Returns true if the job may be left in a state in which it cannot compute.
    #[must_use]
    pub fn job_is_lost(&self) -> bool {
        match self {
            Self::Lost { .. } | Self::Stuck { .. } => true,
            Self::Cuda(error) => !error.is_computing(),
            Self::Halt(_)
            | Self::Agent { .. }
            | Self::Busy { .. }
            | Self::Shares { .. }
            | Self::Opaque { .. }
            | Self::Descriptors { .. }
            | Self::Newcomer { .. }
            | Self::Copier(_)
            | Self::Socket(_)
            | Self::Read(_)
            | Self::Evicted
            | Self::Altered
            | Self::Facts
            | Self::Panicked => false,
        }
    }
}

impl ResidentError {
    /// Returns true if another attempt to restore may succeed.
    pub(crate) fn image_may_be_good(&self) -> bool {
        match self {
            Self::Read(error) => !error.condemns(),
            Self::Facts => false,
            _ => true,
        }
    }

    /// Returns the kind of failure for the snapshot.
    pub(crate) fn kind(&self) -> FailureKind {
        match self {
            Self::Halt(error) => FailureKind::of_halt(error),
            Self::Cuda(error) => FailureKind::of(error),
            Self::Shares { .. } | Self::Opaque { .. } | Self::Descriptors { .. } => {
                FailureKind::Unsupported
            }
            Self::Busy { .. }
            | Self::Newcomer { .. }
            | Self::Agent {
                source: AgentError::Busy { .. } | AgentError::TimedOut { .. },
                ..
            } => FailureKind::Busy,
            Self::Agent { .. }
            | Self::Lost { .. }
            | Self::Stuck { .. }
            | Self::Copier(_)
            | Self::Altered => FailureKind::Driver,
            Self::Read(_) => FailureKind::Store,
            Self::Socket(_) | Self::Evicted | Self::Facts | Self::Panicked => FailureKind::System,
        }
    }
}

impl From<ReadError> for ResidentError {
    fn from(error: ReadError) -> Self {
        Self::Read(Box::new(error))
    }
}

impl From<TreeError> for ResidentError {
    fn from(error: TreeError) -> Self {
        Self::Cuda(Box::new(error))
    }
}
