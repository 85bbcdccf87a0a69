//! Reader of an image: copies streams to sinks and checks every chunk before returning any of its bytes.

use std::collections::HashMap;
use std::fmt;
use std::io::{self, Write};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::chunk_fetcher::{ChunkFetcher, Fault, Scratch};
use super::read_ahead::{self, Extent};
use crate::store::byte_counter::ByteCounter;
use crate::store::error::ReadError;
use crate::store::format::chunk::{CHUNK_BYTES, ZEROS};
use crate::store::format::image_id::ImageId;
use crate::store::format::manifest::{Chunk, Content, Manifest, Stored, Stream};
use crate::store::format::pack::PackFiles;
use crate::store::format::store_folder::Store;
use crate::sync::locked;

/// Maximum number of threads that read, decompress and hash one stream. A present core does about 1 GB/s, and consumers
/// of streams take less than 10 GB/s.
const WORKERS_MAX: usize = 8;

/// Minimum number of chunks for several threads. Shorter streams, which most of CRIU's files are, are complete before
/// another thread has started.
const PARALLEL_CHUNKS_MIN: usize = 8;

/// Maximum number of chunks read ahead in a stream: eight per worker.
const WINDOW_MAX: usize = 8 * WORKERS_MAX;

/// Default limit on the data read ahead for all streams of an image together.
const BUFFER_DEFAULT: u64 = 64 << 20;

/// Image open for reading. Several threads may read streams at the same time; together the streams hold at most the
/// buffer, plus one chunk each. The packs stay open, so an image with up to 256 of them can be removed meanwhile.
#[derive(Debug)]
pub struct ImageReader {
    /// Number of chunks that may still be read ahead.
    room: AtomicUsize,
    buffers: Buffers,
    scratches: Scratches,
    manifest: Manifest,
    streams: HashMap<String, usize>,
    packs: PackFiles,
    given: ByteCounter,
}

/// Buffers for reuse: obtaining fresh memory from the kernel costs as much as hashing its content.
#[derive(Debug, Default)]
struct Buffers(Mutex<Vec<Vec<u8>>>);

/// Pool of the fetchers' working memory.
#[derive(Default)]
struct Scratches(Mutex<Vec<Scratch>>);

impl fmt::Debug for Scratches {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Scratches")
    }
}

/// Fetcher that returns its working memory to the pool on drop.
pub(crate) struct Fetching<'a> {
    home: &'a Scratches,
    fetcher: Option<ChunkFetcher<'a>>,
}

impl<'a> Fetching<'a> {
    fn fetch(&mut self, stored: &Stored, raw: &mut [u8]) -> Result<(), Fault> {
        self.fetcher().fetch(stored, raw)
    }

    pub(super) fn fetcher(&mut self) -> &mut ChunkFetcher<'a> {
        let Some(fetcher) = &mut self.fetcher else {
            unreachable!("only the drop takes it")
        };
        fetcher
    }
}

impl Drop for Fetching<'_> {
    fn drop(&mut self) {
        if let Some(fetcher) = self.fetcher.take() {
            locked(&self.home.0).push(fetcher.into_scratch());
        }
    }
}

/// Checked piece of a stream. Returns its memory for reuse on drop.
#[derive(Debug)]
pub struct Piece<'a> {
    home: &'a Buffers,
    content: Checked,
}

#[derive(Debug)]
enum Checked {
    Bytes(Vec<u8>),
    Zeros(usize),
}

impl AsRef<[u8]> for Piece<'_> {
    fn as_ref(&self) -> &[u8] {
        match &self.content {
            Checked::Bytes(bytes) => bytes,
            Checked::Zeros(len) => &ZEROS[..*len],
        }
    }
}

impl Drop for Piece<'_> {
    fn drop(&mut self) {
        if let Checked::Bytes(bytes) = &mut self.content {
            locked(&self.home.0).push(std::mem::take(bytes));
        }
    }
}

impl Store {
    /// Opens an image for reading. Checks the manifest and that each pack exists with the right length; chunks are
    /// checked when they are read.
    ///
    /// # Errors
    /// The image is missing or damaged; see [`ReadError::is_damage`].
    pub fn read(&self, id: ImageId) -> Result<ImageReader, ReadError> {
        self.check_place()?;
        let manifest = self.manifest(id)?;
        let packs = match self.pending.find(id) {
            Some(pending) => PackFiles::arriving(self, pending),
            None => PackFiles::new(self, manifest.packs.clone())
                .map_err(|source| ReadError::Pack { image: id, source })?,
        };
        let names = manifest.streams.iter().map(|stream| stream.name.clone());
        Ok(ImageReader {
            room: AtomicUsize::new(chunks_in(BUFFER_DEFAULT)),
            buffers: Buffers::default(),
            scratches: Scratches::default(),
            streams: names.zip(0..).collect(),
            packs,
            given: ByteCounter::default(),
            manifest,
        })
    }
}

/// Returns the number of chunks of maximum length that fit a buffer.
fn chunks_in(buffer: u64) -> usize {
    usize::try_from(buffer).unwrap_or(usize::MAX) / CHUNK_BYTES
}

/// Share of the buffer that a stream holds while it is read.
struct Share<'a> {
    room: &'a AtomicUsize,
    chunks: usize,
}

impl<'a> Share<'a> {
    fn none(room: &'a AtomicUsize) -> Self {
        Self { room, chunks: 0 }
    }

    /// Takes half of the remaining room, so that streams that begin later find some.
    fn of(room: &'a AtomicUsize) -> Self {
        let mut chunks = 0;
        let take = |left: usize| {
            chunks = left.div_ceil(2).min(WINDOW_MAX);
            Some(left - chunks)
        };
        let _ = room.fetch_update(Ordering::Relaxed, Ordering::Relaxed, take);
        Self { room, chunks }
    }
}

impl Drop for Share<'_> {
    fn drop(&mut self) {
        self.room.fetch_add(self.chunks, Ordering::Relaxed);
    }
}

impl ImageReader {
    /// Sets the limit on bytes that wait in memory for their consumers.
    #[must_use]
    pub fn with_buffer(mut self, bytes: u64) -> Self {
        self.room = AtomicUsize::new(chunks_in(bytes));
        self
    }

    /// Returns the manifest.
    #[must_use]
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// Returns the counter of all bytes returned from the streams.
    #[must_use]
    pub fn given(&self) -> ByteCounter {
        self.given.clone()
    }

    /// Returns true if the image has this stream.
    #[must_use]
    pub fn contains(&self, name: &str) -> bool {
        self.streams.contains_key(name)
    }

    /// Writes a whole stream to `sink` and returns its length. Several threads read ahead.
    ///
    /// # Errors
    /// [`ReadError::Corrupt`] if a chunk is bad; all chunks before it were written to the sink, and none of its own
    /// bytes. [`ReadError::Sink`] if the sink failed.
    pub fn copy_to(&self, name: &str, sink: &mut impl Write) -> Result<u64, ReadError> {
        let stream = self.stream(name)?;
        self.each_chunk(stream, |prepared| sink.write_all(prepared.as_ref()))?;
        sink.flush().map_err(ReadError::Sink)?;
        Ok(stream.raw_len)
    }

    /// Passes a whole stream in pieces to `take`. Several threads read ahead.
    ///
    /// # Errors
    /// The same as [`copy_to`](Self::copy_to); [`ReadError::Sink`] if `take` failed.
    pub fn each_piece<'a>(
        &'a self,
        name: &str,
        take: impl FnMut(Piece<'a>) -> io::Result<()>,
    ) -> Result<(), ReadError> {
        self.each_chunk(self.stream(name)?, take)
    }

    /// Passes the checked chunks of a stream to the callback in order.
    fn each_chunk<'a>(
        &'a self,
        stream: &'a Stream,
        mut take: impl FnMut(Piece<'a>) -> io::Result<()>,
    ) -> Result<(), ReadError> {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let share = match stream.chunks.len() {
            0..PARALLEL_CHUNKS_MIN => Share::none(&self.room),
            _ => Share::of(&self.room),
        };
        let extent = Extent {
            workers: cores.min(WORKERS_MAX),
            window: share.chunks,
        };
        read_ahead::in_order(
            stream.chunks.len(),
            extent,
            || self.fetcher(),
            |fetcher, position| {
                let prepared = self.prepare(fetcher, stream, position);
                prepared.map_err(|fault| (position, fault))
            },
            |prepared| match prepared {
                Err((position, fault)) => Err(self.damage(stream, position, fault)),
                Ok(prepared) => {
                    self.given.add(prepared.as_ref().len());
                    take(prepared).map_err(ReadError::Sink)
                }
            },
        )
    }

    /// Returns a whole stream of at most `limit` bytes.
    ///
    /// # Errors
    /// The same as [`copy_to`](Self::copy_to), and [`ReadError::TooLong`].
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

    /// Converts a fault of a stream's chunk to an error of the image.
    fn damage(&self, stream: &Stream, chunk: usize, fault: Fault) -> ReadError {
        let image = self.manifest.id;
        match fault {
            Fault::Pack(source) => ReadError::Pack { image, source },
            Fault::Check | Fault::Open(_) | Fault::Decompress(_) | Fault::Hash => {
                ReadError::Corrupt {
                    image,
                    stream: stream.name.clone(),
                    chunk,
                    reason: fault.to_string(),
                }
            }
        }
    }

    pub(crate) fn stream(&self, name: &str) -> Result<&Stream, ReadError> {
        let position = self.streams.get(name).ok_or_else(|| ReadError::NoStream {
            image: self.manifest.id,
            stream: name.chars().take(255).collect(),
        })?;
        Ok(&self.manifest.streams[*position])
    }

    pub(crate) fn fetcher(&self) -> Result<Fetching<'_>, ReadError> {
        let scratch = match locked(&self.scratches.0).pop() {
            Some(scratch) => scratch,
            None => Scratch::new().map_err(ReadError::Worker)?,
        };
        Ok(Fetching {
            home: &self.scratches,
            fetcher: Some(ChunkFetcher::with(&self.packs, scratch)),
        })
    }

    fn prepare(
        &self,
        fetcher: &mut Fetching<'_>,
        stream: &Stream,
        position: usize,
    ) -> Result<Piece<'_>, Fault> {
        let chunk = self.manifest.chunks[stream.chunks[position] as usize];
        let raw_len = chunk.raw_len as usize;
        let home = &self.buffers;
        if let Content::Zero = chunk.content {
            let content = Checked::Zeros(raw_len);
            return Ok(Piece { home, content });
        }
        let mut bytes = locked(&home.0).pop().unwrap_or_default();
        bytes.resize(raw_len, 0);
        Self::fill(fetcher, &chunk, &mut bytes)?;
        let content = Checked::Bytes(bytes);
        Ok(Piece { home, content })
    }

    /// Fills `raw`, which must have the chunk's length. On an error the content of `raw` is unspecified.
    fn fill(fetcher: &mut Fetching<'_>, chunk: &Chunk, raw: &mut [u8]) -> Result<(), Fault> {
        match &chunk.content {
            Content::Zero => raw.fill(0),
            Content::Stored(stored) => fetcher.fetch(stored, raw)?,
        }
        Ok(())
    }

    /// Fetches like [`fill`](Self::fill), into a buffer of its own, for the chunk at a position of the stream.
    pub(crate) fn fetch(
        &self,
        fetcher: &mut Fetching<'_>,
        stream: &Stream,
        position: usize,
        raw: &mut [u8],
    ) -> Result<(), ReadError> {
        let chunk = &self.manifest.chunks[stream.chunks[position] as usize];
        Self::fill(fetcher, chunk, raw).map_err(|fault| self.damage(stream, position, fault))?;
        self.given.add(raw.len());
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::format::codec::tests::noise;
    use crate::store::tests::support::{temporary_store, write_image};

    #[test]
    fn image_is_read_with_any_buffer_size() {
        let (_folder, store) = temporary_store();
        let lock = store.lock().unwrap();
        let bytes = noise(1, 40 * CHUNK_BYTES + 5);
        let image = write_image(&store, &lock, &[("a", &bytes)]).id;
        for buffer in [0, 1, CHUNK_BYTES as u64, u64::MAX] {
            let reader = store.read(image).unwrap().with_buffer(buffer);
            let read = reader.read_to_vec("a", u64::MAX).unwrap();
            assert!(read == bytes, "{buffer}");
            let room = reader.room.into_inner();
            assert_eq!(room, chunks_in(buffer));
        }
    }

    #[test]
    fn streams_share_the_room_and_give_it_back() {
        let room = AtomicUsize::new(100);
        let first = Share::of(&room);
        let second = Share::of(&room);
        let third = Share::of(&room);
        assert_eq!([first.chunks, second.chunks, third.chunks], [50, 25, 13]);
        drop((first, second, third));
        assert_eq!(room.into_inner(), 100);
        let none = AtomicUsize::new(0);
        assert_eq!(Share::of(&none).chunks, 0);
    }
}
