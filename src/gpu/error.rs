//! Errors of the steps on the job's GPU state.

use super::resident::ResidentError;
use super::unsupported::Unsupported;
use crate::copier::CopierError;
use crate::cuda;
use crate::job;
use crate::run::environment::HWLOC_WITHOUT_GPUS;
use crate::run::failure_kind::FailureKind;
use crate::store::WriteError;

/// Reason why a step on the job's GPU state failed. The job computes, unless [`GpuError::job_is_lost`] returns true.
#[derive(Debug, thiserror::Error)]
pub enum GpuError {
    /// The process tree could not be read.
    #[error("cannot read the job's process tree")]
    Tree(#[from] job::TreeError),
    /// GPU memory could not be written into the image.
    #[error("cannot write the image")]
    Store(#[source] Box<WriteError>),
    /// The job has state that the driver could not restore. Nothing was frozen.
    #[error("cannot suspend the GPU state")]
    Unsupported(#[from] Unsupported),
    /// The driver does not answer queries about a stopped process. Nothing was frozen.
    #[error(
        "cannot suspend the GPU state of process {pid}, which is stopped (SIGSTOP or a debugger): continue it, for \
         example by kill -CONT"
    )]
    Stopped {
        /// Pid as the job sees it.
        pid: i32,
    },
    /// The CUDA driver's library could not be used.
    #[error("cannot load the CUDA driver")]
    Driver(#[from] cuda::LoadError),
    /// The GPU state could not be suspended. The job computes, unless the cause reports otherwise.
    #[error("cannot suspend the GPU state")]
    Suspend(#[source] Box<cuda::TreeError>),
    /// The GPU state could not be resumed: the job does not compute.
    #[error("cannot resume the GPU state; the job no longer computes and will be restored")]
    Resume(#[source] Box<cuda::TreeError>),
    /// The threads of a CUDA process could not be stopped.
    #[error("cannot stop the job's threads")]
    Halt(#[from] job::HaltError),
    /// Device memory could not stay on the GPUs, or could not be restored from there.
    #[error("cannot keep GPU memory for the image")]
    Resident(#[source] Box<ResidentError>),
    /// A process is inside `cuInit`, or began to share memory on a GPU after the snapshot started.
    #[error("process {pid} is starting to use the GPU; another attempt follows later")]
    Device {
        /// Pid as the job sees it.
        pid: i32,
    },
    /// A process has the GPU's devices open and the driver does not know it as a user of CUDA, though it did not inherit
    /// them. It is about to become one, or uses the GPU in another way.
    #[error(
        "process {process} has the GPU's device files open, but does not use CUDA: GPU \
         state of OpenCL, Vulkan or a plugin of hwloc cannot be restored. Let the process close the GPU (for hwloc, \
         which MPI uses, with {}={} in its environment), or wait if it is starting CUDA",
        HWLOC_WITHOUT_GPUS.0,
        HWLOC_WITHOUT_GPUS.1
    )]
    Holder {
        /// The process.
        process: job::ProcessName,
    },
    /// A process has device files of the GPU after its suspend: not all its GPU state is CUDA's own.
    #[error(
        "process {process} keeps device files of the GPU while CUDA is suspended: it has exported GPU memory \
         (cudaMemPoolExportToShareableHandle, cuMemExportToShareableHandle), or uses the GPU by another interface than \
         CUDA as well (Vulkan, OpenGL, video encoding), which cannot be restored"
    )]
    Kept {
        /// The process.
        process: job::ProcessName,
    },
    /// A process is about to exit: the driver has shut down in it.
    #[error("process {pid} is about to stop using the GPU; another attempt follows later")]
    Leaving {
        /// Pid as the job sees it.
        pid: i32,
    },
}

impl GpuError {
    /// Returns the kind of failure.
    pub(crate) fn kind(&self) -> FailureKind {
        match self {
            Self::Tree(_) => FailureKind::System,
            Self::Store(_) => FailureKind::Store,
            Self::Unsupported(_) | Self::Kept { .. } => FailureKind::Unsupported,
            Self::Device { .. } | Self::Holder { .. } | Self::Leaving { .. } => {
                FailureKind::Changed
            }
            Self::Stopped { .. } => FailureKind::Busy,
            Self::Driver(_) | Self::Resume(_) => FailureKind::Driver,
            Self::Suspend(error) => FailureKind::of(error),
            Self::Resident(error) => error.kind(),
            Self::Halt(error) => FailureKind::of_halt(error),
        }
    }

    /// Returns true if the job may be left in a state in which it cannot compute.
    #[must_use]
    pub fn job_is_lost(&self) -> bool {
        match self {
            Self::Resume(_) => true,
            Self::Suspend(error) => !error.is_computing(),
            Self::Resident(error) => error.job_is_lost(),
            _ => false,
        }
    }

    /// Returns true if the cause passes within moments, so that another attempt may succeed.
    pub(crate) fn is_passing(&self) -> bool {
        matches!(
            self,
            Self::Device { .. } | Self::Holder { .. } | Self::Leaving { .. }
        )
    }
}

impl From<ResidentError> for GpuError {
    fn from(error: ResidentError) -> Self {
        match error {
            ResidentError::Newcomer { pid } => Self::Device { pid },
            ResidentError::Agent { pid, source } if source.has_shut_down() => Self::Leaving { pid },
            error => Self::Resident(Box::new(error)),
        }
    }
}

impl From<CopierError> for GpuError {
    fn from(error: CopierError) -> Self {
        ResidentError::from(error).into()
    }
}

impl From<WriteError> for GpuError {
    fn from(error: WriteError) -> Self {
        Self::Store(Box::new(error))
    }
}
