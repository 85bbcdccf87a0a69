//! Writing an image: streams come in, and at the end there is an image or nothing.
//!
//! ```text
//! begin ─▶ reserve ─▶ streams (job frozen) ─▶ start_workers (job computes) ─▶ commit
//! ```
//! Streams only fill buffers; workers do the rest after the freeze. `commit` makes the
//! packs durable before the manifest gets its name, so an image that can be seen is
//! whole. Dropped before that, the writer takes its packs away again.

use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use super::dedup_index::DedupIndex;
use super::manifest_builder::ManifestBuilder;
use super::pack_sink::PackSink;
use super::prechunked_stream::PrechunkedStream;
use super::stream_writer::{StreamOpener, StreamWriter};
use super::work_queue::WorkQueue;
use super::worker::{Shared, Worker};
use crate::store::byte_counter::ByteCounter;
use crate::store::error::WriteError;
use crate::store::format::FORMAT;
use crate::store::format::file_names::{self, FileKind};
use crate::store::format::image_id::ImageId;
use crate::store::format::manifest::Manifest;
use crate::store::format::manifest_file::{self, META_BYTES_MAX, ManifestError};
use crate::store::format::pack::Pack;
use crate::store::format::store_folder::Store;
use crate::store::fs::durable;
use crate::store::fs::lock::{Busy, StoreLock};

/// More workers than any machine of today has cores for one job.
const WORKERS_MAX: usize = 256;

/// Options of a writer.
#[derive(Clone, Copy, Debug)]
pub struct WriteOptions {
    /// Bytes that may wait in memory for the workers, at least one chunk.
    pub buffer: u64,
    /// Threads that hash, compress and write, at least one.
    pub workers: usize,
    /// Level of zstd; 1 is a good choice.
    pub level: i32,
}

/// An image being written. Dropping it gives the image up: open streams fail, workers
/// stop, packs are deleted.
#[derive(Debug)]
pub struct ImageWriter {
    store: Store,
    image: ImageId,
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
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

impl Store {
    /// Begins the next image. Reads the manifests of the newest images to know their
    /// chunks, so it belongs before the freeze.
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
        self.begin_after(lock, options, None)
    }

    /// Begins an image as [`Store::begin`] does, with a number beyond `newest`: a number that the caller remembers,
    /// even if the store has nothing left of it.
    ///
    /// # Errors
    /// As [`Store::begin`].
    ///
    /// # Panics
    /// As [`Store::begin`].
    pub fn begin_after(
        &self,
        lock: &StoreLock,
        options: WriteOptions,
        newest: Option<ImageId>,
    ) -> Result<ImageWriter, WriteError> {
        let busy = lock.claim(self.path()).ok_or(WriteError::Busy)?;
        self.check_place()?;
        self.upgrade()?;
        let image = next_image(self, newest)?;
        let index = DedupIndex::load(self)?;
        let shared = Arc::new(Shared {
            store: self.clone(),
            work_queue: Arc::new(WorkQueue::new(options.buffer)),
            builder: ManifestBuilder::new(index),
            cutters: Mutex::default(),
            sink: PackSink::new(self, image),
        });
        let mut writer = ImageWriter {
            store: self.clone(),
            image,
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

impl Store {
    /// The file of a manifest. What no reader would accept must not get a name.
    pub(crate) fn encode(&self, manifest: &Manifest) -> Result<Vec<u8>, WriteError> {
        let valid = manifest.validate().map_err(ManifestError::Invalid);
        let encoded = valid.and_then(|()| manifest_file::encode(manifest, self.secrets()));
        encoded.map_err(|source| WriteError::Manifest {
            image: manifest.id,
            source,
        })
    }
}

impl ImageWriter {
    /// The image's number.
    #[must_use]
    pub fn id(&self) -> ImageId {
        self.image
    }

    /// Returns the counter of the bytes that the streams have brought.
    #[must_use]
    pub fn taken(&self) -> ByteCounter {
        self.shared.work_queue.taken.clone()
    }

    /// Returns the counter of those bytes that are in the image's packs, or were in the store before.
    #[must_use]
    pub fn stored(&self) -> ByteCounter {
        self.shared.work_queue.stored.clone()
    }

    /// Makes the image one of another time than now: a copy is as old as what it is a copy of.
    pub(crate) fn set_created(&mut self, created_unix_ms: u64) {
        self.created_unix_ms = created_unix_ms;
    }

    /// Gets memory for `bytes` of streams, within the buffer, ready to be written to.
    /// Takes a quarter of a second a GiB on two cores: call it before the freeze. Where there is not
    /// that much memory, less is taken.
    pub fn reserve(&self, bytes: u64) {
        self.shared.work_queue.reserve(bytes);
    }

    /// Opens a stream. Any number can be open at once, each in a thread of its own.
    ///
    /// # Errors
    /// The name is taken or not [a stream name](crate::store::is_stream_name), or the image
    /// failed already.
    pub fn stream(&self, name: &str) -> Result<StreamWriter, WriteError> {
        self.streams().open(name)
    }

    /// Returns an opener of streams for other threads.
    #[must_use]
    pub fn streams(&self) -> StreamOpener {
        StreamOpener::new(&self.shared)
    }

    /// Opens a stream of chunks that are hashed and encoded already.
    pub(crate) fn inserted(&self, name: &str) -> Result<PrechunkedStream, WriteError> {
        self.shared.work_queue.check()?;
        PrechunkedStream::open(&self.shared, name)
    }

    /// Lets so many workers run from now on: as many as there are cores that nobody needs
    /// while the job stands still.
    pub fn spare_workers(&self, count: usize) {
        self.shared.work_queue.spare(count);
    }

    /// Makes the image fail if, before [`start_workers`](Self::start_workers), the store takes nothing for so long: a
    /// job is frozen meanwhile.
    pub fn limit_stalls(&self, limit: Duration) {
        self.shared.work_queue.limit_stalls(limit);
    }

    /// The job computes again: lets the workers run. Before this the others run only while
    /// the buffer is full.
    pub fn start_workers(&self) {
        self.shared.work_queue.start();
    }

    /// Waits until every chunk is durable. No stream can be written afterwards. Only
    /// [`ImageWriter::commit`] makes an image of them.
    ///
    /// # Errors
    /// A stream is not finished, or writing failed.
    pub fn settle(&mut self) -> Result<(), WriteError> {
        self.shared.work_queue.check()?;
        self.shared.builder.check_finished()?;
        self.shared.work_queue.close();
        self.join();
        self.shared.work_queue.check()?;
        self.packs = self.shared.sink.seal()?;
        Ok(())
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

    /// Waits for the workers. One that panicked stopped the flow.
    fn join(&mut self) {
        for worker in self.workers.drain(..) {
            let _ = worker.join();
        }
    }

    fn manifest(&self, packs: &[Pack], meta: &[u8]) -> Result<Manifest, WriteError> {
        let assembled = self.shared.builder.assemble(packs)?;
        Ok(Manifest {
            format: FORMAT,
            id: self.image,
            created_unix_ms: self.created_unix_ms,
            streams: assembled.streams,
            chunks: assembled.chunks,
            packs: assembled.packs,
            raw_bytes: assembled.raw_bytes,
            encrypted: self.store.secrets().is_some(),
            stored_bytes: packs.iter().map(|pack| pack.len).sum(),
            meta: meta.to_vec(),
        })
    }

    fn publish(&mut self, manifest: &Manifest) -> Result<(), WriteError> {
        let store = &self.store;
        let file = store.encode(manifest)?;
        store.check_place()?;
        durable::sync_folder(&store.packs_folder())?;
        durable::write(&store.manifest_file(manifest.id), &file)?;
        self.outcome = Outcome::Published;
        Ok(())
    }

    /// Removes what was written: first the manifest, which may have its name already if
    /// only the sync of its folder failed, and packs only if no manifest names them.
    fn remove_files(&self) -> Result<(), WriteError> {
        let store = &self.store;
        durable::remove(&store.manifest_file(self.image))?;
        durable::sync_folder(&store.images_folder())?;
        for (path, kind) in file_names::list(&store.packs_folder())? {
            if matches!(kind, FileKind::Pack(pack) if pack.image == self.image) {
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
                self.shared.work_queue.stop(WriteError::Aborted);
                self.join();
                // Streams that are still open keep the sink.
                self.shared.sink.abandon();
                if let Err(error) = self.remove_files() {
                    // A sweep finds them.
                    tracing::warn!(%error, image = %self.image, "leftovers of an image stay");
                }
            }
        }
    }
}

/// Returns a number above those of all images and packs, and above `newest`, so that no number is used twice while data
/// of the newest image remain.
fn next_image(store: &Store, mut newest: Option<ImageId>) -> Result<ImageId, WriteError> {
    for folder in [store.images_folder(), store.packs_folder()] {
        let images = file_names::list(&folder)?
            .into_iter()
            .filter_map(|(_, kind)| match kind {
                FileKind::Manifest(image) | FileKind::Damaged(image) | FileKind::Pinned(image) => {
                    Some(image)
                }
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
