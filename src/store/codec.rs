//! How the bytes of a chunk are stored: as they are, or compressed with zstd where a
//! sample says that it pays.
//!
//! Works on slices; knows nothing of packs or threads. One encoder or decoder a thread.

use std::io;

use super::chunk::CHUNK_BYTES;

/// The form of a stored chunk. The numbers are those on disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Codec {
    /// The bytes as they are.
    Raw = 1,
    /// One zstd frame.
    Zstd = 2,
}

impl Codec {
    pub(super) fn from_disk(byte: u8) -> Option<Self> {
        match byte {
            1 => Some(Self::Raw),
            2 => Some(Self::Zstd),
            _ => None,
        }
    }
}

/// Below this a chunk is its own sample.
const SAMPLED_BYTES_MIN: usize = 64 * 1024;
/// Taken from the beginning and from the middle: a sixteenth of a full chunk.
const SAMPLE_PART_BYTES: usize = 8 * 1024;
/// Compression pays when it saves a thirty-second: less does not make up for the
/// time that the restore takes to decompress.
const SAVED_FRACTION: usize = 32;

/// Compresses chunks, with its own memory.
pub(super) struct Encoder {
    zstd: zstd::bulk::Compressor<'static>,
    sample: Vec<u8>,
    output: Vec<u8>,
}

impl Encoder {
    /// `level` as zstd has it; it clamps what it does not know.
    pub(super) fn new(level: i32) -> io::Result<Self> {
        Ok(Self {
            zstd: zstd::bulk::Compressor::new(level)?,
            sample: Vec::with_capacity(2 * SAMPLE_PART_BYTES),
            output: Vec::with_capacity(zstd::zstd_safe::compress_bound(CHUNK_BYTES)),
        })
    }

    /// The stored form of a chunk, which is never longer than the chunk.
    pub(super) fn encode<'a>(&'a mut self, raw: &'a [u8]) -> io::Result<(Codec, &'a [u8])> {
        if !self.sample_pays(raw)? {
            return Ok((Codec::Raw, raw));
        }
        self.output.clear();
        let len = self.zstd.compress_to_buffer(raw, &mut self.output)?;
        if pays(len, raw.len()) {
            Ok((Codec::Zstd, &self.output))
        } else {
            Ok((Codec::Raw, raw))
        }
    }

    fn sample_pays(&mut self, raw: &[u8]) -> io::Result<bool> {
        if raw.len() < SAMPLED_BYTES_MIN {
            return Ok(true);
        }
        let middle = raw.len() / 2;
        self.sample.clear();
        self.sample.extend_from_slice(&raw[..SAMPLE_PART_BYTES]);
        self.sample
            .extend_from_slice(&raw[middle..middle + SAMPLE_PART_BYTES]);
        self.output.clear();
        let len = self
            .zstd
            .compress_to_buffer(&self.sample[..], &mut self.output)?;
        Ok(pays(len, self.sample.len()))
    }
}

fn pays(compressed: usize, raw: usize) -> bool {
    compressed + raw / SAVED_FRACTION < raw
}

/// Restores chunks.
pub(super) struct Decoder {
    zstd: zstd::bulk::Decompressor<'static>,
}

impl Decoder {
    pub(super) fn new() -> io::Result<Self> {
        Ok(Self {
            zstd: zstd::bulk::Decompressor::new()?,
        })
    }

    /// Decompresses a frame into all of `raw`; a frame that holds more or less than that
    /// is an error.
    pub(super) fn decompress(&mut self, stored: &[u8], raw: &mut [u8]) -> io::Result<()> {
        let len = self.zstd.decompress_to_buffer(stored, raw)?;
        if len == raw.len() {
            Ok(())
        } else {
            Err(io::Error::new(
                io::ErrorKind::InvalidData,
                format!("{len} bytes where {} are expected", raw.len()),
            ))
        }
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// Bytes that do not compress, the same for the same seed.
    pub(in crate::store) fn noise(seed: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        let mut hasher = blake3::Hasher::new();
        hasher.update(&seed.to_le_bytes());
        hasher.finalize_xof().fill(&mut bytes);
        bytes
    }

    fn text(len: usize) -> Vec<u8> {
        b"what repeats itself compresses. "
            .iter()
            .copied()
            .cycle()
            .take(len)
            .collect()
    }

    #[test]
    fn what_pays_is_compressed_and_the_rest_is_not() {
        let mut encoder = Encoder::new(1).unwrap();
        for len in [1000, CHUNK_BYTES] {
            let (codec, stored) = encoder
                .encode(&noise(1, len))
                .map(|(c, s)| (c, s.len()))
                .unwrap();
            assert_eq!((codec, stored), (Codec::Raw, len));
            let (codec, stored) = encoder
                .encode(&text(len))
                .map(|(c, s)| (c, s.len()))
                .unwrap();
            assert_eq!(codec, Codec::Zstd);
            assert!(stored < len / 4, "{stored}");
        }
        let (codec, _) = encoder.encode(b"x").unwrap();
        assert_eq!(codec, Codec::Raw);
    }

    #[test]
    fn a_frame_of_another_length_is_an_error() {
        let mut encoder = Encoder::new(1).unwrap();
        let raw = text(5000);
        let (_, stored) = encoder.encode(&raw).unwrap();
        let mut decoder = Decoder::new().unwrap();
        let mut exact = vec![0; 5000];
        decoder.decompress(stored, &mut exact).unwrap();
        assert_eq!(exact, raw);
        for len in [0, 4999, 5001] {
            assert!(
                decoder.decompress(stored, &mut vec![0; len]).is_err(),
                "{len}"
            );
        }
    }
}
