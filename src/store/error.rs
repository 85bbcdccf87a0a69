//! Errors of writing and reading images.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use super::format::file_names::ListError;
use super::format::image_id::ImageId;
use super::format::manifest_file::{META_BYTES_MAX, ManifestError};
use super::format::pack::PackError;
use super::format::store_folder::MovedStore;
use super::fs::durable::DurableError;
use crate::known_errors::is_disk_full;

/// Error of a change to the store. Existing images are unaffected.
#[derive(Debug, thiserror::Error)]
pub enum WriteError {
    /// An image is being written, or files are being removed, under the same lock.
    #[error("the store is busy: an image is being written")]
    Busy,
    /// The existing images cannot be read.
    #[error(transparent)]
    Read(#[from] ReadError),
    /// The path leads to another folder.
    #[error(transparent)]
    Moved(#[from] MovedStore),
    /// The highest image number is already used.
    #[error("no image number is left in the store")]
    NumbersExhausted,
    /// No image has this number.
    #[error("there is no image {image}")]
    Missing {
        /// The image.
        image: ImageId,
    },
    /// A worker cannot be started.
    #[error("cannot start a worker thread")]
    Spawn(#[source] io::Error),
    /// Memory for the buffer cannot be mapped.
    #[error("cannot map memory for the snapshot buffer")]
    Memory(#[source] io::Error),
    /// The name is not valid for a stream.
    #[error("a stream cannot have the name {name:?}")]
    StreamName {
        /// The name.
        name: String,
    },
    /// The image already has a stream of this name.
    #[error("the image has two streams of the name {name:?}")]
    StreamTwice {
        /// The name.
        name: String,
    },
    /// The stream's source failed.
    #[error("cannot read the source of the stream {stream:?}")]
    Source {
        /// The stream.
        stream: String,
        /// The cause.
        source: io::Error,
    },
    /// The stream was dropped or left open.
    #[error("the stream {stream:?} was not finished")]
    StreamUnfinished {
        /// The stream.
        stream: String,
    },
    /// The stream or the image has more chunks than the format allows.
    #[error("the image has more chunks than a manifest can count")]
    TooManyChunks,
    /// The caller's data is too large.
    #[error("the image's meta data has {len} bytes, more than {META_BYTES_MAX}")]
    MetaTooLarge {
        /// Its length.
        len: usize,
    },
    /// zstd failed.
    #[error("cannot compress a chunk")]
    Compress(#[source] io::Error),
    /// The kernel has no random bytes.
    #[error("cannot encrypt a chunk")]
    Seal(#[source] io::Error),
    /// A pack cannot be written.
    #[error("cannot write {path}")]
    Pack {
        /// The pack.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// The manifest cannot be encoded.
    #[error("cannot make the manifest of image {image}")]
    Manifest {
        /// The image.
        image: ImageId,
        /// The cause.
        source: ManifestError,
    },
    /// A small file or a folder cannot be changed.
    #[error(transparent)]
    Durable(#[from] DurableError),
    /// A worker panicked, which is a bug of this program.
    #[error("a worker of the image panicked")]
    WorkerPanicked,
    /// No data reached the disk within the time limit while the job was frozen.
    #[error("no data reached the store's disk for {0:?}: the disk or its server does not respond")]
    Stalled(Duration),
    /// The caller abandoned the image.
    #[error("the image was abandoned")]
    Aborted,
    /// The image failed earlier, for this reason.
    #[error(transparent)]
    Stopped(Arc<WriteError>),
}

impl WriteError {
    /// Returns true if the disk or the user's share of it is full, so that removing images helps.
    #[must_use]
    pub fn is_disk_full(&self) -> bool {
        match self {
            Self::Pack { source, .. } => is_disk_full(source),
            Self::Durable(error) => is_disk_full(error.io_error()),
            Self::Stopped(error) => error.is_disk_full(),
            Self::Busy
            | Self::Read(_)
            | Self::Moved(_)
            | Self::NumbersExhausted
            | Self::Missing { .. }
            | Self::Spawn(_)
            | Self::Memory(_)
            | Self::StreamName { .. }
            | Self::StreamTwice { .. }
            | Self::Source { .. }
            | Self::StreamUnfinished { .. }
            | Self::TooManyChunks
            | Self::MetaTooLarge { .. }
            | Self::Compress(_)
            | Self::Seal(_)
            | Self::Manifest { .. }
            | Self::WorkerPanicked
            | Self::Stalled(_)
            | Self::Aborted => false,
        }
    }
}

/// Error of reading an image or a part of it. The store is unaffected.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    /// The folder cannot be listed.
    #[error(transparent)]
    List(#[from] ListError),
    /// The path leads to another folder.
    #[error(transparent)]
    Moved(#[from] MovedStore),
    /// No image has this number.
    #[error("there is no image {image}")]
    Missing {
        /// The image.
        image: ImageId,
    },
    /// The image's manifest cannot be used.
    #[error("cannot use image {image}")]
    Manifest {
        /// The image.
        image: ImageId,
        /// The cause.
        source: ManifestError,
    },
    /// A pack of the image is lost or cannot be read.
    #[error("cannot read the chunks of image {image}")]
    Pack {
        /// The image.
        image: ImageId,
        /// The cause.
        source: PackError,
    },
    /// A chunk is corrupt. None of its bytes were returned.
    #[error("image {image} is damaged: chunk {chunk} of the stream {stream:?}: {reason}")]
    Corrupt {
        /// The image.
        image: ImageId,
        /// The stream.
        stream: String,
        /// The chunk's position in the stream.
        chunk: usize,
        /// Description of the damage.
        reason: String,
    },
    /// The image has no such stream.
    #[error("image {image} has no stream {stream:?}")]
    NoStream {
        /// The image.
        image: ImageId,
        /// The requested name.
        stream: String,
    },
    /// The stream is longer than the caller's limit.
    #[error("the stream {stream:?} of image {image} has {len} bytes, more than {limit}")]
    TooLong {
        /// The image.
        image: ImageId,
        /// The stream.
        stream: String,
        /// Its length.
        len: u64,
        /// The caller's limit.
        limit: u64,
    },
    /// A worker cannot be started, for lack of threads or memory.
    #[error("cannot start a worker of the reader")]
    Worker(#[source] io::Error),
    /// The receiver of the stream failed; the image may be intact.
    #[error("cannot pass on the stream")]
    Sink(#[source] io::Error),
}

impl From<ListError> for WriteError {
    fn from(error: ListError) -> Self {
        Self::Read(error.into())
    }
}

impl ReadError {
    /// Returns true if the image itself is damaged, so that another attempt fails, too, and an older image may help. A
    /// lack of memory or descriptors is not damage.
    #[must_use]
    pub fn is_damage(&self) -> bool {
        match self {
            Self::Missing { .. } | Self::Corrupt { .. } => true,
            Self::Manifest { source, .. } => source.is_damage(),
            Self::Pack { source, .. } => source.is_damage(),
            Self::List(_)
            | Self::Moved(_)
            | Self::NoStream { .. }
            | Self::TooLong { .. }
            | Self::Worker(_)
            | Self::Sink(_) => false,
        }
    }
}

impl ReadError {
    /// Returns true if the image is certainly damaged, so that it must not be tried again.
    #[must_use]
    pub fn condemns(&self) -> bool {
        self.is_damage() && !self.may_pass()
    }

    /// Returns true if the data may become readable later: an interruption of a disk or its connection causes the same
    /// errors as a broken disk.
    fn may_pass(&self) -> bool {
        let (Self::Manifest {
            source: ManifestError::Read(cause),
            ..
        }
        | Self::Pack {
            source: PackError::Read { source: cause, .. },
            ..
        }) = self
        else {
            return false;
        };
        cause.raw_os_error() == Some(nix::libc::EIO)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lack_of_descriptors_is_not_the_images_fault() {
        let image = ImageId::FIRST;
        let error = |errno| ReadError::Manifest {
            image,
            source: ManifestError::Read(io::Error::from_raw_os_error(errno)),
        };
        assert!(!error(nix::libc::EMFILE).is_damage() && !error(nix::libc::ENOMEM).is_damage());
        assert!(error(nix::libc::EIO).is_damage() && error(nix::libc::ENOENT).is_damage());
        assert!(error(nix::libc::EIO).may_pass() && !error(nix::libc::ENOENT).may_pass());
    }
}
