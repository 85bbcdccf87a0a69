//! Encoding of a chunk: raw, as byte planes, or compressed with zstd, whichever pays in a sample.
//!
//! ```text
//! chunk ─▶ sampler ─┬─▶ raw     keys, compressed files, noise
//!                   ├─▶ planes  weights, gradients, moments of an optimizer
//!                   └─▶ zstd    text, heaps, code
//! ```
//! Works on slices; knows nothing of packs or threads. One encoder or decoder a thread.

mod byte_planes;
mod byte_shuffle;
mod codec_choice;
#[cfg(test)]
pub(crate) mod tests;

use std::io;

use zstd::bulk::{Compressor, Decompressor};

use self::byte_planes::{HEADERS_BYTES_MAX, Packer, Unpacker};
use self::codec_choice::{Choice, Sampler};
use super::chunk::CHUNK_BYTES;

/// The form of a stored chunk. The numbers are those on disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Codec {
    /// The bytes as they are.
    Raw = 1,
    /// A zstd frame.
    Zstd = 2,
    /// The bytes of numbers, sorted by their place in the number, the uneven ones
    /// entropy coded.
    Planes = 3,
}

impl Codec {
    pub(crate) fn from_disk(byte: u8) -> Option<Self> {
        match byte {
            1 => Some(Self::Raw),
            2 => Some(Self::Zstd),
            3 => Some(Self::Planes),
            _ => None,
        }
    }

    /// Returns true if a chunk of `raw_len` bytes can be as long as that in this form.
    pub(crate) fn fits(self, stored_len: u32, raw_len: u32) -> bool {
        match self {
            Self::Raw => stored_len == raw_len,
            Self::Zstd | Self::Planes => (1..raw_len).contains(&stored_len),
        }
    }
}

/// Compression pays when it saves a thirty-second: less does not make up for the
/// time that the restore takes to undo it.
const SAVED_FRACTION: usize = 32;

fn pays(compressed: usize, raw: usize) -> bool {
    compressed + raw / SAVED_FRACTION < raw
}

/// Compresses chunks, with its own memory: two to three MiB at level 1.
pub struct Encoder {
    sampler: Sampler,
    zstd: Compressor<'static>,
    packer: Packer,
    output: Vec<u8>,
}

impl Encoder {
    /// `level` as zstd has it; it clamps what it does not know. Planes do not depend on it.
    ///
    /// # Errors
    /// There is no memory for zstd.
    pub fn new(level: i32) -> io::Result<Self> {
        let room = zstd::zstd_safe::compress_bound(CHUNK_BYTES) + HEADERS_BYTES_MAX;
        Ok(Self {
            sampler: Sampler::new(level)?,
            zstd: Compressor::new(level)?,
            packer: Packer::new()?,
            output: vec![0; room],
        })
    }

    /// The stored form of a chunk, which is never longer than the chunk.
    ///
    /// # Errors
    /// The bytes are more than a chunk has, or zstd failed.
    pub fn encode<'a>(&'a mut self, raw: &'a [u8]) -> io::Result<(Codec, &'a [u8])> {
        check_len(raw)?;
        let (codec, len) = match self.sampler.choose(raw)? {
            Choice::Raw => return Ok((Codec::Raw, raw)),
            Choice::Zstd => {
                let len = self.zstd.compress_to_buffer(raw, &mut self.output[..])?;
                (Codec::Zstd, len)
            }
            Choice::Planes(plan) => {
                let len = self.packer.pack(raw, plan, &mut self.output)?;
                (Codec::Planes, len)
            }
        };
        if pays(len, raw.len()) {
            Ok((codec, &self.output[..len]))
        } else {
            Ok((Codec::Raw, raw))
        }
    }
}

/// Restores chunks, with its own memory.
pub struct Decoder {
    zstd: Decompressor<'static>,
    unpacker: Unpacker,
}

impl Decoder {
    /// # Errors
    /// There is no memory for zstd.
    pub fn new() -> io::Result<Self> {
        Ok(Self {
            zstd: Decompressor::new()?,
            unpacker: Unpacker::new(),
        })
    }

    /// Fills all of `raw` from the stored form of a chunk, which may be any bytes. On an
    /// error `raw` holds anything.
    ///
    /// # Errors
    /// The stored bytes are not that form of a chunk of this length.
    pub fn decode(&mut self, codec: Codec, stored: &[u8], raw: &mut [u8]) -> io::Result<()> {
        check_len(raw)?;
        match codec {
            Codec::Raw if stored.len() == raw.len() => raw.copy_from_slice(stored),
            Codec::Raw => return Err(damaged("another length than the chunk's")),
            Codec::Zstd => unpack_frame(&mut self.zstd, stored, raw)?,
            Codec::Planes => self.unpacker.unpack(&mut self.zstd, stored, raw)?,
        }
        Ok(())
    }
}

fn check_len(raw: &[u8]) -> io::Result<()> {
    if raw.len() <= CHUNK_BYTES {
        return Ok(());
    }
    let message = format!("{} bytes are more than a chunk", raw.len());
    Err(io::Error::new(io::ErrorKind::InvalidInput, message))
}

/// Decompresses a frame into all of `raw`.
fn unpack_frame(zstd: &mut Decompressor<'static>, frame: &[u8], raw: &mut [u8]) -> io::Result<()> {
    let len = zstd.decompress_to_buffer(frame, raw)?;
    if len == raw.len() {
        Ok(())
    } else {
        Err(damaged("a frame of another length"))
    }
}

fn damaged(what: &'static str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}
