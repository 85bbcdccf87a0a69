//! Errors of the rollback of files.

use std::io;
use std::path::{Path, PathBuf};

use crate::job::nodes::NodesError;

/// Reasons why files cannot be rolled back.
#[derive(Debug, thiserror::Error)]
pub enum RewindError {
    /// A folder or named pipe is missing and cannot be created again.
    #[error(transparent)]
    Nodes(#[from] NodesError),
    /// A file that the job had open does not exist any more.
    #[error("cannot find {}, which the job had open at the snapshot: put it back, or restore an older image", .0.display())]
    Vanished(PathBuf),
    /// Another file has the path.
    #[error("cannot continue with {}: it was replaced by another file since the snapshot; put the old one back", .0.display())]
    Replaced(PathBuf),
    /// The file was changed or replaced before its content was known.
    #[error("cannot continue with {}: it was changed while the image was written, so it is not known what the job had mapped or open; restore another image", .0.display())]
    Unknown(PathBuf),
    /// The file belongs to another user.
    #[error("cannot continue with {}: it belonged to user {then} at the snapshot and belongs to user {now}; restore its owner (chown), or put the old one back", path.display())]
    Owner {
        /// The file.
        path: PathBuf,
        /// The user at the snapshot.
        then: u32,
        /// The current user.
        now: u32,
    },
    /// The file has fewer bytes than at the snapshot.
    #[error("cannot continue with {}: it shrank from {then} to {now} bytes since the snapshot; put the old content back, with its time (cp -p)", path.display())]
    Shrank {
        /// The file.
        path: PathBuf,
        /// Bytes at the snapshot.
        then: u64,
        /// Current bytes.
        now: u64,
    },
    /// The content before the job's position differs from the snapshot.
    #[error("cannot continue with {}: its first {bytes} bytes differ from the snapshot; put the old content back, with its time (cp -p), or accept the file with files.on_lost = \"warn\"", path.display())]
    OtherBytes {
        /// The file.
        path: PathBuf,
        /// Bytes at the snapshot.
        bytes: u64,
    },
    /// A file that receives the job's output has fewer bytes than at the snapshot.
    #[error("cannot continue with {}, which receives the job's output: it shrank from {then} to {now} bytes since the snapshot, and the missing part is not in the store's aside/; put the old content back, or accept the file with files.on_lost = \"warn\"", path.display())]
    ShortOutput {
        /// The file.
        path: PathBuf,
        /// Bytes at the snapshot.
        then: u64,
        /// Current bytes.
        now: u64,
    },
    /// A file that the job only reads has changed.
    #[error("cannot continue with {}: the job reads it, and it changed since the snapshot ({then} bytes then, {now} now); put the old one back", path.display())]
    Changed {
        /// The file.
        path: PathBuf,
        /// Bytes at the snapshot.
        then: u64,
        /// Current bytes.
        now: u64,
    },
    /// The disk for saved data is full. Every file is unchanged.
    #[error("cannot save the end of {}: the disk of {} is full; the job's files are unchanged; free space there and run the same line again", path.display(), folder.display())]
    NoRoom {
        /// The job's file.
        path: PathBuf,
        /// Folder on the full disk.
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
