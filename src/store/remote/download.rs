//! Download of an image: several threads fetch its parts, those first that a reader waits for, check every chunk, and
//! write them to the local store.

use std::fs::File;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread::Builder;

use bytes::Bytes;
use xxhash_rust::xxh3::xxh3_64;

use super::bucket::Bucket;
use super::image_object::{ImageObject, RemoteImage};
use super::remote_error::RemoteError;
use crate::printable::chain;
use crate::store::format::chunk::CHUNK_BYTES;
use crate::store::format::cipher::OVERHEAD_BYTES;
use crate::store::format::codec::Decoder;
use crate::store::format::manifest::{Manifest, Stored};
use crate::store::format::pack::Pack;
use crate::store::fs::{durable, ops};
use crate::store::read::pending_image::{Part, PendingImage};
use crate::store::write::image_writer::next_image;
use crate::store::{ImageId, Store, StoreLock, WriteError};

/// Mode of a pack's file.
const MODE: u32 = 0o600;
/// Requests at a time, each of at most 4 MiB.
const REQUESTS: usize = 8;

/// Begins the download of an image, and returns its number in the local store. It can be read at once: reads wait for
/// their bytes. When all are there, it becomes an ordinary image.
pub(crate) fn begin(
    bucket: &Bucket,
    image: &RemoteImage,
    store: &Store,
    lock: &StoreLock,
) -> Result<ImageId, RemoteError> {
    let secrets = store.secrets();
    let object = ImageObject::read(bucket, &image.object, image.number, secrets)?;
    let pending = prepare(store, lock, object.manifest)?;
    let id = pending.manifest().id;
    let download = Arc::new(Download {
        bucket: bucket.clone(),
        packs: object.packs,
        store: store.clone(),
        pending,
        running: AtomicUsize::new(REQUESTS),
    });
    for _ in 0..REQUESTS {
        let download = Arc::clone(&download);
        let thread = Builder::new().name("download".to_owned());
        thread
            .spawn(move || download.run())
            .map_err(RemoteError::Thread)?;
    }
    Ok(id)
}

/// Makes an image visible in this process under the next number. `manifest` describes it with any number, with the
/// places of its chunks in its packs.
fn prepare(
    store: &Store,
    lock: &StoreLock,
    mut manifest: Manifest,
) -> Result<Arc<PendingImage>, WriteError> {
    lock.check(store.path());
    let newest = store.ids()?.last().copied();
    manifest.id = next_image(store, newest)?;
    let mut files = Vec::new();
    for (pack, number) in manifest.packs.iter_mut().zip(0..) {
        pack.name.image = manifest.id;
        pack.name.number = number;
        files.push(create(store, *pack)?);
    }
    let pending = Arc::new(PendingImage::new(manifest, files));
    store.pending.add(&pending);
    Ok(pending)
}

/// Creates a pack's file with its header and length.
fn create(store: &Store, pack: Pack) -> Result<File, WriteError> {
    let path = store.pack_file(pack.name);
    let create = || {
        drop(ops::create_new(&path, MODE)?);
        let file = ops::open(&path)?;
        ops::write_at(&file, &pack.name.header(), 0)?;
        ops::set_len(&file, pack.len)?;
        Ok(file)
    };
    create().map_err(|source| failed(store, pack, source))
}

/// Makes a whole image durable, and visible for all processes. If that fails, it stays readable in this process.
fn complete(pending: &PendingImage, store: &Store) -> Result<(), WriteError> {
    assert!(pending.is_whole(), "a part is missing");
    let manifest = pending.manifest();
    for (file, pack) in pending.files().iter().zip(&manifest.packs) {
        ops::sync(file).map_err(|source| failed(store, *pack, source))?;
    }
    let content = store.encode(manifest)?;
    store.check_place()?;
    durable::sync_folder(&store.packs_folder())?;
    durable::write(&store.manifest_file(manifest.id), &content)?;
    store.pending.remove(manifest.id);
    Ok(())
}

fn failed(store: &Store, pack: Pack, source: io::Error) -> WriteError {
    WriteError::Pack {
        path: store.pack_file(pack.name),
        source,
    }
}

struct Download {
    bucket: Bucket,
    /// Names of the packs' objects.
    packs: Vec<String>,
    store: Store,
    pending: Arc<PendingImage>,
    /// Threads that have not ended.
    running: AtomicUsize,
}

impl Download {
    fn run(&self) {
        if let Err(reason) = self.fetch_parts() {
            self.pending.fail(reason);
        }
        if self.running.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.end();
        }
    }

    /// Makes the whole image durable, after all threads have ended.
    fn end(&self) {
        let id = self.pending.manifest().id;
        if let Some(reason) = self.pending.failure() {
            tracing::warn!(
                image = %id,
                "the image was not downloaded completely, a later restore downloads it again: {reason}"
            );
            return;
        }
        match complete(&self.pending, &self.store) {
            Ok(()) => tracing::info!(image = %id, "the image was downloaded completely"),
            Err(error) => tracing::warn!(
                image = %id,
                "the downloaded image cannot be kept, a later restore downloads it again: {}",
                chain(&error)
            ),
        }
    }

    fn fetch_parts(&self) -> Result<(), String> {
        let mut checker = Checker {
            store: &self.store,
            decoder: Decoder::new().map_err(|error| error.to_string())?,
            opened: Vec::new(),
            raw: vec![0; CHUNK_BYTES],
        };
        while let Some((number, part)) = self.pending.take() {
            let object = &self.packs[part.pack as usize];
            let read = self.bucket.get_range(object, part.begin..part.end);
            let bytes = read.map_err(|error| chain(&error))?;
            if !self.is_right(&mut checker, part, &bytes) {
                return Err(chain(&self.bucket.damaged(object, "a chunk has changed")));
            }
            let put = self.pending.put(number, &bytes);
            put.map_err(|error| format!("cannot write the image: {error}"))?;
        }
        Ok(())
    }

    fn is_right(&self, checker: &mut Checker<'_>, part: &Part, bytes: &Bytes) -> bool {
        part.chunks.iter().all(|(index, stored)| {
            let raw_len = self.pending.manifest().chunks[*index as usize].raw_len;
            let begin = usize::try_from(stored.offset - part.begin).unwrap_or(usize::MAX);
            let bytes = bytes
                .get(begin..)
                .and_then(|rest| rest.get(..stored.len as usize));
            bytes.is_some_and(|bytes| checker.is_right(stored, raw_len as usize, bytes))
        })
    }
}

/// Check of chunks as they are stored.
struct Checker<'a> {
    store: &'a Store,
    decoder: Decoder,
    opened: Vec<u8>,
    raw: Vec<u8>,
}

impl Checker<'_> {
    fn is_right(&mut self, stored: &Stored, raw_len: usize, bytes: &[u8]) -> bool {
        if stored.check.is_some_and(|check| check != xxh3_64(bytes)) {
            return false;
        }
        let encoded = match self.store.secrets() {
            None => bytes,
            Some(secrets) => {
                // A valid manifest has no sealed chunk that is shorter.
                self.opened
                    .resize(bytes.len().saturating_sub(OVERHEAD_BYTES), 0);
                if secrets
                    .chunks
                    .open(&stored.hash, bytes, &mut self.opened)
                    .is_err()
                {
                    return false;
                }
                &self.opened
            }
        };
        let raw = &mut self.raw[..raw_len];
        self.decoder.decode(stored.codec, encoded, raw).is_ok()
            && self.store.name_of(raw) == stored.hash
    }
}
