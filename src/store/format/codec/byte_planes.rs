//! Byte planes: a chunk of numbers is stored as the first bytes of all, then their second
//! bytes, and so on, each plane as it is or entropy coded.
//!
//! In an array of floating-point numbers the byte with the exponent takes few values and
//! the bytes of the mantissa are noise. Apart, the first loses more than half of its bits to
//! a Huffman code, and the others need not be looked at: float32 gets a sixth smaller and
//! bfloat16 a third, at a multiple of zstd's speed, which finds no matches in either.
//!
//! ```text
//! u8    width of a number: 2, 4 or 8
//! for each plane, that of the lowest address first:
//! u32   length, little-endian
//!       that many bytes: the plane itself if it is as long as that, else one zstd frame
//! then the bytes past the last whole number
//! ```

use std::io;

use zstd::bulk::{Compressor, Decompressor};
use zstd::zstd_safe::{CParameter, ParamSwitch, Strategy};

use super::super::chunk::CHUNK_BYTES;
use super::{byte_shuffle, damaged, pays};

/// Number of bytes of a number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Width {
    /// bfloat16 and float16.
    Two = 2,
    /// float32 and small integers.
    Four = 4,
    /// float64, integers, addresses.
    Eight = 8,
}

impl Width {
    /// The most planes there can be.
    pub(super) const PLANES_MAX: usize = 8;
    /// Narrow to wide.
    pub(super) const ALL: [Self; 3] = [Self::Two, Self::Four, Self::Eight];

    pub(super) fn bytes(self) -> usize {
        usize::from(self as u8)
    }

    fn from_disk(byte: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|width| *width as u8 == byte)
    }
}

/// The width of the numbers, and the planes that a Huffman code makes shorter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Plan {
    pub(super) width: Width,
    /// A bit for each plane, the lowest for the lowest address.
    pub(super) coded: u8,
}

/// Largest size of the stored form besides its planes.
pub(super) const HEADERS_BYTES_MAX: usize = 1 + Width::PLANES_MAX * LENGTH_BYTES;
const LENGTH_BYTES: usize = size_of::<u32>();

/// Distance at which zstd looks for matches, so large that it finds none and codes literals only: its own limit.
/// Matches within an exponent plane are chance; they cost time and bits.
const SEARCH_STEP_BYTES: u32 = 128 * 1024;

/// Takes chunks apart, with its own memory.
pub(super) struct Packer {
    huffman: Compressor<'static>,
    planes: Vec<u8>,
    spare: Vec<u8>,
}

impl Packer {
    pub(super) fn new() -> io::Result<Self> {
        let mut huffman = Compressor::new(1)?;
        for parameter in [
            CParameter::Strategy(Strategy::ZSTD_fast),
            CParameter::TargetLength(SEARCH_STEP_BYTES),
            CParameter::MinMatch(7),
            CParameter::HashLog(6),
            CParameter::LiteralCompressionMode(ParamSwitch::Enable),
        ] {
            huffman.set_parameter(parameter)?;
        }
        Ok(Self {
            huffman,
            planes: vec![0; CHUNK_BYTES],
            spare: vec![0; CHUNK_BYTES],
        })
    }

    /// Writes the stored form of a chunk to the beginning of `output`, which has room for
    /// the worst case of zstd and [`HEADERS_BYTES_MAX`] more, and returns its length.
    pub(super) fn pack(&mut self, raw: &[u8], plan: Plan, output: &mut [u8]) -> io::Result<usize> {
        let width = plan.width.bytes();
        let (numbers, rest) = raw.split_at(raw.len() - raw.len() % width);
        let planes = &mut self.planes[..numbers.len()];
        byte_shuffle::split(
            numbers,
            plan.width,
            planes,
            &mut self.spare[..numbers.len()],
        );
        output[0] = plan.width as u8;
        let mut at = 1;
        for (place, plane) in planes
            .chunks_exact((numbers.len() / width).max(1))
            .enumerate()
        {
            let (length, body) = output[at..].split_at_mut(LENGTH_BYTES);
            let coded = if plan.coded & (1 << place) == 0 {
                None
            } else {
                let len = self.huffman.compress_to_buffer(plane, body)?;
                pays(len, plane.len()).then_some(len)
            };
            let len = coded.unwrap_or_else(|| {
                body[..plane.len()].copy_from_slice(plane);
                plane.len()
            });
            // A plane is shorter than a chunk.
            length.copy_from_slice(&u32::try_from(len).map_err(io::Error::other)?.to_le_bytes());
            at += LENGTH_BYTES + len;
        }
        output[at..at + rest.len()].copy_from_slice(rest);
        Ok(at + rest.len())
    }
}

/// Puts chunks together, with its own memory.
pub(super) struct Unpacker {
    decoded: Vec<u8>,
}

impl Unpacker {
    pub(super) fn new() -> Self {
        Self {
            decoded: vec![0; CHUNK_BYTES],
        }
    }

    /// Fills all of `raw`, which is at most a chunk; stored bytes that make more or less
    /// than that are an error.
    pub(super) fn unpack(
        &mut self,
        zstd: &mut Decompressor<'static>,
        mut stored: &[u8],
        raw: &mut [u8],
    ) -> io::Result<()> {
        let width = take(&mut stored, 1)?[0];
        let width = Width::from_disk(width).ok_or_else(|| damaged("an unknown width"))?;
        let numbers_len = raw.len() - raw.len() % width.bytes();
        let (numbers, rest) = raw.split_at_mut(numbers_len);
        let plane_len = numbers_len / width.bytes();
        let mut planes: [&[u8]; Width::PLANES_MAX] = [&[]; Width::PLANES_MAX];
        let mut decoded = &mut self.decoded[..];
        // Fewer bytes than a number has are stored without planes.
        let count = if plane_len == 0 { 0 } else { width.bytes() };
        for plane in &mut planes[..count] {
            let length = take(&mut stored, LENGTH_BYTES)?;
            let length = length.try_into().map_err(io::Error::other)?;
            *plane = take(&mut stored, u32::from_le_bytes(length) as usize)?;
            if plane.len() != plane_len {
                let room;
                (room, decoded) = decoded.split_at_mut(plane_len);
                super::unpack_frame(zstd, plane, room)?;
                *plane = room;
            }
        }
        if stored.len() != rest.len() {
            return Err(damaged("bytes left over or missing"));
        }
        rest.copy_from_slice(stored);
        byte_shuffle::join(&planes, width, numbers);
        Ok(())
    }
}

fn take<'a>(stored: &mut &'a [u8], len: usize) -> io::Result<&'a [u8]> {
    let taken;
    (taken, *stored) = stored
        .split_at_checked(len)
        .ok_or_else(|| damaged("a plane that ends too early"))?;
    Ok(taken)
}
