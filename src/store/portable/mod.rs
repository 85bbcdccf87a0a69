//! An image as one file, to be transported like any file or through a pipe.
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
//! Chunks are stored in the file as in packs: compressed, and each once. Data that is sealed in the store is sealed in
//! the file, with a separate key that is derived from the store's key and the salt. The properties of frames (see
//! [`frame`]) reveal every change of the file: a flipped bit, a frame that was cut out, moved or taken from another
//! file, an end that is missing or followed by more data.
//!
//! Both directions need the memory of a few chunks and some bytes for each chunk's name. They run from front to end, so
//! that they work on pipes. An import hashes every byte; its image is committed as a whole, like any other, or not at
//! all. These checks do not protect against a malicious author: the author of a file can make one that passes all of
//! them, and a restored image is a running program.

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
