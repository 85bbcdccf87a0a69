//! Content-defined chunking: a stream is cut at page borders by its content.
//!
//! A process's pages move within CRIU's files from one image to the next if earlier pages appear or disappear. A chunk
//! therefore ends at a page whose fingerprint matches a mask, wherever the page lies. The cuts move with the pages, so
//! chunks are recognized. Runs of zero pages become separate chunks, which take no space.
//!
//! ```text
//! piece ─▶ Marks (64 pages, one bit each, any thread) ─▶ Cutter (in order) ─▶ Cut, Cut, …
//! ```
//! A cut may span several pieces. Memory that changes in place, such as a GPU's, is cut at fixed positions instead
//! ([`Ends::AtPieces`]): chunks are as long as possible, and a change affects only the chunk that contains it.
//!
//! This module is independent of hashes, packs and threads.

use std::collections::BTreeMap;
use std::ops::Range;

use xxhash_rust::xxh3::xxh3_64;

use crate::store::format::chunk::{CHUNK_BYTES, Hash, is_zero};

/// Granularity of cuts: CRIU writes pages.
const PAGE_BYTES: usize = 4096;
/// Number of pages in the longest chunk and in a piece, so that each page has a bit of a word.
const PAGES_MAX: u32 = 64;
const _: () = assert!(PAGES_MAX as usize * PAGE_BYTES == CHUNK_BYTES);

/// Minimum number of pages in a data chunk: the table entry of a shorter one would cost more than it saves.
const PAGES_MIN: u32 = 4;
/// Number of pages from which a more frequent fingerprint ends a chunk, so that lengths concentrate around this value.
const PAGES_NORMAL: u32 = 16;
/// Mask of the rare fingerprint: one page in 32 ends a chunk below `PAGES_NORMAL`, and one in 8 above.
const SELDOM: u64 = 0x1f;
const OFTEN: u64 = 0x7;
/// Minimum number of zero pages for a separate chunk; a shorter run compresses well within its chunk.
const ZERO_PAGES_MIN: u32 = 8;

/// Marks of a piece's pages; bit n is page n.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Marks {
    zero: u64,
    seldom: u64,
    often: u64,
    /// Length of the piece.
    len: usize,
}

impl Marks {
    /// Computes the marks of a piece of up to `CHUNK_BYTES`.
    pub(crate) fn of(bytes: &[u8]) -> Self {
        let mut marks = Self {
            zero: 0,
            seldom: 0,
            often: 0,
            len: bytes.len(),
        };
        for (number, page) in bytes.chunks(PAGE_BYTES).enumerate() {
            if is_zero(page) {
                marks.zero |= 1 << number;
                continue;
            }
            let fingerprint = xxh3_64(page);
            marks.seldom |= u64::from(fingerprint & SELDOM == 0) << number;
            marks.often |= u64::from(fingerprint & OFTEN == 0) << number;
        }
        marks
    }

    /// Returns the marks of a full piece of zeros.
    pub(crate) fn zeros() -> Self {
        Self {
            zero: u64::MAX,
            seldom: 0,
            often: 0,
            len: CHUNK_BYTES,
        }
    }

    fn has(bits: u64, page: usize) -> bool {
        bits >> page & 1 == 1
    }
}

/// Positions at which a stream's chunks end. Long runs of zeros are separate chunks in both cases.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Ends {
    /// At pages that the content determines.
    #[default]
    ByContent,
    /// At the end of each piece.
    AtPieces,
}

/// Complete chunk.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Cut<P> {
    /// Number of the chunk within the stream.
    pub(crate) position: u32,
    pub(crate) len: usize,
    pub(crate) content: Content<P>,
}

/// Content of a chunk.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Content<P> {
    /// All bytes are zero.
    Zeros,
    /// Bytes that are not yet hashed.
    Parts(Vec<Part<P>>),
    /// Several chunks of an earlier image; the position is that of the first.
    Known(Vec<Known>),
}

/// Chunk of an earlier image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Known {
    pub(crate) len: u32,
    /// Its hash; `None` if all its bytes are zero.
    pub(crate) hash: Option<Hash>,
}

/// Consecutive bytes of a piece.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Part<P> {
    /// Piece that holds the bytes; `None` for a piece of zeros, which takes no memory.
    pub(crate) piece: Option<P>,
    pub(crate) range: Range<usize>,
}

/// Chunker of one stream, whose pieces may arrive in any order.
#[derive(Debug)]
pub(crate) struct Chunker<P> {
    ends: Ends,
    /// Pieces that arrived before their predecessors.
    early: BTreeMap<u32, Early<P>>,
    /// Number of the next piece in order.
    next: u32,
    /// Number of pieces, once known.
    end: Option<u32>,
    /// Number of cuts so far.
    cuts: u32,
    chunk: Growing<P>,
}

/// Piece that waits for its predecessors.
#[derive(Debug)]
enum Early<P> {
    Bytes(Option<P>, Marks),
    Known(Vec<Known>),
}

/// Incomplete chunk.
#[derive(Debug)]
struct Growing<P> {
    parts: Vec<Part<P>>,
    pages: u32,
    /// Number of zero pages at its end.
    zero_pages: u32,
}

impl<P> Default for Growing<P> {
    fn default() -> Self {
        Self {
            parts: Vec::new(),
            pages: 0,
            zero_pages: 0,
        }
    }
}

impl<P: Clone> Chunker<P> {
    pub(crate) fn new(ends: Ends) -> Self {
        Self {
            ends,
            early: BTreeMap::new(),
            next: 0,
            end: None,
            cuts: 0,
            chunk: Growing::default(),
        }
    }

    /// Adds the piece at a position; returns the chunks that are complete now.
    pub(crate) fn add(&mut self, position: u32, piece: Option<P>, marks: Marks) -> Vec<Cut<P>> {
        self.early.insert(position, Early::Bytes(piece, marks));
        self.advance()
    }

    /// Adds chunks of an earlier image in place of a piece; returns the chunks that are complete now. The chunk before
    /// them ends there.
    pub(crate) fn add_known(&mut self, position: u32, chunks: Vec<Known>) -> Vec<Cut<P>> {
        self.early.insert(position, Early::Known(chunks));
        self.advance()
    }

    /// Sets the number of pieces of the stream; returns the chunks that are complete now.
    pub(crate) fn end(&mut self, pieces: u32) -> Vec<Cut<P>> {
        self.end = Some(pieces);
        self.advance()
    }

    fn advance(&mut self) -> Vec<Cut<P>> {
        let mut cuts = Vec::new();
        while let Some(early) = self.early.remove(&self.next) {
            self.next += 1;
            match early {
                Early::Bytes(piece, marks) => {
                    for page in 0..marks.len.div_ceil(PAGE_BYTES) {
                        self.take_page(piece.as_ref(), &marks, page, &mut cuts);
                    }
                    if self.ends == Ends::AtPieces && self.chunk.pages > 0 {
                        self.cut(&mut cuts);
                    }
                }
                Early::Known(chunks) => self.take_known(chunks, &mut cuts),
            }
        }
        if self.end == Some(self.next) && self.chunk.pages > 0 {
            self.cut(&mut cuts);
        }
        cuts
    }

    fn take_page(&mut self, piece: Option<&P>, marks: &Marks, page: usize, cuts: &mut Vec<Cut<P>>) {
        let start = page * PAGE_BYTES;
        let range = start..marks.len.min(start + PAGE_BYTES);
        if Marks::has(marks.zero, page) {
            self.chunk.push(piece, range);
            self.chunk.zero_pages += 1;
            let data = self.chunk.pages > self.chunk.zero_pages;
            if data && self.chunk.zero_pages == ZERO_PAGES_MIN {
                let zeros = self.chunk.split_zeros();
                self.cut(cuts);
                self.chunk = zeros;
            }
        } else {
            if self.chunk.is_zero() && self.chunk.pages >= ZERO_PAGES_MIN {
                self.cut(cuts);
            }
            self.chunk.push(piece, range);
            self.chunk.zero_pages = 0;
            let pages = self.chunk.pages;
            let ends = (pages >= PAGES_MIN && Marks::has(marks.seldom, page))
                || (pages >= PAGES_NORMAL && Marks::has(marks.often, page));
            if ends && self.ends == Ends::ByContent {
                return self.cut(cuts);
            }
        }
        if self.chunk.pages == PAGES_MAX {
            self.cut(cuts);
        }
    }

    fn take_known(&mut self, chunks: Vec<Known>, cuts: &mut Vec<Cut<P>>) {
        if self.chunk.pages > 0 {
            self.cut(cuts);
        }
        let len = chunks.iter().map(|chunk| chunk.len as usize).sum();
        let count = u32::try_from(chunks.len()).unwrap_or(u32::MAX);
        self.push_cut(len, Content::Known(chunks), cuts);
        // One was counted.
        self.cuts += count - 1;
    }

    fn cut(&mut self, cuts: &mut Vec<Cut<P>>) {
        let chunk = std::mem::take(&mut self.chunk);
        let len = chunk.parts.iter().map(|part| part.range.len()).sum();
        let content = if chunk.is_zero() {
            Content::Zeros
        } else {
            Content::Parts(chunk.parts)
        };
        self.push_cut(len, content, cuts);
    }

    fn push_cut(&mut self, len: usize, content: Content<P>, cuts: &mut Vec<Cut<P>>) {
        cuts.push(Cut {
            position: self.cuts,
            len,
            content,
        });
        self.cuts += 1;
    }
}

impl<P: Clone> Growing<P> {
    fn is_zero(&self) -> bool {
        self.zero_pages == self.pages
    }

    fn push(&mut self, piece: Option<&P>, range: Range<usize>) {
        self.pages += 1;
        // A part is extended only by the next page of the same piece; another piece begins at 0.
        match self.parts.last_mut() {
            Some(last) if last.range.end == range.start => last.range.end = range.end,
            Some(_) | None => self.parts.push(Part {
                piece: piece.cloned(),
                range,
            }),
        }
    }

    /// Splits off the zero pages at the end.
    fn split_zeros(&mut self) -> Self {
        let mut zeros = Self {
            parts: Vec::new(),
            pages: self.zero_pages,
            zero_pages: self.zero_pages,
        };
        let mut bytes = self.tail_bytes();
        while bytes > 0 {
            let Some(last) = self.parts.last_mut() else {
                break;
            };
            let taken = bytes.min(last.range.len());
            let from = last.range.end - taken;
            zeros.parts.push(Part {
                piece: last.piece.clone(),
                range: from..last.range.end,
            });
            last.range.end = from;
            if last.range.is_empty() {
                self.parts.pop();
            }
            bytes -= taken;
        }
        zeros.parts.reverse();
        self.pages -= self.zero_pages;
        self.zero_pages = 0;
        zeros
    }

    /// Returns the number of bytes in the zero pages at the end; the last page may be short.
    fn tail_bytes(&self) -> usize {
        let last = self.parts.last().map_or(0, |part| part.range.end);
        let short = (PAGE_BYTES - last % PAGE_BYTES) % PAGE_BYTES;
        self.zero_pages as usize * PAGE_BYTES - short
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::store::format::chunk::ZEROS;
    use crate::store::format::codec::tests::noise;

    fn chunks(stream: &[u8], seed: u64) -> Vec<Vec<u8>> {
        chunks_that_end(Ends::ByContent, stream, seed)
    }

    /// Cuts a stream whose pieces arrive in an order given by `seed`; returns the chunks by position.
    fn chunks_that_end(ends: Ends, stream: &[u8], seed: u64) -> Vec<Vec<u8>> {
        let mut chunker = Chunker::new(ends);
        let mut pieces: Vec<(u32, &[u8])> = (0..).zip(stream.chunks(CHUNK_BYTES)).collect();
        let count = u32::try_from(pieces.len()).unwrap();
        pieces.sort_by_key(|(position, _)| (u64::from(*position) ^ seed) % 4);
        let mut cuts = Vec::new();
        if seed % 2 == 1 {
            cuts.extend(chunker.end(count));
        }
        for (position, piece) in pieces {
            let marks = Marks::of(piece);
            let held = (marks != Marks::zeros()).then_some(piece);
            cuts.extend(chunker.add(position, held, marks));
        }
        cuts.extend(chunker.end(count));
        cuts.sort_by_key(|cut| cut.position);
        (0..)
            .zip(&cuts)
            .for_each(|(n, cut)| assert_eq!(cut.position, n));
        let bytes = |cut: &Cut<&[u8]>| match &cut.content {
            Content::Parts(parts) => parts.iter().flat_map(part_bytes).collect(),
            Content::Zeros | Content::Known(_) => vec![0; cut.len],
        };
        let chunks: Vec<Vec<u8>> = cuts.iter().map(bytes).collect();
        for (cut, chunk) in cuts.iter().zip(&chunks) {
            assert_eq!(cut.len, chunk.len());
        }
        chunks
    }

    fn part_bytes(part: &Part<&[u8]>) -> Vec<u8> {
        part.piece.unwrap_or(&ZEROS[..])[part.range.clone()].to_vec()
    }

    fn found_again(first: &[u8], second: &[u8]) -> f64 {
        let known: std::collections::HashSet<Vec<u8>> = chunks(first, 0).into_iter().collect();
        let again = chunks(second, 0)
            .into_iter()
            .filter(|chunk| known.contains(chunk));
        let bytes: usize = again.map(|chunk| chunk.len()).sum();
        f64::from(u32::try_from(bytes).unwrap()) / f64::from(u32::try_from(second.len()).unwrap())
    }

    #[test]
    fn pages_that_moved_are_found_again() {
        let first = noise(1, 1000 * PAGE_BYTES);
        let new = noise(2, 3 * PAGE_BYTES);
        let (head, tail) = first.split_at(500 * PAGE_BYTES);
        for second in [
            [&new[..], &first[..]].concat(),
            [head, &new, tail].concat(),
            [&head[7 * PAGE_BYTES..], tail].concat(),
        ] {
            let found = found_again(&first, &second);
            assert!(found > 0.9, "{found}");
        }
    }

    #[test]
    fn most_chunks_have_some_sixteen_pages() {
        let stream = noise(3, 5000 * PAGE_BYTES);
        let chunks = chunks(&stream, 0);
        let average = stream.len() / chunks.len() / PAGE_BYTES;
        assert!((14..26).contains(&average), "{average}");
        let (_, all_but_last) = chunks.split_last().unwrap();
        let least = all_but_last.iter().map(Vec::len).min().unwrap();
        assert!(least >= PAGES_MIN as usize * PAGE_BYTES, "{least}");
    }

    #[test]
    fn fixed_chunks_are_as_long_as_possible() {
        let stream = noise(5, 40 * CHUNK_BYTES + 1);
        let lens = chunks_that_end(Ends::AtPieces, &stream, 0);
        let lens: Vec<usize> = lens.iter().map(Vec::len).collect();
        assert_eq!(lens, [&[CHUNK_BYTES; 40][..], &[1]].concat());
    }

    #[test]
    fn only_long_runs_of_zeros_become_separate_chunks() {
        let page = noise(4, PAGE_BYTES);
        for (zeros, own) in [(1, false), (7, false), (8, true), (200, true)] {
            let stream = [&page[..], &vec![0; zeros * PAGE_BYTES], &page].concat();
            let zero_chunks = chunks(&stream, 0)
                .iter()
                .filter(|chunk| is_zero(chunk))
                .count();
            assert_eq!(zero_chunks > 0, own, "{zeros}");
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(60))]

        #[test]
        fn chunks_form_the_stream_for_any_order_of_pieces(
            runs in prop::collection::vec((0..4_u64, 1..150_usize), 0..8),
            tail in 0..PAGE_BYTES,
            seed in 0..8_u64,
            ends in prop::sample::select(vec![Ends::ByContent, Ends::AtPieces]),
        ) {
            let run = |(kind, pages): (u64, usize)| match kind {
                0 | 1 => vec![0; pages * PAGE_BYTES],
                seed => noise(seed, pages * PAGE_BYTES),
            };
            let mut stream: Vec<u8> = runs.into_iter().flat_map(run).collect();
            stream.extend(std::iter::repeat_n(u8::from(seed > 3), tail));
            let chunks = chunks_that_end(ends, &stream, seed);
            prop_assert!(chunks.concat() == stream);
            prop_assert!(chunks.iter().all(|chunk| !chunk.is_empty() && chunk.len() <= CHUNK_BYTES));
            if ends == Ends::AtPieces {
                let mut end = 0;
                let within = chunks.iter().all(|chunk| {
                    let start = end;
                    end += chunk.len();
                    start / CHUNK_BYTES == (end - 1) / CHUNK_BYTES
                });
                prop_assert!(within, "a chunk spans two pieces");
            }
            prop_assert_eq!(chunks, chunks_that_end(ends, &stream, 0));
        }
    }
}
