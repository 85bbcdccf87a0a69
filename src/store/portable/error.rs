//! Failures of export and import.

use std::io;
use std::path::PathBuf;

use super::super::error::{ReadError, WriteError};
use super::super::format::FORMAT;
use super::super::format::image_id::ImageId;
use super::super::format::manifest_file::ManifestError;
use super::super::fs::durable::DurableError;
use super::companion::CompanionError;
use crate::printable::chain;

/// An error that prevented an export. The data written until then has no end and is refused by an import.
#[derive(Debug, thiserror::Error)]
pub enum ExportError {
    /// The image must not be restored, and the file would not carry the mark.
    #[error("image {image} was set aside: {reason}")]
    SetAside {
        /// The image.
        image: ImageId,
        /// The reason of the mark.
        reason: String,
    },
    /// Another process removed the image while it was being read.
    #[error("image {image} was removed while it was being exported; export a newer one")]
    Gone {
        /// The image.
        image: ImageId,
    },
    /// The image cannot be read.
    #[error(transparent)]
    Read(#[from] ReadError),
    /// A companion file cannot be read.
    #[error(transparent)]
    Companion(#[from] CompanionError),
    /// The manifest of the file cannot be made.
    #[error("cannot make the manifest of the exported image")]
    Manifest(#[from] ManifestError),
    /// The store's record of its key cannot be read.
    #[error("cannot read {}, which the store needs to check its key", path.display())]
    KeyCheck {
        /// The file.
        path: PathBuf,
    },
    /// The kernel provides no random bytes.
    #[error("cannot encrypt the file")]
    Seal(#[source] io::Error),
    /// The file cannot be written.
    #[error("cannot write the exported image")]
    Write(#[source] io::Error),
    /// The file cannot be created or made durable.
    #[error(transparent)]
    Durable(#[from] DurableError),
}

/// An error that prevented an import. The images of the store are unchanged.
#[derive(Debug, thiserror::Error)]
pub enum ImportError {
    /// The file cannot be read.
    #[error("cannot read the exported image")]
    Read(#[source] io::Error),
    /// The file is no portable image.
    #[error("the file is not an exported image; `ckpt-run export` creates such files")]
    NotOurs,
    /// The file was written by a version before the first release.
    #[error(
        "the file was exported by an older ckpt-run, whose files this version does not read: export the image again"
    )]
    Older,
    /// The file was written by a newer version.
    #[error("the file needs a newer ckpt-run: its format is {format}, this version reads {FORMAT}")]
    Newer {
        /// Its format.
        format: u32,
    },
    /// The file is encrypted and cannot be read without its key.
    #[error(
        "the file is encrypted and no key is given: set encryption.key_file or encryption.key_command \
         to the key of the store it came from"
    )]
    KeyMissing,
    /// The file cannot be read with this key.
    #[error(
        "the file was encrypted with another key: give the key of the store it came from, or export the image \
         again with --plaintext"
    )]
    KeyWrong,
    /// The file was changed since its export.
    #[error("the file is damaged at byte {at}: {damage}; nothing was imported, export it again")]
    Damaged {
        /// Offset of the damaged part.
        at: u64,
        /// The damage.
        damage: FileDamage,
    },
    /// The image cannot be written.
    #[error(transparent)]
    Write(#[from] WriteError),
}

/// Damage of a file.
#[derive(Debug, thiserror::Error)]
pub enum FileDamage {
    /// The file ends too early.
    #[error("it is cut short")]
    Short,
    /// The file continues after its end.
    #[error("data follows its end")]
    Long,
    /// Another entry comes, or the entry's header was changed.
    #[error("the header of `{0}` is not valid")]
    Entry(&'static str),
    /// The manifest cannot be used.
    #[error("{}", chain(.0))]
    Manifest(ManifestError),
    /// A part is impossible at its position.
    #[error("{0}")]
    Senseless(&'static str),
    /// A chunk's content does not match its name.
    #[error("a chunk cannot be decrypted or decompressed, or does not match its hash")]
    Chunk,
}
