//! An image as one file: a store with this image alone, in a tar archive.
//!
//! ```text
//! format
//! key-check                if the image is encrypted
//! images/000001.manifest
//! packs/000001-00.pack     the chunks in the order in which the streams need them first
//! ```
//! Each entry is what it is in a store, so `tar x` makes one. Chunks are in it as they lie in the store: compressed, each
//! once, and sealed with the store's key if the store is encrypted.
//!
//! Both directions need the memory of the manifest and of a few chunks, and no room on the disk. They run from front to
//! end, so that they work on pipes. An import hashes every byte; its image is committed as a whole, like any other, or
//! not at all, and the only files that it makes are packs and the manifest of the image. It takes what an export writes,
//! byte for byte, and no other archive (see [`archive`]). These checks do not protect against a malicious author: the
//! author of a file can make one that passes all of them, and a restored image is a running program.

mod archive;
pub(crate) mod companion;
mod error;
mod export;
#[cfg(any(fuzzing, test))]
pub(super) mod fuzz_portable;
mod import;
#[cfg(test)]
mod tests;

pub use companion::CompanionError;
pub use error::{ExportError, FileDamage, ImportError};
pub use export::{Companion, Exported, Form};
pub use import::PortableReader;

use super::format::image_id::ImageId;
use super::format::pack::PackName;

/// The image's number in the file.
const IMAGE: ImageId = ImageId::FIRST;
/// The pack in the file.
const PACK: PackName = PackName {
    image: IMAGE,
    number: 0,
};
/// The names of the entries of the manifest and the pack; a test keeps them those of a store's files.
const MANIFEST_ENTRY: &str = "images/000001.manifest";
const PACK_ENTRY: &str = "packs/000001-00.pack";
