//! Codecs under comparison: the store's own choice, and alternatives.

use std::io;

use ckpt_run::store::{Codec, Decoder, Encoder};
use zstd::bulk::{Compressor, Decompressor};

use super::data::CHUNK_BYTES;

/// Way to store a chunk. Keeps the stored form of the last one.
pub trait Candidate {
    fn name(&self) -> String;
    /// Encodes a chunk; returns the length of the stored form.
    fn encode(&mut self, raw: &[u8]) -> io::Result<usize>;
    fn decode(&mut self, raw: &mut [u8]) -> io::Result<()>;
    fn remarks(&self) -> String {
        String::new()
    }
}

pub fn candidates() -> io::Result<Vec<Box<dyn Candidate>>> {
    Ok(vec![
        Box::new(Store::new(1)?),
        Box::new(Zstd::new(-5)?),
        Box::new(Zstd::new(1)?),
        Box::new(Zstd::new(3)?),
        Box::new(Shuffled::new(Unit::Bits, 2, -5)?),
        Box::new(Shuffled::new(Unit::Bits, 4, -5)?),
        Box::new(Shuffled::new(Unit::Bytes, 2, 1)?),
        Box::new(Shuffled::new(Unit::Bytes, 4, 1)?),
    ])
}

/// Codecs of the store, including the sampling.
struct Store {
    encoder: Encoder,
    decoder: Decoder,
    level: i32,
    codec: Codec,
    stored: Vec<u8>,
    raw: usize,
    zstd: usize,
    planes: usize,
}

impl Store {
    fn new(level: i32) -> io::Result<Self> {
        Ok(Self {
            encoder: Encoder::new(level)?,
            decoder: Decoder::new()?,
            level,
            codec: Codec::Raw,
            stored: Vec::with_capacity(CHUNK_BYTES),
            raw: 0,
            zstd: 0,
            planes: 0,
        })
    }
}

impl Candidate for Store {
    fn name(&self) -> String {
        format!("store, level {}", self.level)
    }

    fn encode(&mut self, raw: &[u8]) -> io::Result<usize> {
        let (codec, stored) = self.encoder.encode(raw)?;
        match codec {
            Codec::Raw => self.raw += 1,
            Codec::Zstd => self.zstd += 1,
            Codec::Planes => self.planes += 1,
        }
        self.codec = codec;
        self.stored.clear();
        self.stored.extend_from_slice(stored);
        Ok(stored.len())
    }

    fn decode(&mut self, raw: &mut [u8]) -> io::Result<()> {
        self.decoder.decode(self.codec, &self.stored, raw)
    }

    fn remarks(&self) -> String {
        let all = (self.raw + self.zstd + self.planes).max(1);
        let percent = |part| 100 * part / all;
        format!(
            "chunks: raw {} %, planes {} %, zstd {} %",
            percent(self.raw),
            percent(self.planes),
            percent(self.zstd)
        )
    }
}

struct Zstd {
    level: i32,
    compressor: Compressor<'static>,
    decompressor: Decompressor<'static>,
    stored: Vec<u8>,
}

impl Zstd {
    fn new(level: i32) -> io::Result<Self> {
        Ok(Self {
            level,
            compressor: Compressor::new(level)?,
            decompressor: Decompressor::new()?,
            stored: Vec::with_capacity(zstd::zstd_safe::compress_bound(CHUNK_BYTES)),
        })
    }
}

impl Candidate for Zstd {
    fn name(&self) -> String {
        format!("zstd {}", self.level)
    }

    fn encode(&mut self, raw: &[u8]) -> io::Result<usize> {
        self.stored.clear();
        self.compressor.compress_to_buffer(raw, &mut self.stored)
    }

    fn decode(&mut self, raw: &mut [u8]) -> io::Result<()> {
        self.decompressor
            .decompress_to_buffer(&self.stored, raw)
            .map(|_| ())
    }
}

#[derive(Clone, Copy, PartialEq)]
enum Unit {
    Bytes,
    Bits,
}

/// Numbers transposed in blocks of 8 KiB by bits, as the best-known library does, then zstd. The code is portable;
/// libraries with AVX2 are faster.
struct Shuffled {
    unit: Unit,
    width: usize,
    zstd: Zstd,
    blocks: Vec<u8>,
    spare: Vec<u8>,
}

impl Unit {
    fn block_bytes(self) -> usize {
        match self {
            Self::Bytes => CHUNK_BYTES,
            Self::Bits => 8192,
        }
    }
}

impl Shuffled {
    fn new(unit: Unit, width: usize, level: i32) -> io::Result<Self> {
        Ok(Self {
            unit,
            width,
            zstd: Zstd::new(level)?,
            blocks: vec![0; CHUNK_BYTES],
            spare: vec![0; unit.block_bytes()],
        })
    }
}

impl Candidate for Shuffled {
    fn name(&self) -> String {
        let unit = match self.unit {
            Unit::Bytes => "byte",
            Unit::Bits => "bit",
        };
        format!("{unit}-shuffle {} + {}", self.width, self.zstd.name())
    }

    fn encode(&mut self, raw: &[u8]) -> io::Result<usize> {
        let plane_bytes = self.unit.block_bytes() / self.width;
        let shuffled = &mut self.blocks[..raw.len()];
        shuffled.copy_from_slice(raw);
        for block in shuffled.chunks_exact_mut(self.unit.block_bytes()) {
            halve(block, &mut self.spare, self.width);
            if self.unit == Unit::Bits {
                turn(block);
                for plane in block.chunks_exact_mut(plane_bytes) {
                    halve(plane, &mut self.spare, 8);
                }
            }
        }
        self.zstd.encode(shuffled)
    }

    fn decode(&mut self, raw: &mut [u8]) -> io::Result<()> {
        self.zstd.decode(raw)?;
        let plane_bytes = self.unit.block_bytes() / self.width;
        for block in raw.chunks_exact_mut(self.unit.block_bytes()) {
            if self.unit == Unit::Bits {
                for plane in block.chunks_exact_mut(plane_bytes) {
                    double(plane, &mut self.spare, 8);
                }
                turn(block);
            }
            double(block, &mut self.spare, self.width);
        }
        Ok(())
    }
}

/// Moves even bytes first, once for each power of two in `times`.
#[expect(
    clippy::cast_possible_truncation,
    reason = "that makes one instruction"
)]
fn halve(bytes: &mut [u8], spare: &mut [u8], times: usize) {
    for _ in 0..times.ilog2() {
        let spare = &mut spare[..bytes.len()];
        spare.copy_from_slice(bytes);
        let (pairs, _) = spare.as_chunks::<2>();
        let (even, odd) = bytes.split_at_mut(pairs.len());
        for (byte, pair) in even.iter_mut().zip(pairs) {
            *byte = u16::from_le_bytes(*pair) as u8;
        }
        for (byte, pair) in odd.iter_mut().zip(pairs) {
            *byte = (u16::from_le_bytes(*pair) >> 8) as u8;
        }
    }
}

fn double(bytes: &mut [u8], spare: &mut [u8], times: usize) {
    for _ in 0..times.ilog2() {
        let spare = &mut spare[..bytes.len()];
        spare.copy_from_slice(bytes);
        let (even, odd) = spare.split_at(bytes.len() / 2);
        let (pairs, _) = bytes.as_chunks_mut::<2>();
        for ((pair, even), odd) in pairs.iter_mut().zip(even).zip(odd) {
            *pair = [*even, *odd];
        }
    }
}

/// Transposes each eight bytes as eight rows of eight bits; applied twice, it has no effect.
fn turn(bytes: &mut [u8]) {
    for square in bytes.as_chunks_mut::<8>().0 {
        let mut x = u64::from_le_bytes(*square);
        for (shift, mask) in [
            (7, 0x00aa_00aa_00aa_00aa),
            (14, 0x0000_cccc_0000_cccc),
            (28, 0x0000_0000_f0f0_f0f0),
        ] {
            let moved = (x ^ (x >> shift)) & mask;
            x ^= moved ^ (moved << shift);
        }
        *square = x.to_le_bytes();
    }
}
