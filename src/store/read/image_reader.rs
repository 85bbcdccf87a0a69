//! Reading an image: streams go out, every chunk checked before any of its bytes.

use std::collections::HashMap;
use std::fmt;
use std::fs::File;
use std::io::{self, Write};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::chunk_fetcher::{ChunkFetcher, Fault, Scratch};
use super::read_ahead::{self, Extent};
use super::vmsplice::Splicer;
use crate::store::byte_counter::ByteCounter;
use crate::store::error::ReadError;
use crate::store::format::chunk::{CHUNK_BYTES, ZEROS};
use crate::store::format::image_id::ImageId;
use crate::store::format::manifest::{Chunk, Content, Manifest, Stored, Stream};
use crate::store::format::pack::PackFiles;
use crate::store::format::store_folder::Store;
use crate::sync::locked;

/// Threads that read, decompress and hash one stream: one core of today does about
/// 1 GB/s, and what takes the stream takes less than 10.
const WORKERS_MAX: usize = 8;

/// Streams with fewer chunks are read by the caller's thread alone: most of CRIU's files,
/// which are done before a thread is started.
const PARALLEL_CHUNKS_MIN: usize = 8;

/// Chunks that a stream may be ahead of its consumer: eight for each worker.
const WINDOW_MAX: usize = 8 * WORKERS_MAX;

/// Default limit on the data that all streams of an image hold ahead together.
const BUFFER_DEFAULT: u64 = 64 << 20;

/// An image being read. Streams can be read from several threads at once; together they
/// hold no more than the buffer, and one chunk each. It holds its packs open: an image of
/// up to 256 of them can be removed meanwhile.
#[derive(Debug)]
pub struct ImageReader {
    /// Chunks that may still be read ahead.
    room: AtomicUsize,
    buffers: Buffers,
    scratches: Scratches,
    manifest: Manifest,
    streams: HashMap<String, usize>,
    packs: PackFiles,
    given: ByteCounter,
}

/// Memory of chunks that have gone out, for others. Fresh memory costs the kernel as much as
/// hashing what goes into it.
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

/// A fetcher that leaves to others what it worked with.
pub(crate) struct Fetching<'a> {
    home: &'a Scratches,
    fetcher: Option<ChunkFetcher<'a>>,
}

impl Fetching<'_> {
    fn fetch(&mut self, stored: &Stored, raw: &mut [u8]) -> Result<(), Fault> {
        let Some(fetcher) = &mut self.fetcher else {
            unreachable!("only the drop takes it")
        };
        fetcher.fetch(stored, raw)
    }
}

impl Drop for Fetching<'_> {
    fn drop(&mut self) {
        if let Some(fetcher) = self.fetcher.take() {
            locked(&self.home.0).push(fetcher.into_scratch());
        }
    }
}

/// A chunk on its way out. Dropped, it gives its memory back.
struct Prepared<'a> {
    home: &'a Buffers,
    content: Checked,
}

enum Checked {
    Bytes(Vec<u8>),
    Zeros(usize),
}

impl Prepared<'_> {
    fn bytes(&self) -> &[u8] {
        match &self.content {
            Checked::Bytes(bytes) => bytes,
            Checked::Zeros(len) => &ZEROS[..*len],
        }
    }
}

impl Drop for Prepared<'_> {
    fn drop(&mut self) {
        if let Checked::Bytes(bytes) = &mut self.content {
            locked(&self.home.0).push(std::mem::take(bytes));
        }
    }
}

impl Store {
    /// Opens an image for reading. Checks the manifest and that each pack is there and
    /// has its length; chunks are checked as they are read.
    ///
    /// # Errors
    /// The image is missing or damaged; see [`ReadError::is_damage`].
    pub fn read(&self, id: ImageId) -> Result<ImageReader, ReadError> {
        self.check_place()?;
        let manifest = self.manifest(id)?;
        let packs = PackFiles::new(self, manifest.packs.clone())
            .map_err(|source| ReadError::Pack { image: id, source })?;
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

/// Chunks of the greatest length that a buffer has room for.
fn chunks_in(buffer: u64) -> usize {
    usize::try_from(buffer).unwrap_or(usize::MAX) / CHUNK_BYTES
}

/// A part of the room that a stream has while it is read.
struct Share<'a> {
    room: &'a AtomicUsize,
    chunks: usize,
}

impl<'a> Share<'a> {
    fn none(room: &'a AtomicUsize) -> Self {
        Self { room, chunks: 0 }
    }

    /// Half of what is left, so that streams which begin later find some.
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
    /// Sets how many bytes of chunks may wait in memory for their consumers.
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

    /// Returns the counter of the bytes handed out, of all streams together.
    #[must_use]
    pub fn given(&self) -> ByteCounter {
        self.given.clone()
    }

    /// Returns true if the image has this stream.
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
        self.each_chunk(stream, |prepared| sink.write_all(prepared.bytes()))?;
        sink.flush().map_err(ReadError::Sink)?;
        Ok(stream.raw_len)
    }

    /// Copies as [`copy_to`](Self::copy_to) does, into a pipe, whose reader gets this process's own pages. The reader
    /// must read them before a read of this image fails, or must not trust them.
    ///
    /// # Errors
    /// As there; [`ReadError::Sink`] also when `pipe` is none.
    pub fn splice_to(&self, name: &str, pipe: &File) -> Result<u64, ReadError> {
        let stream = self.stream(name)?;
        let mut splicer = Splicer::new(pipe, stream.raw_len).map_err(ReadError::Sink)?;
        self.each_chunk(stream, |prepared| splicer.put(prepared, Prepared::bytes))?;
        Ok(stream.raw_len)
    }

    /// Hands out the chunks of a stream in order, all of them checked.
    fn each_chunk<'a>(
        &'a self,
        stream: &'a Stream,
        mut take: impl FnMut(Prepared<'a>) -> io::Result<()>,
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
                    self.given.add(prepared.bytes().len());
                    take(prepared).map_err(ReadError::Sink)
                }
            },
        )
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

    /// Returns the meaning of a fault at a stream's chunk for the image.
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
    ) -> Result<Prepared<'_>, Fault> {
        let chunk = self.manifest.chunks[stream.chunks[position] as usize];
        let raw_len = chunk.raw_len as usize;
        let home = &self.buffers;
        if let Content::Zero = chunk.content {
            let content = Checked::Zeros(raw_len);
            return Ok(Prepared { home, content });
        }
        let mut bytes = locked(&home.0).pop().unwrap_or_default();
        bytes.resize(raw_len, 0);
        Self::fill(fetcher, &chunk, &mut bytes)?;
        let content = Checked::Bytes(bytes);
        Ok(Prepared { home, content })
    }

    /// Fills all of `raw`, whose length is the chunk's. On an error `raw` holds anything.
    fn fill(fetcher: &mut Fetching<'_>, chunk: &Chunk, raw: &mut [u8]) -> Result<(), Fault> {
        match &chunk.content {
            Content::Zero => raw.fill(0),
            Content::Stored(stored) => fetcher.fetch(stored, raw)?,
        }
        Ok(())
    }

    /// Fetches as [`fill`](Self::fill) does, for the chunk at a position of the stream, which is handed out as it is.
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
    fn an_image_is_read_whatever_the_buffer() {
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
