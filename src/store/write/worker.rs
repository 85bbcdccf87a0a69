//! Worker of an image under construction: cuts pieces into chunks, names each chunk by its hash and adds new chunks to
//! the image's packs.

use std::sync::{Arc, Mutex};

use xxhash_rust::xxh3::xxh3_64;

use super::chunker::{Chunker, Content, Cut, Ends, Marks, Part};
use super::manifest_builder::{Claim, ManifestBuilder, Place};
use super::pack_sink::PackSink;
use super::work_queue::{Piece, Work, WorkQueue};
use super::work_times::{WorkStep, WorkTimes};
use crate::store::error::WriteError;
use crate::store::format::chunk::{CHUNK_BYTES, Hash, ZEROS};
use crate::store::format::cipher::OVERHEAD_BYTES;
use crate::store::format::codec::{Codec, Encoder};
use crate::store::format::store_folder::Store;
use crate::sync::{OnPanic, locked};

/// Niceness of the workers: the job's threads have priority.
const NICENESS: i32 = 10;

/// State that the workers of an image share.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) store: Store,
    pub(crate) work_queue: Arc<WorkQueue>,
    pub(crate) builder: ManifestBuilder,
    /// Chunkers by stream, with the default ends where none were set.
    pub(crate) cutters: Mutex<Vec<Chunker<Arc<Piece>>>>,
    pub(crate) sink: PackSink,
    pub(crate) times: WorkTimes,
}

impl Shared {
    /// Passes a piece to its stream's chunker; returns the stream and its chunks that are complete now.
    fn cut(&self, work: Work<Piece>) -> (u32, Vec<Cut<Arc<Piece>>>) {
        match work {
            Work::Piece {
                stream,
                position,
                piece,
            } => {
                let marks = Marks::of(piece.bytes());
                let piece = Some(Arc::new(piece));
                (
                    stream,
                    self.chunker(stream, |chunker| chunker.add(position, piece, marks)),
                )
            }
            Work::Zeros { stream, position } => {
                let add = |chunker: &mut Chunker<_>| chunker.add(position, None, Marks::zeros());
                (stream, self.chunker(stream, add))
            }
            Work::Known {
                stream,
                position,
                chunks,
            } => {
                let add = |chunker: &mut Chunker<_>| chunker.add_known(position, chunks);
                (stream, self.chunker(stream, add))
            }
            Work::End { stream, pieces } => {
                (stream, self.chunker(stream, |chunker| chunker.end(pieces)))
            }
        }
    }

    /// Sets the ends of a stream's chunks, before its first piece.
    pub(crate) fn set_ends(&self, stream: u32, ends: Ends) {
        self.chunker(stream, |chunker| *chunker = Chunker::new(ends));
    }

    /// Appends an encoded chunk to the image's packs; `sealed` is a buffer for its sealed form.
    pub(crate) fn put(
        &self,
        name: Hash,
        codec: Codec,
        encoded: &[u8],
        sealed: &mut [u8],
    ) -> Result<Place, WriteError> {
        let stored = match self.store.secrets() {
            Some(secrets) => {
                let sealed = &mut sealed[..encoded.len() + OVERHEAD_BYTES];
                let result = secrets.chunks.seal(&name, encoded, sealed);
                result.map_err(WriteError::Seal)?;
                sealed
            }
            None => encoded,
        };
        let len = u32::try_from(stored.len()).map_err(|_| WriteError::TooManyChunks)?;
        let append = || self.sink.append(stored);
        let (pack, offset) = self.times.measure(WorkStep::Disk, append)?;
        Ok(Place {
            pack,
            offset,
            len,
            codec,
            check: xxh3_64(stored),
        })
    }

    fn chunker<T>(&self, stream: u32, action: impl FnOnce(&mut Chunker<Arc<Piece>>) -> T) -> T {
        let mut cutters = locked(&self.cutters);
        let number = stream as usize;
        if cutters.len() <= number {
            cutters.resize_with(number + 1, || Chunker::new(Ends::default()));
        }
        action(&mut cutters[number])
    }
}

pub(crate) struct Worker {
    shared: Arc<Shared>,
    encoder: Encoder,
    /// Buffer for a chunk that spans several pieces.
    chunk: Vec<u8>,
    /// Sealed form of the chunk, in an encrypted store.
    sealed: Vec<u8>,
}

impl Worker {
    pub(crate) fn new(shared: Arc<Shared>, level: i32) -> Result<Self, WriteError> {
        Ok(Self {
            shared,
            encoder: Encoder::new(level).map_err(WriteError::Compress)?,
            chunk: Vec::with_capacity(CHUNK_BYTES),
            sealed: vec![0; CHUNK_BYTES + OVERHEAD_BYTES],
        })
    }

    /// Works until the queue ends. An error stops the whole image.
    pub(crate) fn run(mut self) {
        let shared = Arc::clone(&self.shared);
        // No thread waits for a worker that panics.
        let _guard = OnPanic(|| shared.work_queue.stop(WriteError::WorkerPanicked));
        if let Err(error) = self.work() {
            shared.work_queue.stop(error);
        }
    }

    fn work(&mut self) -> Result<(), WriteError> {
        // Applies to this thread only: the job's threads have priority if there are too few cores.
        if let Err(error) = rustix::process::nice(NICENESS) {
            tracing::debug!(%error, "cannot lower the priority of a store worker");
        }
        let shared = Arc::clone(&self.shared);
        let next = || {
            shared
                .times
                .measure(WorkStep::Input, || shared.work_queue.take())
        };
        while let Some(work) = next() {
            let (stream, cuts) = shared.cut(work);
            let mut cuts = cuts.into_iter();
            let result = cuts.try_for_each(|cut| {
                let len = cut.len;
                let processed = self.process(stream, cut);
                processed.map(|()| shared.work_queue.stored.add(len))
            });
            drop(cuts);
            shared.work_queue.rest();
            result?;
        }
        Ok(())
    }

    fn process(&mut self, stream: u32, cut: Cut<Arc<Piece>>) -> Result<(), WriteError> {
        let (builder, position) = (&self.shared.builder, cut.position);
        let parts = match cut.content {
            Content::Parts(parts) => parts,
            Content::Zeros => {
                let raw_len = u32::try_from(cut.len).map_err(|_| WriteError::TooManyChunks)?;
                return builder.set_zero(stream, position, raw_len);
            }
            Content::Known(chunks) => return builder.set_known(stream, position, &chunks),
        };
        if let [
            Part {
                piece: Some(piece),
                range,
            },
        ] = &parts[..]
        {
            return self.process_bytes(stream, cut.position, &piece.bytes()[range.clone()]);
        }
        let mut chunk = std::mem::take(&mut self.chunk);
        chunk.clear();
        for part in parts {
            let whole = part
                .piece
                .as_ref()
                .map_or(&ZEROS[..], |piece| piece.bytes());
            chunk.extend_from_slice(&whole[part.range]);
        }
        let result = self.process_bytes(stream, cut.position, &chunk);
        self.chunk = chunk;
        result
    }

    fn process_bytes(
        &mut self,
        stream: u32,
        position: u32,
        bytes: &[u8],
    ) -> Result<(), WriteError> {
        let raw_len = u32::try_from(bytes.len()).map_err(|_| WriteError::TooManyChunks)?;
        let name = || self.shared.store.name_of(bytes);
        let hash = self.shared.times.measure(WorkStep::Hash, name);
        let builder = &self.shared.builder;
        match builder.set(stream, position, raw_len, hash)? {
            Claim::Known => Ok(()),
            Claim::New(position) => {
                let place = self.store(hash, bytes)?;
                self.shared.builder.place(position, place);
                Ok(())
            }
        }
    }

    fn store(&mut self, name: Hash, bytes: &[u8]) -> Result<Place, WriteError> {
        let times = &self.shared.times;
        let encoder = &mut self.encoder;
        let encoded = times.measure(WorkStep::Compression, move || encoder.encode(bytes));
        let (codec, encoded) = encoded.map_err(WriteError::Compress)?;
        self.shared.put(name, codec, encoded, &mut self.sealed)
    }
}
