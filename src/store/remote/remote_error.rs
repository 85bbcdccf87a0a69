//! Errors of the remote store.

use std::io;
use std::path::PathBuf;

use crate::store::{CompanionError, ReadError, WriteError};

/// Error of the remote store.
#[derive(Debug, thiserror::Error)]
pub enum RemoteError {
    /// The address is not one of a remote store.
    #[error(
        "remote.url: {url:?} is not the address of a remote store: {reason}; give s3://BUCKET/FOLDER, gs://BUCKET/FOLDER, \
         az://CONTAINER/FOLDER or file:///FOLDER"
    )]
    Address {
        /// The address.
        url: String,
        /// The reason.
        reason: String,
    },
    /// A request failed, or had no answer in time.
    #[error("{url}: cannot {what}: {reason}")]
    Request {
        /// The remote store.
        url: String,
        /// The operation.
        what: String,
        /// The reason, without secrets.
        reason: String,
    },
    /// The server replaces existing objects.
    #[error(
        "{url}: the server has replaced an object that was to be created only if it did not exist; two machines could \
         run the job at once; use a server with conditional writes (If-None-Match)"
    )]
    NotCreateOnly {
        /// The remote store.
        url: String,
    },
    /// An object has an unexpected content.
    #[error("{url}: the object {object} is damaged: {reason}")]
    Damaged {
        /// The remote store.
        url: String,
        /// The object.
        object: String,
        /// The reason.
        reason: String,
    },
    /// The images are sealed with another key, or one of both stores is not encrypted.
    #[error(
        "{url}: {reason}; name the key of the run's images (encryption.key_file or encryption.key_command), or none"
    )]
    Key {
        /// The remote store.
        url: String,
        /// The reason.
        reason: String,
    },
    /// The remote store was written by a newer version.
    #[error("{url}: it needs a newer ckpt-run: its format is {format}")]
    Newer {
        /// The remote store.
        url: String,
        /// Its format.
        format: u32,
    },
    /// Another supervisor continues the run.
    #[error(
        "{url}: the supervisor on {host} continues this run; nothing more is uploaded from here"
    )]
    Fenced {
        /// The remote store.
        url: String,
        /// Machine of the supervisor that holds the lease.
        host: String,
    },
    /// Another part of the upload has failed.
    #[error("the upload was stopped")]
    Stopped,
    /// The image in the local store cannot be read.
    #[error(transparent)]
    Read(#[from] ReadError),
    /// The image cannot be written to the local store.
    #[error(transparent)]
    Write(#[from] WriteError),
    /// A file that accompanies the image cannot be read.
    #[error(transparent)]
    Companion(#[from] CompanionError),
    /// The kernel provides no random bytes.
    #[error("cannot encrypt the image")]
    Seal(#[source] io::Error),
    /// A thread cannot be started.
    #[error("cannot start a thread for the remote store")]
    Thread(#[source] io::Error),
    /// The local record of the remote store cannot be read or written.
    #[error("cannot use {}: {reason}", path.display())]
    Record {
        /// The file.
        path: PathBuf,
        /// The reason.
        reason: String,
    },
}
