//! Encoding of chunks: raw, byte planes or zstd, chosen per chunk by a sample.
//!
//! ```text
//! chunk ─▶ sampler ─┬─▶ raw     keys, compressed files, noise
//!                   ├─▶ planes  weights, gradients, moments of an optimizer
//!                   └─▶ zstd    text, heaps, code
//! ```
//! This module works on slices and is independent of packs and threads. Each thread has its own encoder or decoder.

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

/// Encoding of a stored chunk. The numbers are those on disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Codec {
    /// Unencoded bytes.
    Raw = 1,
    /// A zstd frame.
    Zstd = 2,
    /// Byte planes of numbers; planes with skewed values are entropy coded.
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

    /// Returns true if a chunk of `raw_len` bytes can have the length `stored_len` in this encoding.
    pub(crate) fn fits(self, stored_len: u32, raw_len: u32) -> bool {
        match self {
            Self::Raw => stored_len == raw_len,
            Self::Zstd | Self::Planes => (1..raw_len).contains(&stored_len),
        }
    }
}

/// Minimum saving, as a divisor of the chunk's length: a smaller saving does not justify the time that a restore needs
/// for decompression.
const SAVED_FRACTION: usize = 32;

fn pays(compressed: usize, raw: usize) -> bool {
    compressed + raw / SAVED_FRACTION < raw
}

/// Chunk encoder with its own memory: two to three MiB at level 1.
pub struct Encoder {
    sampler: Sampler,
    zstd: Compressor<'static>,
    packer: Packer,
    output: Vec<u8>,
}

impl Encoder {
    /// Creates an encoder with a zstd level, which zstd clamps to its range. The level does not affect planes.
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

    /// Returns the stored form of a chunk, which is never longer than the chunk.
    ///
    /// # Errors
    /// The input is longer than a chunk, or zstd failed.
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

/// Chunk decoder with its own memory.
pub struct Decoder {
    zstd: Decompressor<'static>,
    unpacker: Unpacker,
}

impl Decoder {
    /// Creates a decoder.
    ///
    /// # Errors
    /// There is no memory for zstd.
    pub fn new() -> io::Result<Self> {
        Ok(Self {
            zstd: Decompressor::new()?,
            unpacker: Unpacker::new(),
        })
    }

    /// Decodes the stored form of a chunk into `raw`, filling it. The stored bytes are untrusted. On an error the
    /// content of `raw` is unspecified.
    ///
    /// # Errors
    /// The stored bytes do not encode a chunk of this length in this encoding.
    pub fn decode(&mut self, codec: Codec, stored: &[u8], raw: &mut [u8]) -> io::Result<()> {
        check_len(raw)?;
        match codec {
            Codec::Raw if stored.len() == raw.len() => raw.copy_from_slice(stored),
            Codec::Raw => return Err(damaged("the length differs from the chunk's")),
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
        Err(damaged("the frame has a different length"))
    }
}

fn damaged(what: &'static str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}
