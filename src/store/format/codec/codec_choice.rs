//! The choice of a chunk's encoding from a sample of it.
//!
//! Two questions are asked of a sixteenth of the chunk, taken from four places:
//!
//! - How uneven are the bytes at every eighth place? From eight histograms follows what
//!   a Huffman code would make of the planes of every [`Width`].
//! - Are there any matches? Zstd's fastest search tells, which codes no literals. Where
//!   there are none, zstd could do no more than planes do.
//!
//! Where there are both matches and planes that pay, a larger sample is compressed as the
//! chunk would be. The rule: planes pay if they save a thirty-second of the chunk, and zstd,
//! which takes longer to undo, if it saves a thirty-second more than they.

use std::io;

use zstd::bulk::Compressor;

use super::super::chunk::CHUNK_BYTES;
use super::byte_planes::{Plan, Width};
use super::{SAVED_FRACTION, pays};

/// Parts of a sample, as far from each other as can be: a chunk may hold several things.
const PARTS: usize = 4;
/// The sixteenth, in four parts.
const PART_FRACTION: usize = 64;
/// Smaller samples say nothing of matches.
const PART_BYTES_MIN: usize = 1024;
/// Size of a part of the sample. In smaller samples zstd finds too little of what it finds in the chunk.
const TRIAL_PART_BYTES: usize = 4 * 1024;
/// Longer ones than a trial takes.
const SAMPLE_BYTES_MAX: usize = 2 * PARTS * TRIAL_PART_BYTES;
const _: () = assert!(CHUNK_BYTES / PART_FRACTION <= TRIAL_PART_BYTES);
// A counter, also one of merged histograms, may have to hold a whole sample.
const _: () = assert!(SAMPLE_BYTES_MAX <= u16::MAX as usize);

/// Searches for matches at several times the speed of level 1, and does nothing else.
const SEARCH_LEVEL: i32 = -5;
/// The highest level of a trial: higher ones take longer and find hardly more in a sample.
const TRIAL_LEVEL_MAX: i32 = 1;
/// Wider numbers take longer to put together: they must save this part of the chunk.
const WIDER_FRACTION: usize = 128;
/// A frame's headers and the description of its Huffman code.
const CODE_BYTES: usize = 64;

/// The way to store a chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Choice {
    Raw,
    Zstd,
    Planes(Plan),
}

/// Chooses, with its own memory.
pub(super) struct Sampler {
    search: Compressor<'static>,
    trial: Compressor<'static>,
    sample: Vec<u8>,
    output: Vec<u8>,
    counts: Box<[Counts; Width::PLANES_MAX]>,
}

impl Sampler {
    pub(super) fn new(level: i32) -> io::Result<Self> {
        Ok(Self {
            search: Compressor::new(SEARCH_LEVEL)?,
            trial: Compressor::new(level.min(TRIAL_LEVEL_MAX))?,
            sample: Vec::with_capacity(SAMPLE_BYTES_MAX),
            output: Vec::with_capacity(zstd::zstd_safe::compress_bound(SAMPLE_BYTES_MAX)),
            counts: Box::new([Counts([0; 256]); Width::PLANES_MAX]),
        })
    }

    pub(super) fn choose(&mut self, raw: &[u8]) -> io::Result<Choice> {
        let part = (raw.len() / PART_FRACTION).max(PART_BYTES_MIN);
        self.take(raw, part);
        self.count();
        let whole = self.sample.len();
        let (planes, plan) = self.planes(raw.len());
        let planes_pay = pays(planes, whole);
        let searched = compressed(&mut self.search, &self.sample, &mut self.output)?;
        match (planes_pay, searched < whole) {
            (false, false) => return Ok(Choice::Raw),
            (false, true) => return Ok(Choice::Zstd),
            (true, false) => return Ok(Choice::Planes(plan)),
            (true, true) => {}
        }
        // What matches alone save, zstd saves too; what it saves of the smaller sample it
        // also saves of the larger one.
        let mut zstd_pays =
            searched + whole / SAVED_FRACTION < planes || self.zstd_pays(planes, whole)?;
        if !zstd_pays {
            self.take(raw, TRIAL_PART_BYTES);
            zstd_pays = self.sample.len() > whole && self.zstd_pays(planes, whole)?;
        }
        Ok(if zstd_pays {
            Choice::Zstd
        } else {
            Choice::Planes(plan)
        })
    }

    /// Returns true if zstd makes the sample a thirty-second smaller than planes, which make `planes` of `whole`.
    fn zstd_pays(&mut self, planes: usize, whole: usize) -> io::Result<bool> {
        let len = self.sample.len();
        let zstd = compressed(&mut self.trial, &self.sample, &mut self.output)?;
        Ok(zstd + len / SAVED_FRACTION < planes * len / whole)
    }

    /// A chunk of less than twice the sample is its own sample.
    fn take(&mut self, raw: &[u8], part: usize) {
        self.sample.clear();
        if raw.len() < 2 * PARTS * part {
            self.sample.extend_from_slice(raw);
            return;
        }
        // Numbers stay where they are modulo their width.
        let part = part.next_multiple_of(Width::PLANES_MAX);
        for place in 0..PARTS {
            let at = (raw.len() / PARTS * place).next_multiple_of(Width::PLANES_MAX);
            self.sample.extend_from_slice(&raw[at..at + part]);
        }
    }

    fn count(&mut self) {
        for counts in self.counts.iter_mut() {
            counts.0.fill(0);
        }
        let (rows, rest) = self.sample.as_chunks::<{ Width::PLANES_MAX }>();
        for row in rows {
            for (counts, byte) in self.counts.iter_mut().zip(row) {
                counts.0[usize::from(*byte)] += 1;
            }
        }
        for (counts, byte) in self.counts.iter_mut().zip(rest) {
            counts.0[usize::from(*byte)] += 1;
        }
    }

    /// The bytes that the best planes of the sample take, of a chunk of that length.
    fn planes(&self, raw_len: usize) -> (usize, Plan) {
        let len = self.sample.len();
        let code_bytes = CODE_BYTES * len / raw_len.max(1);
        let of_width = |width: Width| {
            let plane_len = len / width.bytes();
            let mut plan = Plan { width, coded: 0 };
            let mut size = len % width.bytes();
            for place in 0..width.bytes() {
                let coded = self.merged(place, width.bytes()).huffman_bytes() + code_bytes;
                if pays(coded, plane_len) {
                    plan.coded |= 1 << place;
                    size += coded;
                } else {
                    size += plane_len;
                }
            }
            (size, plan)
        };
        let [narrow, wider @ ..] = Width::ALL;
        wider
            .into_iter()
            .map(of_width)
            .fold(of_width(narrow), |best, wider| {
                if wider.0 + len / WIDER_FRACTION < best.0 {
                    wider
                } else {
                    best
                }
            })
    }

    /// The bytes at `place` and every `width` further.
    fn merged(&self, place: usize, width: usize) -> Counts {
        let mut merged = self.counts[place];
        for counts in self.counts[place..].iter().step_by(width).skip(1) {
            for (sum, count) in merged.0.iter_mut().zip(&counts.0) {
                *sum += count;
            }
        }
        merged
    }
}

fn compressed(
    zstd: &mut Compressor<'static>,
    sample: &[u8],
    output: &mut Vec<u8>,
) -> io::Result<usize> {
    output.clear();
    zstd.compress_to_buffer(sample, output)
}

/// Number of occurrences of each byte.
#[derive(Clone, Copy)]
struct Counts([u16; 256]);

impl Counts {
    /// Terms that are added apart, so that they can be added at once.
    const LANES: usize = 8;

    /// Estimates the length of these bytes in a Huffman code. It is computed from the entropy of the counts, which is
    /// too low by half a bit for each kind of byte seen (Miller and Madow), and is not below the one bit per byte that
    /// such a code needs.
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "at least 0 and at most a sample"
    )]
    fn huffman_bytes(&self) -> usize {
        let kinds = self
            .0
            .iter()
            .map(|count| u16::from(*count > 0))
            .sum::<u16>();
        let total = f32::from(self.0.iter().sum::<u16>());
        let mut terms = [0.0; Self::LANES];
        for counts in self.0.as_chunks::<{ Self::LANES }>().0 {
            let counts = counts.map(f32::from);
            for lane in 0..Self::LANES {
                terms[lane] += counts[lane] * log2(counts[lane]);
            }
        }
        if kinds <= 1 {
            return 0;
        }
        let entropy = total * log2(total) - terms.iter().sum::<f32>();
        let bits = entropy + f32::from(kinds - 1) * 0.5 * std::f32::consts::LOG2_E;
        (bits.max(total) / 8.0) as usize
    }
}

/// Within 0.01 for what is at least 1, and finite for 0; the standard one is no
/// instruction and takes longer than the rest together.
#[expect(clippy::cast_precision_loss, reason = "the exponent has eight bits")]
fn log2(x: f32) -> f32 {
    let bits = x.to_bits();
    // Only the signed conversion is an instruction.
    let exponent = (bits >> 23).cast_signed() as f32 - 127.0;
    let mantissa = f32::from_bits(bits & 0x007f_ffff | 0x3f80_0000);
    exponent + (2.0 - mantissa * (1.0 / 3.0)) * mantissa - 5.0 / 3.0
}

#[cfg(test)]
mod tests {
    use super::super::byte_planes::{HEADERS_BYTES_MAX, Packer};
    use super::super::tests::{bfloat16, float32, float64, text};
    use super::*;

    #[test]
    fn the_size_foreseen_from_a_sample_is_near_the_one_that_comes() {
        let mut sampler = Sampler::new(1).unwrap();
        let mut packer = Packer::new().unwrap();
        let mut output = vec![0; 2 * CHUNK_BYTES + HEADERS_BYTES_MAX];
        for len in [16 * 1024, 64 * 1024, CHUNK_BYTES] {
            for raw in [text(len), float32(len), bfloat16(len), float64(len)] {
                sampler.take(&raw, (len / PART_FRACTION).max(PART_BYTES_MIN));
                sampler.count();
                let (size, plan) = sampler.planes(len);
                let foreseen = size * len / sampler.sample.len();
                let packed = packer.pack(&raw, plan, &mut output).unwrap();
                assert!(
                    packed.abs_diff(foreseen) < len / 50,
                    "{plan:?} {foreseen} {packed}"
                );
            }
        }
    }

    #[test]
    fn the_quick_logarithm_is_near_the_right_one() {
        for x in 1..=u16::MAX {
            let x = f32::from(x);
            assert!((log2(x) - x.log2()).abs() < 0.011, "{x}");
        }
        assert!(log2(0.0).is_finite());
    }
}
