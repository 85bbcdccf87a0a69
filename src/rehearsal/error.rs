//! Errors that prevent a rehearsal: a failure of ckpt-run or of the system. A limitation of the job is not an error but
//! a result.

use std::io;
use std::path::PathBuf;

/// An error that ended the rehearsal early. No part of the rehearsal is left.
#[derive(Debug, thiserror::Error)]
pub enum RehearsalError {
    /// The temporary folder cannot be created.
    #[error(
        "cannot create a folder for the rehearsal in {}, beside the store; choose another --store",
        parent.display()
    )]
    Folder {
        /// The folder that should contain it.
        parent: PathBuf,
        /// The reason.
        #[source]
        source: io::Error,
    },
    /// A file of the rehearsal cannot be written or read.
    #[error("cannot use {}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// The reason.
        #[source]
        source: io::Error,
    },
    /// The supervisor cannot be started.
    #[error("cannot start the supervisor {}", program.display())]
    Start {
        /// The program.
        program: PathBuf,
        /// The reason.
        #[source]
        source: io::Error,
    },
    /// A thread cannot be started.
    #[error("cannot start a thread")]
    Thread(#[source] io::Error),
    /// The state of the supervisor's process cannot be determined.
    #[error("cannot wait for the supervisor")]
    Wait(#[source] io::Error),
    /// A signal ended the rehearsal.
    #[error(
        "stopped by signal {0}: the job was ended, and all files of the rehearsal were removed"
    )]
    Interrupted(i32),
}
