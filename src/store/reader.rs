//! Reading an image: streams go out, every chunk checked before any of its bytes.

use std::collections::HashMap;
use std::io::Write;

use super::ahead;
use super::chunk::ZEROS;
use super::error::ReadError;
use super::fetch::{Fault, Fetcher};
use super::id::ImageId;
use super::layout::Store;
use super::manifest::{Content, Manifest, Stream};
use super::pack::PackFiles;

/// Threads that read, decompress and hash one stream: one core of today does about
/// 1 GB/s, and what takes the stream takes less than 10.
const WORKERS_MAX: usize = 8;

/// Streams with fewer chunks are read by the caller's thread alone: most of CRIU's files,
/// which are done before a thread is started.
const PARALLEL_CHUNKS_MIN: usize = 8;

/// An image being read. Streams can be read from several threads at once. Pruning the
/// image meanwhile makes reading fail.
#[derive(Debug)]
pub struct ImageReader {
    manifest: Manifest,
    streams: HashMap<String, usize>,
    packs: PackFiles,
}

/// A chunk on its way out.
#[derive(Default)]
struct Prepared {
    buffer: Vec<u8>,
    outcome: Outcome,
}

#[derive(Default)]
enum Outcome {
    #[default]
    Checked,
    Zero(usize),
    Fault(usize, Fault),
}

impl Store {
    /// Opens an image for reading. Checks the manifest and that each pack is there and
    /// has its length; chunks are checked as they are read.
    ///
    /// # Errors
    /// The image is missing or damaged; see [`ReadError::is_damage`].
    pub fn read(&self, id: ImageId) -> Result<ImageReader, ReadError> {
        let manifest = self.manifest(id)?;
        let packs = PackFiles::new(self, manifest.packs.clone())
            .map_err(|source| ReadError::Pack { image: id, source })?;
        let names = manifest.streams.iter().map(|stream| stream.name.clone());
        Ok(ImageReader {
            streams: names.zip(0..).collect(),
            packs,
            manifest,
        })
    }
}

impl ImageReader {
    /// What the image is made of.
    #[must_use]
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// Whether the image has this stream.
    #[must_use]
    pub fn contains(&self, name: &str) -> bool {
        self.streams.contains_key(name)
    }

    /// Writes a whole stream to `sink`; returns its length. Several threads work ahead.
    ///
    /// # Errors
    /// [`ReadError::Corrupt`] after all chunks before the bad one, and none of its bytes,
    /// went to the sink. [`ReadError::Sink`] when the sink failed.
    pub fn copy_to(&self, name: &str, sink: &mut impl Write) -> Result<u64, ReadError> {
        let stream = self.stream(name)?;
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let workers = match stream.chunks.len() {
            0..PARALLEL_CHUNKS_MIN => 1,
            _ => cores.min(WORKERS_MAX),
        };
        ahead::in_order(
            stream.chunks.len(),
            workers,
            || Fetcher::new(&self.packs).map_err(ReadError::Worker),
            |fetcher, position, spare| self.prepare(fetcher, stream, position, spare),
            |prepared| {
                let bytes = match std::mem::take(&mut prepared.outcome) {
                    Outcome::Checked => &prepared.buffer,
                    Outcome::Zero(len) => &ZEROS[..len],
                    Outcome::Fault(position, fault) => {
                        return Err(self.damage(stream, position, fault));
                    }
                };
                sink.write_all(bytes).map_err(ReadError::Sink)
            },
        )?;
        sink.flush().map_err(ReadError::Sink)?;
        Ok(stream.raw_len)
    }

    /// A whole stream, if it is at most `limit` bytes long.
    ///
    /// # Errors
    /// As [`copy_to`](Self::copy_to), and [`ReadError::TooLong`].
    pub fn read_to_vec(&self, name: &str, limit: u64) -> Result<Vec<u8>, ReadError> {
        let len = self.stream(name)?.raw_len;
        if len > limit {
            return Err(ReadError::TooLong {
                image: self.manifest.id,
                stream: name.to_owned(),
                len,
                limit,
            });
        }
        let mut bytes = Vec::new();
        self.copy_to(name, &mut bytes)?;
        Ok(bytes)
    }

    /// What a fault at a chunk of a stream means for the image.
    fn damage(&self, stream: &Stream, chunk: usize, fault: Fault) -> ReadError {
        let image = self.manifest.id;
        match fault {
            Fault::Pack(source) => ReadError::Pack { image, source },
            Fault::Check | Fault::Decompress(_) | Fault::Hash => ReadError::Corrupt {
                image,
                stream: stream.name.clone(),
                chunk,
                reason: fault.to_string(),
            },
        }
    }

    fn stream(&self, name: &str) -> Result<&Stream, ReadError> {
        let position = self.streams.get(name).ok_or_else(|| ReadError::NoStream {
            image: self.manifest.id,
            stream: name.chars().take(255).collect(),
        })?;
        Ok(&self.manifest.streams[*position])
    }

    fn prepare(
        &self,
        fetcher: &mut Fetcher<'_>,
        stream: &Stream,
        position: usize,
        spare: Option<Prepared>,
    ) -> Prepared {
        let mut prepared = spare.unwrap_or_default();
        let chunk = self.manifest.chunks[stream.chunks[position] as usize];
        let raw_len = chunk.raw_len as usize;
        prepared.outcome = match chunk.content {
            Content::Zero => Outcome::Zero(raw_len),
            Content::Stored(stored) => {
                prepared.buffer.resize(raw_len, 0);
                match fetcher.fetch(&stored, &mut prepared.buffer) {
                    Ok(()) => Outcome::Checked,
                    Err(fault) => Outcome::Fault(position, fault),
                }
            }
        };
        prepared
    }
}
