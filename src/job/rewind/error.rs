//! Why files cannot be rolled back.

use std::io;
use std::path::{Path, PathBuf};

use crate::job::nodes::NodesError;

/// Why files cannot be rolled back, or were not.
#[derive(Debug, thiserror::Error)]
pub enum RewindError {
    /// A folder or named pipe is missing and cannot be created again.
    #[error(transparent)]
    Nodes(#[from] NodesError),
    /// A file that the job had open does not exist any more.
    #[error("cannot find {}, which the job had open at the snapshot: put it back, or restore an older image", .0.display())]
    Vanished(PathBuf),
    /// Another file has its name.
    #[error("cannot go on with {}: it was replaced by another file since the snapshot; put the old one back", .0.display())]
    Replaced(PathBuf),
    /// The file belongs to another user.
    #[error("cannot go on with {}: it belonged to user {then} at the snapshot and belongs to user {now}; give it back (chown), or put the old one back", path.display())]
    Owner {
        /// The file.
        path: PathBuf,
        /// The user at the snapshot.
        then: u32,
        /// The current user.
        now: u32,
    },
    /// The file has fewer bytes than at the snapshot.
    #[error("cannot go on with {}: it shrank from {then} to {now} bytes since the snapshot; put the old content back", path.display())]
    Shrank {
        /// The file.
        path: PathBuf,
        /// Bytes at the snapshot.
        then: u64,
        /// Current bytes.
        now: u64,
    },
    /// The first bytes are not those of the snapshot.
    #[error("cannot go on with {}: its first {bytes} bytes are not those of the snapshot; put the old content back, or accept it as it is with files.on_lost = \"warn\"", path.display())]
    OtherBytes {
        /// The file.
        path: PathBuf,
        /// Bytes at the snapshot.
        bytes: u64,
    },
    /// A file that receives the job's output has fewer bytes than at the snapshot.
    #[error("cannot go on with {}, which the job's output goes to: it shrank from {then} to {now} bytes since the snapshot, and what is missing is not in the store's aside/; put the old content back, or accept it as it is with files.on_lost = \"warn\"", path.display())]
    ShortOutput {
        /// The file.
        path: PathBuf,
        /// Bytes at the snapshot.
        then: u64,
        /// Current bytes.
        now: u64,
    },
    /// A file that the job only reads has changed.
    #[error("cannot go on with {}: the job reads it, and it changed since the snapshot ({then} bytes then, {now} now); put the old one back", path.display())]
    Changed {
        /// The file.
        path: PathBuf,
        /// Bytes at the snapshot.
        then: u64,
        /// Current bytes.
        now: u64,
    },
    /// The disk for the data saved aside is full. Every file is unchanged.
    #[error("cannot keep aside the end of {}: the disk of {} is full; the job's files are as they were, free space there and run the same line again", path.display(), folder.display())]
    NoRoom {
        /// The job's file.
        path: PathBuf,
        /// The folder on the disk that is full.
        folder: PathBuf,
        /// The disk's error.
        #[source]
        source: io::Error,
    },
    /// A system call failed.
    #[error("cannot {operation} {}", path.display())]
    System {
        /// The operation.
        operation: &'static str,
        /// The file.
        path: PathBuf,
        /// The system's error.
        #[source]
        source: io::Error,
    },
}

pub(in crate::job) fn system(
    operation: &'static str,
    path: &Path,
) -> impl FnOnce(io::Error) -> RewindError + use<> {
    let path = path.to_owned();
    move |source| RewindError::System {
        operation,
        path,
        source,
    }
}
