//! A worker of an image being written: takes pieces, names them by their hash and puts
//! the new ones into packs of its own.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use super::assembly::{Assembly, Claim, Place};
use super::chunk;
use super::codec::Encoder;
use super::error::WriteError;
use super::flow::{Flow, Piece};
use super::id::ImageId;
use super::layout::Store;
use super::pack::{Pack, PackName, PackWriter};

/// What the workers of an image share.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) store: Store,
    pub(super) image: ImageId,
    pub(super) flow: Flow,
    pub(super) assembly: Assembly,
    pub(super) packs_begun: AtomicU32,
}

pub(super) struct Worker {
    shared: Arc<Shared>,
    encoder: Encoder,
    current: Option<PackWriter>,
    sealed: Vec<Pack>,
}

impl Worker {
    pub(super) fn new(shared: Arc<Shared>, level: i32) -> Result<Self, WriteError> {
        Ok(Self {
            shared,
            encoder: Encoder::new(level).map_err(WriteError::Compress)?,
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
        let shared = Arc::clone(&self.shared);
        while let Some(piece) = shared.flow.take() {
            let result = self.process(&piece);
            shared.flow.done(piece);
            result?;
        }
        Ok(())
    }

    fn process(&mut self, piece: &Piece) -> Result<(), WriteError> {
        let bytes = piece.bytes();
        let raw_len = u32::try_from(bytes.len()).map_err(|_| WriteError::TooManyChunks)?;
        let assembly = &self.shared.assembly;
        if chunk::is_zero(bytes) {
            return assembly.set_zero(piece.stream, piece.position, raw_len);
        }
        let hash = chunk::hash(bytes);
        match assembly.set(piece.stream, piece.position, raw_len, hash)? {
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
