//! An image as one file, to be carried by whatever carries files or pipes.
//!
//! ```text
//! 0   magic "CKPTFILE"                                 8 bytes
//! 8   format                                           u32, little endian like all numbers
//! 12  0, or 1 where frames are sealed                  u32
//! 16  salt: random                                     32 bytes
//! 48  check of the key; zeros where nothing is sealed  32 bytes
//! 80  check of bytes 0..80                             u64
//! 88  frames:  image ─▶ (stream ─▶ chunk | repeat | zeros … ─▶ stream's end)… ─▶ end
//! ```
//! Chunks lie in the file as they lie in packs, compressed and each once; what is sealed in
//! the store is sealed in the file, with a key of the file's own that the store's key
//! yields. What [`frame`] says of frames makes every change of the file show: a flipped
//! bit, a frame that was cut out, moved or comes from another file, an end that is
//! missing or followed by more.
//!
//! Both directions take the memory of a few chunks and some bytes for each chunk's name,
//! and go from front to end, so that they work on pipes. An import hashes every byte and
//! becomes an image as any other does, at its commit, or nothing. But who can make the file
//! can make one that is right in all this: restored, an image is a program that runs.

pub(super) mod companion;
mod error;
mod export;
mod frame;
#[cfg(any(fuzzing, test))]
pub(super) mod fuzz_portable;
mod import;
#[cfg(test)]
mod tests;

pub use companion::CompanionError;
pub use error::{ExportError, FileDamage, ImportError};
pub use export::{Companion, Exported, Form};
pub use import::PortableReader;

const MAGIC: [u8; 8] = *b"CKPTFILE";
/// The format that this version writes and reads.
const FORMAT: u32 = 1;
const HEADER_LEN: usize = 88;
const NOT_SEALED: u32 = 0;
const SEALED: u32 = 1;
