//! Reasons why a run did not begin, or could not continue.

use std::io;
use std::path::PathBuf;

use crate::criu::FindError;
use crate::restore::RestoreError;
use crate::run::encryption_key::KeyError;
use crate::run::exit_code::{LEASE_LOST, OURS};
use crate::run::program::ProgramError;
use crate::run::run_state::{NoSuchImage, RunStateError};
use crate::sandbox::{FewDescriptors, UserError};
use crate::store::{ImageId, LockError, OpenError, ReadError, RemoteError, WriteError};

/// Reason why a run did not begin, or could not continue. The job does not run.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// The program cannot be run.
    #[error(transparent)]
    Program(#[from] ProgramError),
    /// Too few open files are allowed.
    #[error(transparent)]
    Descriptors(#[from] FewDescriptors),
    /// The job cannot run as its user.
    #[error(transparent)]
    User(#[from] UserError),
    /// No usable CRIU.
    #[error(transparent)]
    Criu(#[from] FindError),
    /// The store's key cannot be had.
    #[error(transparent)]
    Key(#[from] KeyError),
    /// The store cannot be opened.
    #[error(transparent)]
    Open(#[from] OpenError),
    /// The store is in use.
    #[error(transparent)]
    Lock(#[from] LockError),
    /// The store cannot be read.
    #[error(transparent)]
    Read(#[from] ReadError),
    /// The store cannot be written.
    #[error(transparent)]
    Write(#[from] WriteError),
    /// The run's state cannot be read or written.
    #[error(transparent)]
    State(#[from] RunStateError),
    /// The store belongs to another command.
    #[error(
        "cannot continue: the store {} holds a run of another command\n  there: {there}\n  here:  {here}\n\
         run the same command, choose another --store, or start over with --fresh",
        store.display()
    )]
    OtherCommand {
        /// The store.
        store: PathBuf,
        /// The command of the run that is there.
        there: String,
        /// The command that was given.
        here: String,
    },
    /// The store holds no run.
    #[error(
        "cannot continue: the store {} holds no run; check --store, or start a run with ckpt-run -- CMD",
        .0.display()
    )]
    NoRun(PathBuf),
    /// The image is not there, or cannot be read.
    #[error(transparent)]
    NoSuchImage(#[from] NoSuchImage),
    /// Something of the system's failed.
    #[error("cannot {operation}")]
    System {
        /// The operation.
        operation: &'static str,
        /// The reason.
        #[source]
        source: io::Error,
    },
    /// The sandbox could not be started.
    #[error("cannot start the job")]
    Sandbox(#[from] crate::sandbox::SandboxError),
    /// The remote store cannot be used.
    #[error(transparent)]
    Remote(#[from] RemoteError),
    /// The job must not run here any longer.
    #[error(
        "the job was stopped: {}; its images are kept; run the same line again \
         to wait for the lease",
        why_lost(holder.as_deref())
    )]
    LeaseLost {
        /// Machine of the supervisor that has taken the lease, if it is known.
        holder: Option<String>,
    },
    /// Asked to give up rather than to start without an image.
    #[error(
        "cannot continue: none of the images could be restored; see the messages above, or start over with --fresh"
    )]
    NothingRestorable,
    /// The disk is full on which a restore keeps what it cuts off files. Older images would cut off more.
    #[error("cannot continue")]
    NoRoom(#[source] RestoreError),
    /// The image that was asked for did not become the job; no other is wanted.
    #[error(
        "cannot continue from image {image}; the run is unchanged; `ckpt-run list` shows other images"
    )]
    Chosen {
        /// The image.
        image: ImageId,
        /// Why it did not.
        #[source]
        source: RestoreError,
    },
}

impl RunError {
    /// The process's exit code: 126 or 127 when the command is at fault, 76 when the lease was lost, otherwise 125.
    #[must_use]
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Program(error) => error.exit_code(),
            Self::LeaseLost { .. } => LEASE_LOST,
            _ => OURS,
        }
    }
}

fn why_lost(holder: Option<&str>) -> String {
    match holder {
        Some(host) => format!("the supervisor on {host} continues the run"),
        None => "the lease of the run could not be renewed, and another machine may continue it"
            .to_owned(),
    }
}

/// Makes a failed system operation an error of the run.
pub(super) fn system(operation: &'static str) -> impl Fn(io::Error) -> RunError {
    move |source| RunError::System { operation, source }
}
