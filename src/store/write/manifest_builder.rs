//! Builder of a manifest from the chunks of each stream.
//!
//! Streams and workers add their results; the sum becomes a [`Manifest`]. The builder holds no data of chunks; the
//! first use of the index may read files.

use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Mutex};

use hashbrown::HashTable;

use super::chunker::Known;
use super::dedup_index::{DedupIndex, LazyIndex};
use crate::store::error::WriteError;
use crate::store::format::chunk::{Hash, key_of};
use crate::store::format::codec::Codec;
use crate::store::format::manifest::{Chunk, Content, Stored, Stream, is_stream_name};
use crate::store::format::pack::{Pack, PackName};
use crate::sync::locked;

/// Position at which a worker stored a chunk.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Place {
    pub(crate) pack: PackName,
    pub(crate) offset: u64,
    pub(crate) len: u32,
    pub(crate) codec: Codec,
    pub(crate) check: u64,
}

/// Result of a worker's claim of a chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Claim {
    /// The chunk is stored already, or another worker is storing it.
    Known,
    /// The chunk is new: the worker stores it and reports its position under this number.
    New(u32),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Progress {
    Open,
    Finished,
}

#[derive(Debug)]
struct Draft {
    name: String,
    raw_len: u64,
    chunks: Vec<Option<u32>>,
    progress: Progress,
}

#[derive(Clone, Copy, Debug)]
enum Entry {
    Zero,
    /// Chunk of an older image; `pack` is a position in the index.
    Old(Stored),
    Claimed(Hash),
    Placed(Hash, Place),
}

#[derive(Debug, Default)]
struct State {
    streams: Vec<Draft>,
    names: HashSet<String>,
    chunks: Vec<(u32, Entry)>,
    /// Positions in `chunks` of the chunks with a hash, by hash.
    by_hash: HashTable<u32>,
    zeros: HashMap<u32, u32>,
}

/// State shared by the streams and the workers of an image.
#[derive(Debug)]
pub(crate) struct ManifestBuilder {
    /// Read before the state is locked: streams, which the frozen job waits for, lock it too.
    index: Arc<LazyIndex>,
    state: Mutex<State>,
}

/// Part of a manifest that the builder provides.
pub(crate) struct Assembled {
    pub(crate) streams: Vec<Stream>,
    pub(crate) chunks: Vec<Chunk>,
    pub(crate) packs: Vec<Pack>,
    pub(crate) raw_bytes: u64,
}

impl ManifestBuilder {
    pub(crate) fn new(index: Arc<LazyIndex>) -> Self {
        Self {
            index,
            state: Mutex::default(),
        }
    }

    pub(crate) fn await_index(&self) {
        self.index();
    }

    fn index(&self) -> &DedupIndex {
        &self.index
    }

    /// Adds a stream and returns its position.
    pub(crate) fn open(&self, name: &str) -> Result<u32, WriteError> {
        let name = name.to_owned();
        if !is_stream_name(&name) {
            return Err(WriteError::StreamName { name });
        }
        let mut state = locked(&self.state);
        if !state.names.insert(name.clone()) {
            return Err(WriteError::StreamTwice { name });
        }
        state.streams.push(Draft {
            name,
            raw_len: 0,
            chunks: Vec::new(),
            progress: Progress::Open,
        });
        u32::try_from(state.streams.len() - 1).map_err(|_| WriteError::TooManyChunks)
    }

    /// Sets the length of a complete stream; some of its chunks may follow later.
    pub(crate) fn finish(&self, stream: u32, raw_len: u64) {
        let mut state = locked(&self.state);
        let draft = &mut state.streams[stream as usize];
        draft.raw_len = raw_len;
        draft.progress = Progress::Finished;
    }

    /// Records a chunk of zeros.
    pub(crate) fn set_zero(
        &self,
        stream: u32,
        position: u32,
        raw_len: u32,
    ) -> Result<(), WriteError> {
        let mut state = locked(&self.state);
        let chunk = state.zero(raw_len)?;
        state.set(stream, position, chunk);
        Ok(())
    }

    /// Records the hash of a chunk.
    pub(crate) fn set(
        &self,
        stream: u32,
        position: u32,
        raw_len: u32,
        hash: Hash,
    ) -> Result<Claim, WriteError> {
        let index = self.index();
        let mut state = locked(&self.state);
        let (chunk, claim) = match state.find(&hash) {
            Some(chunk) => (chunk, Claim::Known),
            None => state.claim(index, raw_len, hash)?,
        };
        state.set(stream, position, chunk);
        Ok(claim)
    }

    /// Records consecutive chunks that [`known`](Self::known) has found.
    pub(crate) fn set_known(
        &self,
        stream: u32,
        first: u32,
        chunks: &[Known],
    ) -> Result<(), WriteError> {
        let index = self.index();
        let mut state = locked(&self.state);
        for (position, known) in (first..).zip(chunks) {
            let chunk = match known.hash {
                None => state.zero(known.len)?,
                Some(hash) => match state.find(&hash) {
                    Some(chunk) => chunk,
                    None => state.claim(index, known.len, hash)?.0,
                },
            };
            state.set(stream, position, chunk);
        }
        Ok(())
    }

    /// Returns for each of these chunks whether it is stored already.
    pub(crate) fn known<'a>(&self, chunks: impl Iterator<Item = &'a Chunk>) -> Vec<bool> {
        let index = self.index();
        let state = locked(&self.state);
        let is_known = |chunk: &Chunk| match chunk.content {
            Content::Zero => true,
            Content::Stored(Stored { hash, .. }) => {
                state.find(&hash).is_some() || index.get(&hash, chunk.raw_len).is_some()
            }
        };
        chunks.map(is_known).collect()
    }

    /// Records the position of a claimed chunk.
    pub(crate) fn place(&self, chunk: u32, place: Place) {
        let mut state = locked(&self.state);
        let entry = &mut state.chunks[chunk as usize].1;
        match *entry {
            Entry::Claimed(hash) => *entry = Entry::Placed(hash, place),
            Entry::Zero | Entry::Old(_) | Entry::Placed(..) => {
                unreachable!("only a claimed chunk is placed, once")
            }
        }
    }

    /// Returns an error if a stream is not finished.
    pub(crate) fn check_finished(&self) -> Result<(), WriteError> {
        let state = locked(&self.state);
        let is_open = |stream: &&Draft| stream.progress == Progress::Open;
        match state.streams.iter().find(is_open) {
            Some(stream) => Err(WriteError::StreamUnfinished {
                stream: stream.name.clone(),
            }),
            None => Ok(()),
        }
    }

    /// Assembles the streams. All must be finished, all workers must have ended, and `written` must list their packs.
    /// The builder is empty afterwards.
    pub(crate) fn assemble(&self, written: &[Pack]) -> Result<Assembled, WriteError> {
        let old = self.index().packs();
        let state = std::mem::take(&mut *locked(&self.state));
        let mut packs = PackTable::new(old);
        let mut chunks = Vec::with_capacity(state.chunks.len());
        for (raw_len, entry) in state.chunks {
            let content = packs.content(entry, written);
            let content = content.ok_or(WriteError::WorkerPanicked)?;
            chunks.push(Chunk { raw_len, content });
        }
        let mut streams = Vec::with_capacity(state.streams.len());
        for draft in state.streams {
            let chunks: Option<Vec<u32>> = draft.chunks.into_iter().collect();
            streams.push(Stream {
                name: draft.name,
                raw_len: draft.raw_len,
                chunks: chunks.ok_or(WriteError::WorkerPanicked)?,
            });
        }
        Ok(Assembled {
            raw_bytes: streams.iter().map(|stream| stream.raw_len).sum(),
            streams,
            chunks,
            packs: packs.packs,
        })
    }
}

impl State {
    fn add(&mut self, raw_len: u32, entry: Entry) -> Result<u32, WriteError> {
        let position = u32::try_from(self.chunks.len()).map_err(|_| WriteError::TooManyChunks)?;
        self.chunks.push((raw_len, entry));
        Ok(position)
    }

    /// Returns the chunk of so many zeros.
    fn zero(&mut self, raw_len: u32) -> Result<u32, WriteError> {
        if let Some(chunk) = self.zeros.get(&raw_len) {
            return Ok(*chunk);
        }
        let chunk = self.add(raw_len, Entry::Zero)?;
        self.zeros.insert(raw_len, chunk);
        Ok(chunk)
    }

    fn claim(
        &mut self,
        index: &DedupIndex,
        raw_len: u32,
        hash: Hash,
    ) -> Result<(u32, Claim), WriteError> {
        let old = index.get(&hash, raw_len).map(|chunk| chunk.content);
        let (chunk, claim) = if let Some(Content::Stored(stored)) = old {
            (self.add(raw_len, Entry::Old(stored))?, Claim::Known)
        } else {
            let chunk = self.add(raw_len, Entry::Claimed(hash))?;
            (chunk, Claim::New(chunk))
        };
        let Self {
            by_hash, chunks, ..
        } = self;
        if by_hash.is_empty() {
            // The image probably resembles the earlier ones. Without the memory, the lists grow as they are filled.
            let _ = by_hash.try_reserve(index.len(), |_| 0);
            let _ = chunks.try_reserve(index.len());
        }
        by_hash.insert_unique(key_of(&hash), chunk, |other| {
            chunks[*other as usize]
                .1
                .hash()
                .map_or(0, |hash| key_of(&hash))
        });
        Ok((chunk, claim))
    }

    fn find(&self, hash: &Hash) -> Option<u32> {
        let same = |chunk: &u32| self.chunks[*chunk as usize].1.hash() == Some(*hash);
        self.by_hash.find(key_of(hash), same).copied()
    }

    fn set(&mut self, stream: u32, position: u32, chunk: u32) {
        let chunks = &mut self.streams[stream as usize].chunks;
        let position = position as usize;
        if chunks.len() <= position {
            chunks.resize(position + 1, None);
        }
        chunks[position] = Some(chunk);
    }
}

impl Entry {
    fn hash(&self) -> Option<Hash> {
        match self {
            Self::Zero => None,
            Self::Old(stored) => Some(stored.hash),
            Self::Claimed(hash) | Self::Placed(hash, _) => Some(*hash),
        }
    }
}

/// Packs to which the image refers, without duplicates.
struct PackTable<'a> {
    packs: Vec<Pack>,
    positions: HashMap<PackName, u32>,
    /// Packs of the index; most chunks are in one of them.
    old: &'a [Pack],
    /// Positions of these packs in the table.
    old_positions: Vec<Option<u32>>,
}

impl<'a> PackTable<'a> {
    fn new(old: &'a [Pack]) -> Self {
        Self {
            packs: Vec::new(),
            positions: HashMap::new(),
            old,
            old_positions: vec![None; old.len()],
        }
    }

    /// Returns a chunk's content; `None` if the chunk was claimed and never stored.
    fn content(&mut self, entry: Entry, written: &[Pack]) -> Option<Content> {
        match entry {
            Entry::Zero => Some(Content::Zero),
            Entry::Old(stored) => {
                let number = stored.pack as usize;
                let pack = match self.old_positions[number] {
                    Some(position) => position,
                    None => self.position(self.old[number])?,
                };
                self.old_positions[number] = Some(pack);
                Some(Content::Stored(Stored { pack, ..stored }))
            }
            Entry::Claimed(_) => None,
            Entry::Placed(hash, place) => {
                let pack = match self.positions.get(&place.pack) {
                    Some(position) => *position,
                    None => self.position(*written.iter().find(|pack| pack.name == place.pack)?)?,
                };
                Some(Content::Stored(Stored {
                    hash,
                    pack,
                    offset: place.offset,
                    len: place.len,
                    codec: place.codec,
                    check: Some(place.check),
                }))
            }
        }
    }

    fn position(&mut self, pack: Pack) -> Option<u32> {
        if let Some(position) = self.positions.get(&pack.name) {
            return Some(*position);
        }
        let position = u32::try_from(self.packs.len()).ok()?;
        self.packs.push(pack);
        self.positions.insert(pack.name, position);
        Some(position)
    }
}
