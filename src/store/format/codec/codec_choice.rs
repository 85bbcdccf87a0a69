//! Choice of a chunk's encoding by a sample of the chunk.
//!
//! The sample is a sixteenth of the chunk, taken from four places. It answers two questions:
//!
//! - How skewed are the bytes at each position modulo eight? Eight histograms give the length that a Huffman code would
//!   have for the planes of every [`Width`].
//! - Are there matches? Zstd's fastest search, which codes no literals, finds out. Without matches, zstd saves no more
//!   than planes.
//!
//! If there are matches and planes pay, too, zstd compresses the sample, and then a larger one if it came near the planes.
//! The rule: planes pay if they save a thirty-second of the chunk. Zstd, whose decompression takes longer, pays if it
//! saves another thirty-second.

use std::io;

use zstd::bulk::Compressor;

use super::super::chunk::CHUNK_BYTES;
use super::byte_planes::{Plan, Width};
use super::{SAVED_FRACTION, pays};

/// Number of parts of a sample, spread over the chunk because it may hold different kinds of data.
const PARTS: usize = 4;
/// Length of a part as a divisor of the chunk's: four parts are a sixteenth.
const PART_FRACTION: usize = 64;
/// Minimum length of a part: matches in smaller samples are not representative.
const PART_BYTES_MIN: usize = 1024;
/// Length of a part in the larger sample. In smaller samples zstd finds too few of the chunk's matches.
const TRIAL_PART_BYTES: usize = 4 * 1024;
/// Maximum length of a sample.
const SAMPLE_BYTES_MAX: usize = 2 * PARTS * TRIAL_PART_BYTES;
const _: () = assert!(CHUNK_BYTES / PART_FRACTION <= TRIAL_PART_BYTES);
// Counters, including those of merged histograms, must hold the length of a whole sample.
const _: () = assert!(SAMPLE_BYTES_MAX <= u16::MAX as usize);

/// Level of the search for matches: several times the speed of level 1, with no other work.
const SEARCH_LEVEL: i32 = -5;
/// Maximum level of a trial: higher levels take longer and find little more in a sample.
const TRIAL_LEVEL_MAX: i32 = 1;
/// Saving required for each wider width, as a divisor of the chunk's length: wider numbers take longer to assemble.
const WIDER_FRACTION: usize = 128;
/// If zstd takes more than the planes by such a part of them for the small sample, the larger one is not tried: these are
/// sparse or small numbers, whose zeros are matches. In `benches/codec`, machine code becomes 0.4 % longer; small numbers
/// are stored twice as fast.
const FAR_FRACTION: usize = 8;
/// Size of a frame's headers and the description of its Huffman code.
const CODE_BYTES: usize = 64;

/// Chosen way to store a chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Choice {
    Raw,
    Zstd,
    Planes(Plan),
}

/// Sampler of chunks, with its own memory.
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
        // Savings by matches are also savings of zstd, and savings in the smaller sample also occur in the larger one.
        let zstd_pays =
            |zstd: usize, len: usize| zstd + len / SAVED_FRACTION < planes * len / whole;
        if planes <= whole / SAVED_FRACTION {
            return Ok(Choice::Planes(plan)); // zstd has nothing left to save
        }
        if zstd_pays(searched, whole) {
            return Ok(Choice::Zstd);
        }
        let tried = compressed(&mut self.trial, &self.sample, &mut self.output)?;
        if zstd_pays(tried, whole) {
            return Ok(Choice::Zstd);
        }
        if tried > planes + planes / FAR_FRACTION {
            return Ok(Choice::Planes(plan));
        }
        self.take(raw, TRIAL_PART_BYTES);
        let len = self.sample.len();
        if len <= whole {
            return Ok(Choice::Planes(plan));
        }
        let tried = compressed(&mut self.trial, &self.sample, &mut self.output)?;
        if zstd_pays(tried, len) {
            return Ok(Choice::Zstd);
        }
        Ok(Choice::Planes(plan))
    }

    /// Takes the sample. A chunk shorter than two samples is its own sample.
    fn take(&mut self, raw: &[u8], part: usize) {
        self.sample.clear();
        if raw.len() < 2 * PARTS * part {
            self.sample.extend_from_slice(raw);
            return;
        }
        // The position of numbers modulo their width must not change.
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

    /// Returns the number of bytes that the best planes of the sample would take for a chunk of this length, and the
    /// plan.
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

    /// Returns the counts of the bytes at `place` and at every `width` after it.
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

/// Number of occurrences of each byte value.
#[derive(Clone, Copy)]
struct Counts([u16; 256]);

impl Counts {
    /// Number of independent sums, so that the additions can be vectorized.
    const LANES: usize = 8;

    /// Estimates the length of these bytes in a Huffman code from the entropy of the counts. The entropy is corrected
    /// by half a bit for each byte value seen (Miller and Madow), and the result is at least one bit per byte, as such
    /// a code needs.
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

/// Approximates log2: within 0.01 for arguments from 1, and finite for 0. The standard function is not an instruction
/// and would take longer than the rest.
#[expect(clippy::cast_precision_loss, reason = "the exponent has eight bits")]
fn log2(x: f32) -> f32 {
    let bits = x.to_bits();
    // Only the conversion of a signed number is an instruction.
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
