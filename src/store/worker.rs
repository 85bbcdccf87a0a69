//! A worker of an image being written: takes pieces, names them by their hash and puts
//! the new ones into the image's packs.

use std::sync::Arc;

use super::assembly::{Assembly, Claim, Place};
use super::chunk;
use super::codec::Encoder;
use super::error::WriteError;
use super::flow::{Flow, Piece};
use super::sink::PackSink;

/// What the workers of an image share.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) flow: Flow,
    pub(super) assembly: Assembly,
    pub(super) sink: PackSink,
}

pub(super) struct Worker {
    shared: Arc<Shared>,
    encoder: Encoder,
}

impl Worker {
    pub(super) fn new(shared: Arc<Shared>, level: i32) -> Result<Self, WriteError> {
        Ok(Self {
            shared,
            encoder: Encoder::new(level).map_err(WriteError::Compress)?,
        })
    }

    /// Works until the flow ends. A failure stops the whole image.
    pub(super) fn run(mut self) {
        let shared = Arc::clone(&self.shared);
        let _alarm = Alarm(&shared.flow);
        if let Err(error) = self.work() {
            shared.flow.stop(error);
        }
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
        let (codec, stored) = self.encoder.encode(bytes).map_err(WriteError::Compress)?;
        let len = u32::try_from(stored.len()).map_err(|_| WriteError::TooManyChunks)?;
        let (pack, offset) = self.shared.sink.append(stored)?;
        Ok(Place {
            pack,
            offset,
            len,
            codec,
        })
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
