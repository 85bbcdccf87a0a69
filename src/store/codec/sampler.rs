//! What a sample of a chunk says about the cheapest way to store it.
//!
//! Two questions are asked of two places in the chunk, 8 KiB each:
//!
//! - How uneven are the bytes at every eighth place? From eight histograms follows what
//!   a Huffman code would make of the planes of every [`Width`]. No trial: a tenth of
//!   the time of one.
//! - Are there matches? A trial with zstd's fastest search, which codes no literals. Only
//!   where it finds some does the sample have to be compressed as the chunk would be.
//!
//! The rule: the forms are ordered by the time they take to undo, raw, planes, zstd, and
//! one that takes longer must save a thirty-second of the chunk more than those before it.

use std::io;

use zstd::bulk::Compressor;

use super::pays;
use super::planes::{Plan, Width};

/// A chunk of less than twice the sample is its own sample.
const SAMPLED_BYTES_MIN: usize = 4 * SAMPLE_PART_BYTES;
/// Taken from the beginning and from the middle: together a sixteenth of a full chunk.
const SAMPLE_PART_BYTES: usize = 8 * 1024;
const _: () = assert!(SAMPLE_PART_BYTES.is_multiple_of(Width::PLANES_MAX));
// The counters of two merged histograms may hold a whole sample.
const _: () = assert!(SAMPLED_BYTES_MIN <= u16::MAX as usize);

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
    codes_literals: bool,
    sample: Vec<u8>,
    output: Vec<u8>,
    counts: Box<[Counts; Width::PLANES_MAX]>,
}

impl Sampler {
    pub(super) fn new(level: i32) -> io::Result<Self> {
        Ok(Self {
            search: Compressor::new(SEARCH_LEVEL)?,
            trial: Compressor::new(level.min(TRIAL_LEVEL_MAX))?,
            // Zero is the default level, which is above.
            codes_literals: level >= 0,
            sample: Vec::with_capacity(SAMPLED_BYTES_MIN),
            output: Vec::with_capacity(zstd::zstd_safe::compress_bound(SAMPLED_BYTES_MIN)),
            counts: Box::new([Counts([0; 256]); Width::PLANES_MAX]),
        })
    }

    pub(super) fn choose(&mut self, raw: &[u8]) -> io::Result<Choice> {
        self.take(raw);
        self.count();
        let whole = self.sample.len();
        let (planes, plan) = self.planes(raw.len());
        let (faster, choice) = if pays(planes, whole) {
            (planes, Choice::Planes(plan))
        } else {
            (whole, Choice::Raw)
        };
        // No zstd gets far enough below what costs next to nothing.
        let zstd = self.zstd()?;
        Ok(if zstd + whole / super::SAVED_FRACTION < faster {
            Choice::Zstd
        } else {
            choice
        })
    }

    fn take(&mut self, raw: &[u8]) {
        self.sample.clear();
        if raw.len() < SAMPLED_BYTES_MIN {
            self.sample.extend_from_slice(raw);
            return;
        }
        let middle = (raw.len() / 2).next_multiple_of(Width::PLANES_MAX);
        for at in [0, middle] {
            self.sample
                .extend_from_slice(&raw[at..at + SAMPLE_PART_BYTES]);
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

    /// The bytes that zstd makes of the sample.
    fn zstd(&mut self) -> io::Result<usize> {
        let found = compressed(&mut self.search, &self.sample, &mut self.output)?;
        if pays(found, self.sample.len()) {
            compressed(&mut self.trial, &self.sample, &mut self.output)
        } else if self.codes_literals {
            Ok(self.merged(0, 1).huffman_bytes())
        } else {
            Ok(found)
        }
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

/// How often each byte occurs.
#[derive(Clone, Copy)]
struct Counts([u16; 256]);

impl Counts {
    /// Terms that are added apart, so that they can be added at once.
    const LANES: usize = 8;

    /// What a Huffman code makes of so many bytes. From the entropy of the counts, which
    /// is too low by half a bit a kind of byte seen (Miller and Madow), and not below
    /// the one bit a byte that such a code needs.
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "at least 0 and at most a sample"
    )]
    fn huffman_bytes(&self) -> usize {
        let mut terms = [0.0; Self::LANES];
        let mut kinds = [0.0; Self::LANES];
        let mut total = [0.0; Self::LANES];
        for counts in self.0.as_chunks::<{ Self::LANES }>().0 {
            for lane in 0..Self::LANES {
                let count = f32::from(counts[lane]);
                terms[lane] += count * log2(count);
                total[lane] += count;
                kinds[lane] += count.min(1.0);
            }
        }
        let total: f32 = total.iter().sum();
        let kinds: f32 = kinds.iter().sum();
        if kinds <= 1.0 {
            return 0;
        }
        let entropy = total * log2(total) - terms.iter().sum::<f32>();
        let bits = entropy + (kinds - 1.0) * 0.5 * std::f32::consts::LOG2_E;
        (bits.max(total) / 8.0) as usize
    }
}

/// Within 0.01 for what is at least 1, and finite for 0; the standard one is no
/// instruction and takes longer than the rest together.
#[expect(clippy::cast_precision_loss, reason = "the exponent has eight bits")]
fn log2(x: f32) -> f32 {
    let bits = x.to_bits();
    let exponent = (bits >> 23) as f32 - 127.0;
    let mantissa = f32::from_bits(bits & 0x007f_ffff | 0x3f80_0000);
    exponent + (2.0 - mantissa / 3.0) * mantissa - 5.0 / 3.0
}
