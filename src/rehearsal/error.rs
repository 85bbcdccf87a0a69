//! Why there was no rehearsal: a failure of ours or of the system's. What the job cannot do is no error but a result.

use std::io;
use std::path::PathBuf;

/// Why the rehearsal was not brought to its end. Nothing of it is left.
#[derive(Debug, thiserror::Error)]
pub enum RehearsalError {
    /// The temporary folder could not be made.
    #[error(
        "cannot make a folder for the rehearsal in {} (it is beside the store: choose another --store)",
        parent.display()
    )]
    Folder {
        /// Where it was to be.
        parent: PathBuf,
        /// The reason.
        #[source]
        source: io::Error,
    },
    /// A file of the rehearsal could not be written or read.
    #[error("cannot use {}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// The reason.
        #[source]
        source: io::Error,
    },
    /// The supervisor could not be started.
    #[error("cannot start the supervisor {}", program.display())]
    Start {
        /// The program.
        program: PathBuf,
        /// The reason.
        #[source]
        source: io::Error,
    },
    /// A thread could not be started.
    #[error("cannot start a thread")]
    Thread(#[source] io::Error),
    /// Whether the supervisor runs could not be told.
    #[error("cannot wait for the supervisor")]
    Wait(#[source] io::Error),
    /// Somebody asked us to stop.
    #[error("stopped by signal {0}: the job was ended, and nothing of the rehearsal is left")]
    Interrupted(i32),
}
