//! A worker of an image being written: looks at pieces, and of the chunks that they are
//! cut into, names each by its hash and puts the new ones into packs of its own.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};

use xxhash_rust::xxh3::xxh3_64;

use super::assembly::{Assembly, Claim, Place};
use super::chunk::{self, CHUNK_BYTES, ZEROS};
use super::codec::Encoder;
use super::cut::{Cut, Cutter, Marks, Part};
use super::error::WriteError;
use super::flow::{Flow, Piece, Work};
use super::id::ImageId;
use super::layout::Store;
use super::pack::{Pack, PackName, PackWriter};
use super::sync::locked;

/// How much less than the job's threads ours matter to the scheduler.
const NICENESS: i32 = 10;

/// What the workers of an image share.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) store: Store,
    pub(super) image: ImageId,
    pub(super) flow: Arc<Flow>,
    pub(super) assembly: Assembly,
    /// One for each stream.
    pub(super) cutters: Mutex<Vec<Cutter<Arc<Piece>>>>,
    pub(super) packs_begun: AtomicU32,
}

impl Shared {
    /// Hands a piece to its stream's cutter; returns the stream and its chunks that are
    /// complete now.
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
                    self.cutter(stream, |cutter| cutter.add(position, piece, marks)),
                )
            }
            Work::Zeros { stream, position } => {
                let add = |cutter: &mut Cutter<_>| cutter.add(position, None, Marks::zeros());
                (stream, self.cutter(stream, add))
            }
            Work::End { stream, pieces } => {
                (stream, self.cutter(stream, |cutter| cutter.end(pieces)))
            }
        }
    }

    fn cutter<T>(&self, stream: u32, action: impl FnOnce(&mut Cutter<Arc<Piece>>) -> T) -> T {
        let mut cutters = locked(&self.cutters);
        let number = stream as usize;
        if cutters.len() <= number {
            cutters.resize_with(number + 1, Cutter::default);
        }
        action(&mut cutters[number])
    }
}

pub(super) struct Worker {
    shared: Arc<Shared>,
    encoder: Encoder,
    /// Where a chunk is put together that lies in several pieces.
    chunk: Vec<u8>,
    current: Option<PackWriter>,
    sealed: Vec<Pack>,
}

impl Worker {
    pub(super) fn new(shared: Arc<Shared>, level: i32) -> Result<Self, WriteError> {
        Ok(Self {
            shared,
            encoder: Encoder::new(level).map_err(WriteError::Compress)?,
            chunk: Vec::with_capacity(CHUNK_BYTES),
            current: None,
            sealed: Vec::new(),
        })
    }

    /// Works until the flow ends; returns the packs it wrote, durable. A failure stops
    /// the whole image.
    pub(super) fn run(mut self) -> Vec<Pack> {
        let shared = Arc::clone(&self.shared);
        let _alarm = Alarm(&shared.flow);
        let result = self.work().and_then(|()| self.seal());
        if let Err(error) = result {
            shared.flow.stop(error);
        }
        self.sealed
    }

    fn work(&mut self) -> Result<(), WriteError> {
        // The thread's own: the job's threads win where there are not cores for all.
        if let Err(error) = rustix::process::nice(NICENESS) {
            tracing::debug!(%error, "a worker of the store keeps its priority");
        }
        let shared = Arc::clone(&self.shared);
        while let Some(work) = shared.flow.take() {
            let (stream, cuts) = shared.cut(work);
            let mut cuts = cuts.into_iter();
            let result = cuts.try_for_each(|cut| self.process(stream, cut));
            drop(cuts);
            shared.flow.rest();
            result?;
        }
        Ok(())
    }

    fn process(&mut self, stream: u32, cut: Cut<Arc<Piece>>) -> Result<(), WriteError> {
        let Some(parts) = cut.parts else {
            let raw_len = u32::try_from(cut.len).map_err(|_| WriteError::TooManyChunks)?;
            return self.shared.assembly.set_zero(stream, cut.position, raw_len);
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
        let hash = chunk::hash(bytes);
        let assembly = &self.shared.assembly;
        match assembly.set(stream, position, raw_len, hash)? {
            Claim::Known => Ok(()),
            Claim::New(position) => {
                let place = self.store(bytes)?;
                self.shared.assembly.place(position, place);
                Ok(())
            }
        }
    }

    fn store(&mut self, bytes: &[u8]) -> Result<Place, WriteError> {
        if let Some(pack) = &self.current
            && !pack.has_room(bytes.len())
        {
            self.seal()?;
        }
        let pack = match self.current.take() {
            Some(pack) => pack,
            None => self.begin_pack()?,
        };
        let pack = self.current.insert(pack);
        let (codec, stored) = self.encoder.encode(bytes).map_err(WriteError::Compress)?;
        let name = pack.name();
        let offset = pack
            .append(stored)
            .map_err(|source| pack_error(&self.shared.store, name, source))?;
        Ok(Place {
            pack: name,
            offset,
            len: u32::try_from(stored.len()).map_err(|_| WriteError::TooManyChunks)?,
            codec,
            check: xxh3_64(stored),
        })
    }

    fn begin_pack(&self) -> Result<PackWriter, WriteError> {
        let shared = &self.shared;
        let name = PackName {
            image: shared.image,
            number: shared.packs_begun.fetch_add(1, Ordering::Relaxed),
        };
        PackWriter::create(&shared.store, name)
            .map_err(|source| pack_error(&shared.store, name, source))
    }

    fn seal(&mut self) -> Result<(), WriteError> {
        let Some(pack) = self.current.take() else {
            return Ok(());
        };
        let name = pack.name();
        let sealed = pack.seal();
        self.sealed
            .push(sealed.map_err(|source| pack_error(&self.shared.store, name, source))?);
        Ok(())
    }
}

fn pack_error(store: &Store, name: PackName, source: std::io::Error) -> WriteError {
    WriteError::Pack {
        path: store.pack_file(name),
        source,
    }
}

/// Stops the image when its worker panics, so that nobody waits for it.
struct Alarm<'a>(&'a Flow);

impl Drop for Alarm<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.stop(WriteError::WorkerPanicked);
        }
    }
}
