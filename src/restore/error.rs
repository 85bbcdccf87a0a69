//! Errors of a restore.

use std::error::Error;
use std::io;
use std::path::PathBuf;
use std::time::Duration;

use crate::cuda;
use crate::files::RollbackError;
use crate::gpu::mapping::Refusal;
use crate::gpu::resident::ResidentError;
use crate::job::{self, RewindError};
use crate::known_errors::is_disk_full;
use crate::sandbox::SandboxError;
use crate::store::{ReadError, RemoteError};
use crate::sync::ThreadsError;

/// Reasons why a restore failed. No process of the image is running.
#[derive(Debug, thiserror::Error)]
pub enum RestoreError {
    /// The image cannot be read.
    #[error("cannot read the image")]
    Read(#[source] Box<ReadError>),
    /// The image's facts are not valid.
    #[error("cannot read the image's facts")]
    Facts(#[source] serde_json::Error),
    /// The image's processes have ids that this user cannot give them. Nothing was changed.
    #[error(
        "cannot restore an image of user {0}, made without privileges: only that user can; run ckpt-run as that user (sudo -u '#{0}')"
    )]
    OtherUser(u32),
    /// The working folder has another name. Nothing was changed.
    #[error(
        "cannot restore the job in {}: this folder was renamed to {} since the snapshot; rename it back",
        then.display(),
        now.display()
    )]
    Renamed {
        /// Its path at the snapshot.
        then: PathBuf,
        /// Its path.
        now: PathBuf,
    },
    /// The processor lacks instructions that the job may use. Nothing was changed.
    #[error(
        "cannot restore on this processor ({now}): it lacks {missing}, which that of the image ({then}) has; use a machine \
         with the same instructions"
    )]
    Cpu {
        /// The instructions, some of them if they are many.
        missing: String,
        /// Model of the image's processor.
        then: String,
        /// Model of this machine's.
        now: String,
    },
    /// The image contains GPU state that this machine cannot accept. Nothing was changed.
    #[error("cannot restore GPU state")]
    Gpu(#[from] Refusal),
    /// The job's open files cannot be rolled back.
    #[error("cannot put the job's files back")]
    Files(#[from] RewindError),
    /// The files that the job writes cannot be rolled back.
    #[error("cannot put the job's files back")]
    Rollback(#[from] RollbackError),
    /// The list of the files that the job writes is not valid.
    #[error("cannot read the image's list of files")]
    KeptList(#[source] io::Error),
    /// Sockets of the dead job still occupy its addresses, or packets cannot be held back.
    #[error("cannot restore the job's connections")]
    Sockets(#[from] job::SocketsError),
    /// Another user has replaced files that the restore opens.
    #[error("cannot restore the processes")]
    Landed(#[from] job::LandedError),
    /// The kernel did not accept state that the plugin gives back. No process of the image has run.
    #[error(
        "cannot restore state of the processes that CRIU does not know (AMX tiles, protection keys or the dispatch of system \
         calls): the kernel or the processor of this machine does not accept it; use a machine like that of the image"
    )]
    Omitted,
    /// CRIU did not call the plugin before the tasks ran, so their open files were not checked.
    #[error(
        "cannot check the open files of the restored processes: this CRIU does not ask its plugin before they run; use CRIU 3.17 or later with plugins"
    )]
    NotAsked,
    /// Newer images could not be abandoned in the remote store, from which another machine would continue. Nothing was
    /// changed.
    #[error("cannot return to an older image of the remote run")]
    Remote(#[source] Box<RemoteError>),
    /// A stream or socket of ckpt-run failed.
    #[error("cannot prepare the restore")]
    Prepare(#[source] io::Error),
    /// Threads could not be started.
    #[error(transparent)]
    Threads(#[from] ThreadsError),
    /// The sandbox failed.
    #[error("cannot run CRIU in the sandbox")]
    Sandbox(#[from] SandboxError),
    /// CRIU failed.
    #[error("cannot restore the processes: {reason}")]
    Criu {
        /// CRIU's reason, and the path of its log.
        reason: String,
    },
    /// CRIU reported a lack of memory or disk space or a killed process, or exited before it opened its log. The image
    /// is not at fault.
    #[error("cannot restore the processes: {reason}")]
    Shortage {
        /// CRIU's reason, and the path of its log.
        reason: String,
    },
    /// CRIU was killed, perhaps by the kernel for lack of memory. The image is not at fault.
    #[error(
        "cannot restore the processes: CRIU was killed by signal {signal}{log}; is there enough memory?"
    )]
    Killed {
        /// The signal.
        signal: i32,
        /// CRIU's log file in brackets, if it exists.
        log: String,
    },
    /// CRIU did not finish in time. None of its processes is running.
    #[error("cannot restore the processes within {0:?} (snapshot.timeout)")]
    Slow(Duration),
    /// A thread of ckpt-run panicked because of a bug.
    #[error("cannot restore: a bug in ckpt-run, please report it")]
    Panicked,
    /// The restored processes do not exist.
    #[error("cannot find the restored processes")]
    Tree(#[from] job::TreeError),
    /// A timer of the restored job cannot be started.
    #[error("cannot start the job's timers again")]
    Timers(#[from] job::TimersError),
    /// The CUDA driver's library could not be used.
    #[error("cannot load the CUDA driver")]
    Driver(#[from] cuda::LoadError),
    /// A process of the image that used CUDA no longer exists.
    #[error(
        "cannot find process {pid}, whose GPU state the image contains: it exited as soon as it was restored"
    )]
    CudaProcessMissing {
        /// Pid as the job sees it.
        pid: i32,
    },
    /// A process would have run before its GPU memory was back.
    #[error(
        "process {pid} is not stopped and would use the GPU too early: a bug in ckpt-run, please report it"
    )]
    TooEarly {
        /// Pid as the job sees it.
        pid: i32,
    },
    /// The image's GPUs cannot be identified.
    #[error("cannot identify the image's GPUs")]
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
    /// The restore failed after the processes may have run and changed files.
    #[error(transparent)]
    Late(Box<RestoreError>),
}

impl RestoreError {
    /// Returns true if a later attempt may succeed, because the image is not at fault: pids, addresses, memory and GPUs
    /// belong to the machine. All bytes that CRIU received were verified.
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

    /// Returns true if the cause is outside of the image and may be temporary: CRIU was killed or hung, or memory,
    /// disk space or threads were short.
    #[must_use]
    pub fn is_outside_image(&self) -> bool {
        match self {
            Self::Killed { .. }
            | Self::Remote(_)
            | Self::Slow(_)
            | Self::Threads(_)
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
