//! Errors of the remote store.

use std::io;
use std::path::PathBuf;

use crate::store::{CompanionError, ForgetError, ImageId, PinError, ReadError, WriteError};

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
    /// An image could not be downloaded.
    #[error("{url}: cannot download image {image}: {reason}")]
    Download {
        /// The remote store.
        url: String,
        /// The image.
        image: ImageId,
        /// The reason.
        reason: String,
    },
    /// No run has its images there.
    #[error("{url}: no run has its images there; check the address, which is that of `remote.url`")]
    NoRun {
        /// The remote store.
        url: String,
    },
    /// The run has no such image.
    #[error("{url}: there is no image {image}; `ckpt-run list` with this --store shows the images")]
    NoImage {
        /// The remote store.
        url: String,
        /// The image.
        image: ImageId,
    },
    /// The run has images that a new run would remove, but they are pinned.
    #[error(
        "{url}: image {image} is pinned, and a run that begins anew removes the images of the former one; unpin it, or \
         give the new run a folder of its own"
    )]
    PinnedBefore {
        /// The remote store.
        url: String,
        /// The image.
        image: ImageId,
    },
    /// A supervisor runs the job, and removes what no image needs itself.
    #[error(
        "{url}: the supervisor on {host} runs the job, and removes what no image needs after each upload; to remove it \
         now, stop the run (ckpt-run stop)"
    )]
    Held {
        /// The remote store.
        url: String,
        /// Machine of the supervisor that holds the lease.
        host: String,
    },
    /// Other processes have changed the state again and again.
    #[error(
        "{url}: other processes change the run's state all the time, nothing was changed; try again"
    )]
    Busy {
        /// The remote store.
        url: String,
    },
    /// Named images that must stay, or do not exist.
    #[error("{url}: {source}")]
    Forget {
        /// The remote store.
        url: String,
        /// The reason.
        source: ForgetError,
    },
    /// The image cannot be pinned.
    #[error(transparent)]
    Pin(#[from] PinError),
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
