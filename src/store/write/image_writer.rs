//! Writer of an image: streams become a complete image, or nothing.
//!
//! ```text
//! begin ─▶ reserve ─▶ streams (job frozen) ─▶ start_workers (job computes) ─▶ commit
//! ```
//! Streams only fill buffers; workers process them after the freeze. `commit` makes the packs durable before the
//! manifest gets its name, so every visible image is whole. A writer that is dropped before that removes its packs.

use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;

use super::dedup_index::DedupIndex;
use super::manifest_builder::ManifestBuilder;
use super::pack_sink::PackSink;
use super::prechunked_stream::PrechunkedStream;
use super::stream_writer::{StreamOpener, StreamWriter};
use super::work_queue::WorkQueue;
use super::work_times::{WorkShares, WorkStep, WorkTimes};
use super::worker::{Shared, Worker};
use crate::clock;
use crate::store::byte_counter::ByteCounter;
use crate::store::error::WriteError;
use crate::store::format::FORMAT;
use crate::store::format::file_names::{self, FileKind};
use crate::store::format::image_id::ImageId;
use crate::store::format::manifest::{Content, Manifest};
use crate::store::format::manifest_file::{self, META_BYTES_MAX, ManifestError};
use crate::store::format::pack::Pack;
use crate::store::format::store_folder::Store;
use crate::store::fs::durable;
use crate::store::fs::lock::{Busy, StoreLock};

/// Maximum number of workers, more than the cores of any present machine for one job.
const WORKERS_MAX: usize = 256;

/// Options of a writer.
#[derive(Clone, Copy, Debug)]
pub struct WriteOptions {
    /// Limit on bytes that wait in memory for the workers, at least one chunk.
    pub buffer: u64,
    /// Number of threads that hash, compress and write, at least one.
    pub workers: usize,
    /// zstd level; 1 is recommended.
    pub level: i32,
}

/// Image being written. On drop the image is abandoned: open streams fail, workers stop, packs are deleted.
#[derive(Debug)]
pub struct ImageWriter {
    store: Store,
    image: ImageId,
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
    /// Durable packs, after the workers have ended.
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
    /// Begins the next image. A thread begins to read the manifests of the newest images for deduplication; see
    /// [`ImageWriter::await_index`].
    ///
    /// # Errors
    /// [`WriteError::Busy`] while another image is written under this lock.
    ///
    /// # Panics
    /// If the lock belongs to another store.
    pub fn begin(
        &self,
        lock: &StoreLock,
        options: WriteOptions,
    ) -> Result<ImageWriter, WriteError> {
        self.begin_after(lock, options, None)
    }

    /// Begins an image like [`Store::begin`], with a number above `newest`, which the caller remembers even if the
    /// store no longer has such an image.
    ///
    /// # Errors
    /// The same as [`Store::begin`].
    ///
    /// # Panics
    /// The same as [`Store::begin`].
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
        let index = DedupIndex::read_ahead(self)?;
        let shared = Arc::new(Shared {
            store: self.clone(),
            work_queue: Arc::new(WorkQueue::new(options.buffer)),
            builder: ManifestBuilder::new(index),
            cutters: Mutex::default(),
            sink: PackSink::new(self, image),
            times: WorkTimes::default(),
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
    /// Encodes a manifest. A manifest that readers would refuse must not be committed.
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
    /// Returns the image's number.
    #[must_use]
    pub fn id(&self) -> ImageId {
        self.image
    }

    /// Returns the counter of bytes received from the streams.
    #[must_use]
    pub fn taken(&self) -> ByteCounter {
        self.shared.work_queue.taken.clone()
    }

    /// Returns the counter of received bytes that are stored, either in the image's packs or by an earlier image.
    #[must_use]
    pub fn stored(&self) -> ByteCounter {
        self.shared.work_queue.stored.clone()
    }

    /// Sets the image's time; a copy has the time of its original.
    pub(crate) fn set_created(&mut self, created_unix_ms: u64) {
        self.created_unix_ms = created_unix_ms;
    }

    /// Maps and populates memory for `bytes` of streams, within the buffer's limit. Takes a quarter of a second per GiB
    /// on two cores, so it should be called before the freeze. If memory is short, less is reserved.
    pub fn reserve(&self, bytes: u64) {
        self.shared.work_queue.reserve(bytes);
    }

    /// Waits until the manifests of the newest images are read; otherwise the first chunk, or a frozen job, waits for it.
    pub fn await_index(&self) {
        self.shared.builder.await_index();
    }

    /// Opens a stream. Any number of streams may be open at once, each in its own thread.
    ///
    /// # Errors
    /// The name is used already or is not [a stream name](crate::store::is_stream_name), or the image has failed.
    pub fn stream(&self, name: &str) -> Result<StreamWriter, WriteError> {
        self.streams().open(name)
    }

    /// Returns an opener of streams for other threads.
    #[must_use]
    pub fn streams(&self) -> StreamOpener {
        StreamOpener::new(&self.shared)
    }

    /// Opens a stream of chunks that are already hashed and encoded.
    pub(crate) fn inserted(&self, name: &str) -> Result<PrechunkedStream, WriteError> {
        self.shared.work_queue.check()?;
        PrechunkedStream::open(&self.shared, name)
    }

    /// Adds a stream of an earlier image of this store, without reading it. Its chunks stay where they are, as those
    /// of a new stream with the same bytes would. Returns false and adds nothing if a chunk is in none of the newest
    /// good images, or there is no such stream.
    ///
    /// # Errors
    /// The same as [`stream`](Self::stream).
    pub fn take_over(&self, image: &Manifest, name: &str) -> Result<bool, WriteError> {
        let Some(stream) = image.streams.iter().find(|stream| stream.name == name) else {
            return Ok(false);
        };
        let chunks = || stream.chunks.iter().map(|it| &image.chunks[*it as usize]);
        if self.shared.builder.known(chunks()).contains(&false) {
            return Ok(false);
        }
        let mut target = self.inserted(name)?;
        for chunk in chunks() {
            match chunk.content {
                Content::Zero => target.zeros(chunk.raw_len)?,
                Content::Stored(stored) => target.again(chunk.raw_len, stored.hash)?,
            }
        }
        target.finish();
        Ok(true)
    }

    /// Allows `count` workers to run from now on: as many as there are idle cores while the job is frozen.
    pub fn spare_workers(&self, count: usize) {
        self.shared.work_queue.spare(count);
    }

    /// Sets a limit for the time before [`start_workers`](Self::start_workers) in which no data reaches the disk,
    /// because the job is frozen meanwhile. The image fails after that.
    pub fn limit_stalls(&self, limit: Duration) {
        self.shared.work_queue.limit_stalls(limit);
    }

    /// Starts all workers, once the job computes again. Before this, workers other than the spare ones run only while
    /// the buffer is full.
    pub fn start_workers(&self) {
        self.shared.times.begin();
        self.shared.work_queue.start();
    }

    /// Waits until every chunk is durable. Streams cannot be written afterwards. [`ImageWriter::commit`] is still
    /// required.
    ///
    /// # Errors
    /// A stream is not finished, or writing failed.
    pub fn settle(&mut self) -> Result<(), WriteError> {
        self.shared.work_queue.check()?;
        self.shared.builder.check_finished()?;
        self.shared.work_queue.close();
        let workers = u32::try_from(self.workers.len()).unwrap_or(1);
        self.join();
        self.shared.work_queue.check()?;
        let begun = clock::now();
        self.packs = self.shared.sink.seal()?;
        // All of them would wait.
        let waited = begun.elapsed() * workers;
        self.shared.times.add(WorkStep::Disk, waited);
        Ok(())
    }

    /// Returns the shares of the workers' time since [`start_workers`](Self::start_workers); `None` if there were none.
    #[must_use]
    pub fn work_shares(&self) -> Option<WorkShares> {
        self.shared.times.shares()
    }

    /// Makes the image durable and visible. Blocks until then.
    ///
    /// # Errors
    /// A stream is not finished, or writing failed. Then the image does not exist, and its data are removed.
    pub fn commit(mut self, meta: &[u8]) -> Result<Arc<Manifest>, WriteError> {
        if meta.len() > META_BYTES_MAX {
            return Err(WriteError::MetaTooLarge { len: meta.len() });
        }
        self.settle()?;
        let begun = clock::now();
        let packs = std::mem::take(&mut self.packs);
        let manifest = Arc::new(self.manifest(&packs, meta)?);
        let manifest_bytes = self.publish(&manifest)?;
        self.store.cache_manifest(&manifest);
        tracing::debug!(
            image = %manifest.id,
            raw_bytes = manifest.raw_bytes,
            stored_bytes = manifest.stored_bytes,
            chunks = manifest.chunks.len(),
            manifest_bytes,
            manifest_ms = u64::try_from(begun.elapsed().as_millis()).unwrap_or(u64::MAX),
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

    /// Waits for the workers. A worker that panicked has stopped the queue.
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

    /// Makes the manifest durable, and with it the image; returns its length.
    fn publish(&mut self, manifest: &Manifest) -> Result<usize, WriteError> {
        let store = &self.store;
        let file = store.encode(manifest)?;
        store.check_place()?;
        durable::sync_folder(&store.packs_folder())?;
        durable::write(&store.manifest_file(manifest.id), &file)?;
        self.outcome = Outcome::Published;
        Ok(file.len())
    }

    /// Removes the written files. The manifest comes first, because it may already have its name if only the sync of
    /// the folder failed; packs are removed only if no manifest names them.
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
                // Open streams still refer to the sink.
                self.shared.sink.abandon();
                if let Err(error) = self.remove_files() {
                    // A later sweep removes them.
                    tracing::warn!(%error, image = %self.image, "cannot remove the leftovers of an image");
                }
            }
        }
    }
}

/// Returns a number above those of all images and packs, and above `newest`, so that no number is used twice while data
/// of the newest image remain.
pub(crate) fn next_image(
    store: &Store,
    mut newest: Option<ImageId>,
) -> Result<ImageId, WriteError> {
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
    let pending = store.pending.all().into_iter();
    newest = newest.max(pending.map(|image| image.manifest().id).max());
    match newest {
        None => Ok(ImageId::FIRST),
        Some(newest) => newest.next().ok_or(WriteError::NumbersExhausted),
    }
}
