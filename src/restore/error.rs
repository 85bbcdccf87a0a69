//! The reasons why an image did not become a running job.

use std::error::Error;
use std::io;
use std::time::Duration;

use crate::cuda;
use crate::files::RollbackError;
use crate::gpu::mapping::Refusal;
use crate::gpu::resident::ResidentError;
use crate::job::{self, RewindError};
use crate::known_errors::is_disk_full;
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
    /// The dead job's sockets still hold its addresses, or packets cannot be held back.
    #[error("cannot restore the job's connections")]
    Sockets(#[from] job::SocketsError),
    /// Somebody leads the restore to other files than the job's.
    #[error("cannot restore the processes")]
    Landed(#[from] job::LandedError),
    /// CRIU did not ask before the tasks ran, so nothing says what they have open.
    #[error(
        "cannot tell what the restored processes have open: this CRIU does not ask its plugin before they run; use CRIU 3.17 or later with plugins"
    )]
    NotAsked,
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
    /// CRIU reported a lack of memory or disk space or that a restored process was killed, or ended before it opened its
    /// log: the image is not at fault.
    #[error("cannot restore the processes: {reason}")]
    Shortage {
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
    /// The restore failed after the processes may have run: they may have changed files.
    #[error(transparent)]
    Late(Box<RestoreError>),
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
            Self::Late(error) => error.image_may_be_good(),
            _ => true,
        }
    }

    /// Returns true if the reason lies outside the image and may be gone in a moment: CRIU was killed or hung, or memory
    /// or disk space was short.
    #[must_use]
    pub fn is_outside_image(&self) -> bool {
        match self {
            Self::Killed { .. }
            | Self::Slow(_)
            | Self::Shortage { .. }
            | Self::Files(RewindError::NoRoom { .. }) => true,
            Self::Late(error) => error.is_outside_image(),
            error => is_shortage(error),
        }
    }

    /// Returns true if processes of the image may have run.
    #[must_use]
    pub fn job_may_have_run(&self) -> bool {
        matches!(self, Self::Late(_) | Self::Panicked)
    }

    /// Marks an error after which processes of the image may have run.
    #[must_use]
    pub fn late(self) -> Self {
        match self {
            Self::Late(_) => self,
            error => Self::Late(Box::new(error)),
        }
    }
}

/// Returns true if one of the error's causes is a lack of memory or disk space.
fn is_shortage(error: &RestoreError) -> bool {
    let mut cause: Option<&(dyn Error + 'static)> = Some(error);
    while let Some(next) = cause {
        if let Some(io) = next.downcast_ref::<io::Error>()
            && (io.kind() == io::ErrorKind::OutOfMemory || is_disk_full(io))
        {
            return true;
        }
        cause = next.source();
    }
    false
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reason_outside_the_image_is_recognized() {
        let io = |errno| RestoreError::Prepare(io::Error::from_raw_os_error(errno));
        let killed = || RestoreError::Killed {
            signal: 9,
            log: String::new(),
        };
        assert!(killed().is_outside_image() && killed().late().is_outside_image());
        assert!(io(nix::libc::ENOMEM).is_outside_image());
        assert!(io(nix::libc::ENOSPC).is_outside_image());
        assert!(!io(nix::libc::EINVAL).is_outside_image());
        assert!(!RestoreError::Files(RewindError::Vanished("/log".into())).is_outside_image());
    }
}
