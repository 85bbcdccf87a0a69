//! Chunks of an image that leave the store in their stored form: several threads fetch and check them, one consumer
//! receives them in order.

use super::chunk_fetcher::{ChunkFetcher, Fault};
use super::read_ahead::{self, Extent};
use crate::store::error::ReadError;
use crate::store::format::manifest::{Manifest, Stored};
use crate::store::format::pack::PackFiles;

/// Threads that read, open, decompress and hash chunks: enough to keep up with any disk or network.
const WORKERS_MAX: usize = 8;
/// Chunks that wait for the consumer: eight for each thread, together 16 MiB, or 32 MiB with both the raw and the
/// encoded form.
const WINDOW_MAX: usize = 8 * WORKERS_MAX;

/// Chunks to be passed on.
pub(crate) struct CheckedChunks<'a> {
    /// The chunks in order, with their positions in the manifest.
    pub(crate) order: Vec<(u32, Stored)>,
    pub(crate) source: &'a Manifest,
    pub(crate) packs: &'a PackFiles,
    /// True if they are passed on as they are sealed in the store.
    pub(crate) is_sealed: bool,
}

/// Chunk that was checked.
#[derive(Default)]
pub(crate) struct CheckedChunk {
    /// Position in [`CheckedChunks::order`].
    pub(crate) position: usize,
    pub(crate) raw: Vec<u8>,
    pub(crate) stored: Vec<u8>,
    fault: Option<Fault>,
}

impl CheckedChunks<'_> {
    /// Fetches and checks every chunk, and passes them in order.
    pub(crate) fn read<E: From<ReadError>>(
        &self,
        mut consume: impl FnMut(&CheckedChunk) -> Result<(), E>,
    ) -> Result<(), E> {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let extent = Extent {
            workers: cores.min(WORKERS_MAX),
            window: WINDOW_MAX,
        };
        read_ahead::in_order(
            self.order.len(),
            extent,
            || ChunkFetcher::new(self.packs).map_err(|error| ReadError::Worker(error).into()),
            |fetcher, position| self.prepare(fetcher, position),
            |prepared| match &prepared.fault {
                None => consume(&prepared),
                Some(fault) => Err(self.damage(prepared.position, fault).into()),
            },
        )
    }

    fn prepare(&self, fetcher: &mut ChunkFetcher<'_>, position: usize) -> CheckedChunk {
        let (index, stored) = &self.order[position];
        let raw_len = self.source.chunks[*index as usize].raw_len;
        let mut prepared = CheckedChunk {
            position,
            raw: vec![0; raw_len as usize],
            ..CheckedChunk::default()
        };
        match fetcher.fetch_encoded(stored, &mut prepared.raw, &mut prepared.stored) {
            Ok(()) if self.is_sealed => prepared.stored = fetcher.sealed(stored).to_vec(),
            Ok(()) => {}
            Err(fault) => prepared.fault = Some(fault),
        }
        prepared
    }

    fn damage(&self, position: usize, fault: &Fault) -> ReadError {
        damage(self.source, self.order[position].0, fault)
    }
}

/// Returns the error for a damaged chunk of an image.
pub(crate) fn damage(source: &Manifest, chunk: u32, fault: &Fault) -> ReadError {
    let uses = source.streams.iter().filter_map(|stream| {
        let position = stream.chunks.iter().position(|one| *one == chunk)?;
        Some((stream.name.clone(), position))
    });
    let (stream, chunk) = uses.into_iter().next().unwrap_or_default();
    ReadError::Corrupt {
        image: source.id,
        stream,
        chunk,
        reason: fault.to_string(),
    }
}
