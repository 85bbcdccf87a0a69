//! Download of an image: its parts are fetched by their readers or by several threads, every chunk is compared with the
//! check that the upload noted, and they are written to the local store. The reader of a chunk checks its content.

use std::fs::File;
use std::io;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Once};
use std::thread::{self, Builder};

use bytes::Bytes;
use xxhash_rust::xxh3::xxh3_64;

use super::bucket::Bucket;
use super::image_object::{ImageObject, RemoteImage};
use super::remote_error::RemoteError;
use crate::printable::{chain, size};
use crate::store::format::manifest::{Content, Manifest, Stored};
use crate::store::format::pack::{Pack, PackName};
use crate::store::fs::{durable, ops};
use crate::store::read::pending_image::{Origin, Part, PendingImage};
use crate::store::write::image_writer::next_image;
use crate::store::{ImageId, Store, StoreLock, WriteError};

/// Mode of a pack's file.
const MODE: u32 = 0o600;
/// Requests at a time, each of at most 4 MiB.
pub(super) const REQUESTS: usize = 8;

/// Returns the number for an image in the local store: at least that in the remote store, and higher than `last`.
pub(crate) fn next_number(
    image: &RemoteImage,
    last: Option<ImageId>,
    store: &Store,
) -> Result<ImageId, RemoteError> {
    Ok(next_image(store, last)?.max(image.id))
}

/// Makes an image visible in this process under a number. It can be read at once: a reader fetches what it needs.
/// [`Store::start_download`] fetches all.
pub(crate) fn offer(
    bucket: &Bucket,
    image: &RemoteImage,
    id: ImageId,
    store: &Store,
    lock: &StoreLock,
) -> Result<(), RemoteError> {
    let mut found = Found::read(bucket, image, store, lock)?;
    found.number(id);
    store.pending.add(&found.pending());
    Ok(())
}

/// Copies an image to a store under the next number. `progress` receives the bytes done and in total, from any thread.
/// Returns the manifest of the copy.
///
/// # Errors
/// Then neither a copy nor a part of one exists.
pub(crate) fn copy(
    bucket: &Bucket,
    image: &RemoteImage,
    store: &Store,
    lock: &StoreLock,
    progress: &(dyn Fn(u64, u64) + Sync),
) -> Result<Manifest, RemoteError> {
    let mut found = Found::read(bucket, image, store, lock)?;
    found.number(next_image(store, None)?);
    let total = found.manifest.stored_bytes;
    let pending = found.pending();
    let done = AtomicU64::new(0);
    let arrived = |len: u64| progress(done.fetch_add(len, Ordering::Relaxed) + len, total);
    thread::scope(|scope| {
        for _ in 1..REQUESTS {
            // With one thread less it is only slower.
            let _ = Builder::new().spawn_scoped(scope, || pending.fetch(&arrived));
        }
        pending.fetch(&arrived);
    });
    let copied = match pending.wait_until_whole() {
        Ok(()) => complete(&pending, store).map_err(RemoteError::from),
        Err(reason) => Err(RemoteError::Download {
            url: bucket.url().to_owned(),
            image: image.id,
            reason,
        }),
    };
    let manifest = pending.manifest().clone();
    if copied.is_err() {
        for pack in &manifest.packs {
            // What stays is removed by the next sweep.
            let _ = durable::remove(&store.pack_file(pack.name));
        }
    }
    copied.map(|()| manifest)
}

/// Image of a remote store, about to come to a local one.
struct Found {
    origin: Remote,
    manifest: Manifest,
}

impl Found {
    fn read(
        bucket: &Bucket,
        image: &RemoteImage,
        store: &Store,
        lock: &StoreLock,
    ) -> Result<Self, RemoteError> {
        lock.check(store.path());
        let ImageObject { packs, manifest } = ImageObject::read(bucket, image, store.secrets())?;
        Ok(Self {
            origin: Remote {
                bucket: bucket.clone(),
                packs,
                store: store.clone(),
            },
            manifest,
        })
    }

    /// Gives the image a number in the local store.
    fn number(&mut self, id: ImageId) {
        self.manifest.id = id;
        for (pack, number) in self.manifest.packs.iter_mut().zip(0..) {
            pack.name = PackName { image: id, number };
        }
        let chunks = self.manifest.chunks.iter();
        let stored = chunks.map(|chunk| match chunk.content {
            Content::Zero => 0,
            Content::Stored(stored) => u64::from(stored.len),
        });
        self.manifest.stored_bytes = stored.sum();
    }

    fn pending(self) -> Arc<PendingImage> {
        Arc::new(PendingImage::new(self.manifest, Box::new(self.origin)))
    }
}

/// Packs in a remote store.
#[derive(Debug)]
struct Remote {
    bucket: Bucket,
    /// Names of the packs' objects.
    packs: Vec<String>,
    /// The local store.
    store: Store,
}

impl Origin for Remote {
    fn create_files(&self, manifest: &Manifest) -> io::Result<Vec<File>> {
        let create = |pack: &Pack| {
            let path = self.store.pack_file(pack.name);
            drop(ops::create_new(&path, MODE)?);
            let file = ops::open(&path)?;
            ops::write_at(&file, &pack.name.header(), 0)?;
            ops::set_len(&file, pack.len)?;
            Ok(file)
        };
        manifest.packs.iter().map(create).collect()
    }

    fn fetch(&self, part: &Part) -> Result<Bytes, String> {
        let object = &self.packs[part.pack as usize];
        let read = self.bucket.get_range(object, part.begin..part.end);
        let bytes = read.map_err(|error| chain(&error))?;
        let is_as_uploaded = |stored: &Stored| {
            let chunk = part.chunk(stored, &bytes);
            chunk.is_some_and(|chunk| stored.check == Some(xxh3_64(chunk)))
        };
        if part.chunks.iter().all(|(_, stored)| is_as_uploaded(stored)) {
            Ok(bytes)
        } else {
            Err(chain(&self.bucket.damaged(object, "a chunk has changed")))
        }
    }
}

impl Store {
    /// Has all of an offered image fetched by threads. When it is whole, it becomes an ordinary image. Does nothing for
    /// any other image.
    ///
    /// # Errors
    /// A thread cannot be started.
    pub(crate) fn start_download(&self, id: ImageId) -> io::Result<()> {
        let Some(pending) = self.pending.find(id).filter(|pending| pending.start()) else {
            return Ok(());
        };
        tracing::info!(image = %id, size = %size(pending.manifest().stored_bytes), "downloading the image");
        let running = Arc::new(AtomicUsize::new(REQUESTS));
        let first = Arc::new(Once::new());
        for _ in 0..REQUESTS {
            let (store, pending) = (self.clone(), Arc::clone(&pending));
            let (running, first) = (Arc::clone(&running), Arc::clone(&first));
            let thread = Builder::new().name("download".to_owned());
            thread.spawn(move || {
                let tell = || tracing::debug!(image = %id, "the first part of the image is here");
                pending.fetch(&|_| first.call_once(tell));
                if running.fetch_sub(1, Ordering::AcqRel) == 1 {
                    end(&pending, &store);
                }
            })?;
        }
        Ok(())
    }
}

/// Makes the whole image durable, after all threads have ended.
fn end(pending: &PendingImage, store: &Store) {
    let id = pending.manifest().id;
    if let Err(reason) = pending.wait_until_whole() {
        tracing::warn!(
            image = %id,
            "the image was not downloaded completely, a later restore downloads it again: {reason}"
        );
        return;
    }
    match complete(pending, store) {
        Ok(()) => tracing::info!(image = %id, "the image was downloaded completely"),
        Err(error) => tracing::warn!(
            image = %id,
            "the downloaded image cannot be kept, a later restore downloads it again: {}",
            chain(&error)
        ),
    }
}

/// Makes a whole image durable, and visible for all processes. If that fails, it stays readable in this process.
fn complete(pending: &PendingImage, store: &Store) -> Result<(), WriteError> {
    let manifest = pending.manifest();
    let sync = || {
        let files = pending.files()?;
        files.iter().try_for_each(ops::sync)
    };
    sync().map_err(|source| WriteError::Pack {
        path: store.packs_folder(),
        source,
    })?;
    let content = store.encode(manifest)?;
    store.check_place()?;
    durable::sync_folder(&store.packs_folder())?;
    durable::write(&store.manifest_file(manifest.id), &content)?;
    store.pending.remove(manifest.id);
    Ok(())
}
