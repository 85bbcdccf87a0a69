//! Writing an image: streams come in, and at the end there is an image or nothing.
//!
//! ```text
//! begin ─▶ reserve ─▶ streams (job frozen) ─▶ start_workers (job computes) ─▶ commit
//! ```
//! Streams only fill buffers; workers do the rest after the freeze. `commit` makes the
//! packs durable before the manifest gets its name, so an image that can be seen is
//! whole. Dropped before that, the writer takes its packs away again.

use std::sync::atomic::AtomicU32;
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

use super::assembly::Assembly;
use super::durable;
use super::error::WriteError;
use super::files::{self, FileKind};
use super::flow::Flow;
use super::id::ImageId;
use super::index::Index;
use super::layout::{FORMAT, Store};
use super::lock::{Busy, StoreLock};
use super::manifest::Manifest;
use super::pack::Pack;
use super::stream::StreamWriter;
use super::wire::{self, META_BYTES_MAX, ManifestError};
use super::worker::{Shared, Worker};

/// More workers than any machine of today has cores for one job.
const WORKERS_MAX: usize = 256;

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
        let busy = lock.claim(self.path()).ok_or(WriteError::Busy)?;
        self.upgrade()?;
        let image = next_image(self)?;
        let index = Index::load(self)?;
        let shared = Arc::new(Shared {
            store: self.clone(),
            image,
            flow: Arc::new(Flow::new(options.buffer)),
            assembly: Assembly::new(index),
            cutters: Mutex::default(),
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
    /// Takes a quarter of a second a GiB on two cores: call it before the freeze. Where there is not
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
        StreamWriter::open(&self.shared, name)
    }

    /// The job computes again: lets the workers run. Before this they run only while the
    /// buffer is full.
    pub fn start_workers(&self) {
        self.shared.flow.start();
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
        // What no reader would accept must not get a name.
        let valid = manifest.validate().map_err(ManifestError::Invalid);
        let encoded = valid.and_then(|()| wire::encode(manifest));
        let file = encoded.map_err(|source| WriteError::Manifest {
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
        durable::sync_folder(&store.images_folder())?;
        for (path, kind) in files::list(&store.packs_folder())? {
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

/// One more than any image or pack has, so that no number is given twice while something
/// of the newest image is left.
fn next_image(store: &Store) -> Result<ImageId, WriteError> {
    let mut newest = None;
    for folder in [store.images_folder(), store.packs_folder()] {
        let images = files::list(&folder)?
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
