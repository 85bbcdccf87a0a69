//! Writing an image: streams come in, and at the end there is an image or nothing.
//!
//! ```text
//! begin ─▶ reserve ─▶ streams (job frozen) ─▶ start_workers (job computes) ─▶ commit
//! ```
//! Streams only fill buffers; workers do the rest after the freeze. `commit` makes the
//! packs durable before the manifest gets its name, so an image that can be seen is
//! whole. Dropped before that, the writer takes its packs away again.

use std::io::{self, Read};
use std::sync::Arc;
use std::sync::atomic::AtomicU32;
use std::thread::JoinHandle;

use super::assembly::Assembly;
use super::buffer::Buffer;
use super::chunk::{self, CHUNK_BYTES, CHUNK_LEN_MAX};
use super::durable;
use super::error::WriteError;
use super::flow::Flow;
use super::id::ImageId;
use super::index::Index;
use super::layout::{self, FORMAT, FileKind, Store};
use super::lock::{Busy, StoreLock};
use super::manifest::Manifest;
use super::pack::Pack;
use super::wire::{self, META_BYTES_MAX};
use super::worker::{Shared, Worker};

/// More workers than any machine of today has cores for one job.
const WORKERS_MAX: usize = 256;

/// Read at a time: large enough to empty a pipe's usual share at once, small enough that
/// the pipe's writer goes on while the rest is copied.
const READ_BYTES_MAX: usize = 256 * 1024;

/// How an image is written.
#[derive(Clone, Copy, Debug)]
pub struct WriteOptions {
    /// Bytes that may wait in memory for the workers, at least one chunk.
    pub buffer: u64,
    /// Threads that hash, compress and write, at least one; each has a pack of its own.
    pub workers: usize,
    /// Level of zstd; 1 is a good choice.
    pub level: i32,
}

/// An image being written. Dropping it gives the image up: open streams fail, workers
/// stop, packs are deleted.
#[derive(Debug)]
pub struct ImageWriter {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<Vec<Pack>>>,
    /// Durable packs, once the workers have ended.
    packs: Vec<Pack>,
    created_unix_ms: u64,
    outcome: Outcome,
    _busy: Busy,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Outcome {
    Pending,
    Published,
}

/// A stream being written, by one thread. It must be finished; dropping it makes the
/// image fail.
#[derive(Debug)]
pub struct StreamWriter {
    shared: Arc<Shared>,
    name: String,
    stream: u32,
    position: u32,
    raw_len: u64,
    /// The chunk that is being filled.
    current: Option<Filling>,
    state: StreamState,
}

#[derive(Debug)]
struct Filling {
    buffer: Buffer,
    len: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum StreamState {
    Open,
    Finished,
}

impl Store {
    /// Begins the next image. Reads the manifests of all images to know their chunks,
    /// so it belongs before the freeze.
    ///
    /// # Errors
    /// [`WriteError::Busy`] while another image is written under this lock.
    ///
    /// # Panics
    /// If the lock is that of another store.
    pub fn begin(
        &self,
        lock: &StoreLock,
        options: WriteOptions,
    ) -> Result<ImageWriter, WriteError> {
        let busy = lock.claim(self.path()).ok_or(WriteError::Busy)?;
        let image = next_image(self)?;
        let index = Index::load(self)?;
        let shared = Arc::new(Shared {
            store: self.clone(),
            image,
            flow: Flow::new(options.buffer),
            assembly: Assembly::new(index),
            packs_begun: AtomicU32::new(0),
        });
        let mut writer = ImageWriter {
            shared,
            workers: Vec::new(),
            packs: Vec::new(),
            created_unix_ms: crate::clock::unix_ms(),
            outcome: Outcome::Pending,
            _busy: busy,
        };
        for number in 0..options.workers.clamp(1, WORKERS_MAX) {
            writer.spawn(number, options.level)?;
        }
        Ok(writer)
    }
}

impl ImageWriter {
    /// The image's number.
    #[must_use]
    pub fn id(&self) -> ImageId {
        self.shared.image
    }

    /// Gets memory for `bytes` of streams, within the buffer, ready to be written to.
    /// Takes about 0.1 s a GiB and thread: call it before the freeze. Where there is not
    /// that much memory, less is taken.
    pub fn reserve(&self, bytes: u64) {
        self.shared.flow.reserve(bytes);
    }

    /// Opens a stream. Any number can be open at once, each in a thread of its own.
    ///
    /// # Errors
    /// The name is taken or not [a stream name](super::is_stream_name), or the image
    /// failed already.
    pub fn stream(&self, name: &str) -> Result<StreamWriter, WriteError> {
        self.shared.flow.check()?;
        Ok(StreamWriter {
            stream: self.shared.assembly.open(name)?,
            shared: Arc::clone(&self.shared),
            name: name.to_owned(),
            position: 0,
            raw_len: 0,
            current: None,
            state: StreamState::Open,
        })
    }

    /// The job computes again: lets the workers run. Before this they run only while the
    /// buffer is full.
    pub fn start_workers(&self) {
        self.shared.flow.start();
    }

    /// Bytes that all streams have so far, but for the chunk each is filling.
    #[must_use]
    pub fn raw_bytes(&self) -> u64 {
        self.shared.assembly.raw_bytes()
    }

    /// Waits until every chunk is durable. No stream can be written afterwards. Only
    /// [`ImageWriter::commit`] makes an image of them.
    ///
    /// # Errors
    /// A stream is not finished, or writing failed.
    pub fn settle(&mut self) -> Result<(), WriteError> {
        self.shared.flow.check()?;
        self.shared.assembly.check_finished()?;
        self.shared.flow.close();
        let packs = self.join();
        self.packs.extend(packs);
        self.shared.flow.check()
    }

    /// Makes the image durable and gives it its name. Blocks until then.
    ///
    /// # Errors
    /// A stream is not finished, or writing failed: then there is no such image, and
    /// what was written of it is removed.
    pub fn commit(mut self, meta: &[u8]) -> Result<Manifest, WriteError> {
        if meta.len() > META_BYTES_MAX {
            return Err(WriteError::MetaTooLarge { len: meta.len() });
        }
        self.settle()?;
        let packs = std::mem::take(&mut self.packs);
        let manifest = self.manifest(&packs, meta)?;
        self.publish(&manifest)?;
        tracing::debug!(
            image = %manifest.id,
            raw_bytes = manifest.raw_bytes,
            stored_bytes = manifest.stored_bytes,
            "image written"
        );
        Ok(manifest)
    }

    fn spawn(&mut self, number: usize, level: i32) -> Result<(), WriteError> {
        let worker = Worker::new(Arc::clone(&self.shared), level)?;
        let thread = std::thread::Builder::new()
            .name(format!("store-{number}"))
            .spawn(move || worker.run())
            .map_err(WriteError::Spawn)?;
        self.workers.push(thread);
        Ok(())
    }

    /// Waits for the workers. One that panicked stopped the flow and returns nothing.
    fn join(&mut self) -> Vec<Pack> {
        let joined = self.workers.drain(..).map(JoinHandle::join);
        let mut packs: Vec<Pack> = joined.flat_map(Result::unwrap_or_default).collect();
        packs.sort_by_key(|pack| pack.name);
        packs
    }

    fn manifest(&self, packs: &[Pack], meta: &[u8]) -> Result<Manifest, WriteError> {
        let assembled = self.shared.assembly.assemble(packs)?;
        Ok(Manifest {
            format: FORMAT,
            id: self.shared.image,
            created_unix_ms: self.created_unix_ms,
            streams: assembled.streams,
            chunks: assembled.chunks,
            packs: assembled.packs,
            raw_bytes: assembled.raw_bytes,
            stored_bytes: packs.iter().map(|pack| pack.len).sum(),
            meta: meta.to_vec(),
        })
    }

    fn publish(&mut self, manifest: &Manifest) -> Result<(), WriteError> {
        let store = &self.shared.store;
        let file = wire::encode(manifest).map_err(|source| WriteError::Manifest {
            image: manifest.id,
            source,
        })?;
        durable::sync_folder(&store.packs_folder())?;
        durable::write(&store.manifest_file(manifest.id), &file)?;
        self.outcome = Outcome::Published;
        Ok(())
    }

    /// Removes what was written: first the manifest, which may have its name already if
    /// only the sync of its folder failed, and packs only if no manifest names them.
    fn remove_files(&self) -> Result<(), WriteError> {
        let store = &self.shared.store;
        durable::remove(&store.manifest_file(self.shared.image))?;
        for (path, kind) in layout::list(&store.packs_folder())? {
            if matches!(kind, FileKind::Pack(pack) if pack.image == self.shared.image) {
                durable::remove(&path)?;
            }
        }
        Ok(())
    }
}

impl Drop for ImageWriter {
    fn drop(&mut self) {
        match self.outcome {
            Outcome::Published => {}
            Outcome::Pending => {
                self.shared.flow.stop(WriteError::Aborted);
                self.join();
                if let Err(error) = self.remove_files() {
                    // A sweep finds them.
                    tracing::warn!(%error, image = %self.shared.image, "leftovers of an image stay");
                }
            }
        }
    }
}

impl StreamWriter {
    /// Reads `source` to its end into the stream; returns how many bytes that were.
    /// Blocks while the buffer is full.
    ///
    /// # Errors
    /// The source or the image failed. The stream cannot be finished then.
    pub fn copy_from(&mut self, source: &mut impl Read) -> Result<u64, WriteError> {
        let before = self.raw_len;
        loop {
            let filling = self.filling()?;
            let end = CHUNK_BYTES.min(filling.len + READ_BYTES_MAX);
            match source.read(&mut filling.buffer[filling.len..end]) {
                Ok(0) => return Ok(self.raw_len - before),
                Ok(len) => self.filled(len)?,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(source) => {
                    let stream = self.name.clone();
                    return Err(WriteError::Source { stream, source });
                }
            }
        }
    }

    /// Appends bytes to the stream. Blocks while the buffer is full.
    ///
    /// # Errors
    /// The image failed.
    pub fn write_all(&mut self, mut bytes: &[u8]) -> Result<(), WriteError> {
        while !bytes.is_empty() {
            let filling = self.filling()?;
            let len = bytes.len().min(CHUNK_BYTES - filling.len);
            let (now, rest) = bytes.split_at(len);
            filling.buffer[filling.len..filling.len + len].copy_from_slice(now);
            self.filled(len)?;
            bytes = rest;
        }
        Ok(())
    }

    /// Ends the stream; returns its length.
    ///
    /// # Errors
    /// The image failed.
    pub fn finish(mut self) -> Result<u64, WriteError> {
        self.shared.flow.check()?;
        if let Some(Filling { buffer, len }) = self.current.take() {
            if len == 0 {
                self.shared.flow.release(buffer);
            } else {
                let position = self.next_position(len)?;
                self.shared
                    .flow
                    .push_last(self.stream, position, buffer, len);
            }
        }
        self.shared.assembly.finish(self.stream);
        self.state = StreamState::Finished;
        Ok(self.raw_len)
    }

    fn filling(&mut self) -> Result<&mut Filling, WriteError> {
        let filling = match self.current.take() {
            Some(filling) => filling,
            None => Filling {
                buffer: self.shared.flow.acquire()?,
                len: 0,
            },
        };
        Ok(self.current.insert(filling))
    }

    /// Counts `len` bytes that were put into the chunk, and sends it off when it is full.
    fn filled(&mut self, len: usize) -> Result<(), WriteError> {
        self.raw_len += len as u64;
        if let Some(filling) = &mut self.current {
            filling.len += len;
        }
        let is_full = |filling: &mut Filling| filling.len == CHUNK_BYTES;
        let Some(full) = self.current.take_if(is_full) else {
            return Ok(());
        };
        let position = self.next_position(CHUNK_BYTES)?;
        if !chunk::is_zero(&full.buffer) {
            self.shared
                .flow
                .push(self.stream, position, full.buffer, CHUNK_BYTES);
            return Ok(());
        }
        // Costs no memory: the buffer is filled again.
        self.current = Some(Filling { len: 0, ..full });
        let assembly = &self.shared.assembly;
        assembly.set_zero(self.stream, position, CHUNK_LEN_MAX)
    }

    fn next_position(&mut self, raw_len: usize) -> Result<u32, WriteError> {
        let position = self.position;
        self.position = position.checked_add(1).ok_or(WriteError::TooManyChunks)?;
        self.shared.assembly.extend(self.stream, raw_len);
        Ok(position)
    }
}

impl Drop for StreamWriter {
    fn drop(&mut self) {
        if let Some(filling) = self.current.take() {
            self.shared.flow.release(filling.buffer);
        }
        match self.state {
            StreamState::Finished => {}
            StreamState::Open => self.shared.flow.stop(WriteError::StreamUnfinished {
                stream: std::mem::take(&mut self.name),
            }),
        }
    }
}

/// One more than any image or pack has, so that no number is given twice while something
/// of the newest image is left.
fn next_image(store: &Store) -> Result<ImageId, WriteError> {
    let mut newest = None;
    for folder in [store.images_folder(), store.packs_folder()] {
        let images = layout::list(&folder)?
            .into_iter()
            .filter_map(|(_, kind)| match kind {
                FileKind::Manifest(image) | FileKind::Damaged(image) => Some(image),
                FileKind::Pack(pack) => Some(pack.image),
                FileKind::Temporary | FileKind::Foreign => None,
            });
        newest = newest.max(images.max());
    }
    match newest {
        None => Ok(ImageId::FIRST),
        Some(newest) => newest.next().ok_or(WriteError::NumbersExhausted),
    }
}
