//! Upload of an image: chunks that the remote store lacks are packed and uploaded, then the object that makes the image
//! whole.
//!
//! ```text
//! manifest ─▶ new chunks, in the order of their use ─▶ read, checked ─▶ packs of 32 MiB ─▶ 4 uploads at a time
//!          ─▶ image object, with the places of all chunks
//! ```
//! A chunk is sent as it is stored: to decompress it would take the job's processor time. The reader of a chunk checks its
//! content. Memory: seven packs, about 230 MiB.

use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, Builder};
use std::time::{Duration, Instant};

use bytes::Bytes;
use xxhash_rust::xxh3::xxh3_64;

use super::bucket::Bucket;
use super::image_object::{IMAGES, ImageObject, PACKS, RemoteImage, pack_name};
use super::remote_error::RemoteError;
use crate::clock;
use crate::store::format::FORMAT;
use crate::store::format::chunk::{self, Hash};
use crate::store::format::cipher::{OVERHEAD_BYTES, Secrets};
use crate::store::format::codec::Codec;
use crate::store::format::manifest::{Chunk, Content, Manifest, Stored, Stream};
use crate::store::format::pack::{HEADER_LEN, Pack, PackFiles, PackName};
use crate::store::portable::companion;
use crate::store::read::checked_chunks::damage;
use crate::store::read::chunk_fetcher::ChunkFetcher;
use crate::store::{ByteCounter, Companion, ImageId, ReadError, Store};
use crate::sync::locked;

/// Length at which a pack is complete.
const PACK_BYTES: usize = 32 << 20;
/// Uploads at a time.
const UPLOADS: usize = 4;

/// Upload of images to a remote store, one after the other.
pub(crate) struct Uploads {
    bucket: Bucket,
    series: u64,
    /// Names and lengths of the packs that hold the chunks in `places`.
    packs: Vec<(String, u64)>,
    places: HashMap<Hash, Stored>,
    /// Packs of each image in the run's state.
    images: HashMap<String, HashSet<String>>,
    /// Image objects and packs that exist.
    existing: HashSet<String>,
    pace: Pace,
}

impl Uploads {
    /// Reads which packs the remote store has, and where the chunks of these images are. New objects are named after
    /// the series; packs of the same series are used again.
    pub(crate) fn begin(
        bucket: &Bucket,
        series: u64,
        images: &[RemoteImage],
        secrets: Option<&Secrets>,
        bytes_per_second: Option<u64>,
    ) -> Result<Self, RemoteError> {
        let mut uploads = Self {
            bucket: bucket.clone(),
            series,
            packs: Vec::new(),
            places: HashMap::new(),
            images: HashMap::new(),
            existing: [bucket.list(PACKS, None)?, bucket.list(IMAGES, None)?]
                .concat()
                .into_iter()
                .map(|object| object.name)
                .collect(),
            pace: Pace::new(bytes_per_second),
        };
        for image in images {
            let object = ImageObject::read(bucket, image, secrets)?;
            uploads.know(&image.object, &object);
        }
        Ok(uploads)
    }

    /// Uploads an image of a store; it is not yet part of the run's state. `companions` become streams of it. `sent`
    /// counts the uploaded bytes.
    pub(crate) fn upload(
        &mut self,
        store: &Store,
        id: ImageId,
        companions: &[Companion],
        sent: &ByteCounter,
    ) -> Result<RemoteImage, RemoteError> {
        let source = store.manifest(id)?;
        let packs = PackFiles::new(store, source.packs.clone())
            .map_err(|source| ReadError::Pack { image: id, source })?;
        let mut order = source.first_uses();
        order.retain(|(_, stored)| !self.places.contains_key(&stored.hash));
        let mut fetcher = ChunkFetcher::new(&packs).map_err(ReadError::Worker)?;
        let companions = companion::open(&source, companions)?;
        let first = self.packs.len();
        let mut manifest = Manifest {
            format: FORMAT,
            ..source.clone()
        };
        self.send(
            first,
            |packer| {
                for (index, stored) in &order {
                    let raw_len = source.chunks[*index as usize].raw_len;
                    packer.add(stored.hash, stored.codec, stored.len, |bytes| {
                        let fetched = fetcher.fetch_stored(stored, raw_len, bytes);
                        fetched.map_err(|fault| damage(&source, *index, &fault).into())
                    })?;
                }
                for file in &companions {
                    packer.add_file(file, store.secrets(), &mut manifest)?;
                }
                Ok(())
            },
            sent,
        )?;
        let object = self.object(manifest);
        let (name, content) = object
            .encode(self.series, store.secrets())
            .map_err(|reason| self.bucket.damaged("the image's object", reason))?;
        if !self.existing.contains(&name) {
            sent.add(content.len());
            self.bucket.create(&name, content)?;
        }
        self.know(&name, &object);
        Ok(RemoteImage {
            object: name,
            id: source.id,
            created_unix_ms: source.created_unix_ms,
            raw_bytes: object.manifest.raw_bytes,
            pinned: None,
            abandoned: false,
        })
    }

    /// Removes everything that none of these images needs. Call it when no image is being uploaded.
    pub(crate) fn remove_garbage(&mut self, images: &[RemoteImage]) -> Result<(), RemoteError> {
        self.images
            .retain(|object, _| images.iter().any(|image| image.object == *object));
        let needed: HashSet<&String> = self
            .images
            .iter()
            .flat_map(|(object, packs)| packs.iter().chain([object]))
            .collect();
        let garbage: HashSet<String> = self
            .existing
            .iter()
            .filter(|name| !needed.contains(name))
            .cloned()
            .collect();
        let mut is_lost = vec![false; self.packs.len()];
        for (number, (pack, _)) in self.packs.iter().enumerate() {
            is_lost[number] = garbage.contains(pack);
        }
        // First forgotten, then removed: a chunk must not be looked for in a pack that may be gone.
        self.places.retain(|_, place| !is_lost[place.pack as usize]);
        for object in &garbage {
            self.existing.remove(object);
            self.bucket.remove(object)?;
        }
        Ok(())
    }

    /// Notes where an image's chunks are.
    fn know(&mut self, name: &str, object: &ImageObject) {
        let known = self.packs.iter().map(|(pack, _)| pack.clone());
        let mut numbers: HashMap<String, u32> = known.zip(0..).collect();
        let mut table = Vec::new();
        for (pack, about) in object.packs.iter().zip(&object.manifest.packs) {
            let number = *numbers.entry(pack.clone()).or_insert_with(|| {
                self.packs.push((pack.clone(), about.len));
                number_of(self.packs.len() - 1)
            });
            table.push(number);
        }
        for chunk in &object.manifest.chunks {
            if let Content::Stored(stored) = chunk.content {
                let pack = table[stored.pack as usize];
                self.places
                    .entry(stored.hash)
                    .or_insert(Stored { pack, ..stored });
            }
        }
        let needed = object.packs.iter().cloned().collect();
        self.images.insert(name.to_owned(), needed);
        self.existing.insert(name.to_owned());
    }

    /// Returns the image with the places of its chunks in the remote store.
    fn object(&self, mut manifest: Manifest) -> ImageObject {
        let mut numbers: HashMap<u32, u32> = HashMap::new();
        let (mut names, mut packs) = (Vec::new(), Vec::new());
        for chunk in &mut manifest.chunks {
            let Content::Stored(stored) = chunk.content else {
                continue;
            };
            let Some(place) = self.places.get(&stored.hash) else {
                // No stream uses it.
                chunk.content = Content::Zero;
                continue;
            };
            let pack = *numbers.entry(place.pack).or_insert_with(|| {
                let (name, len) = &self.packs[place.pack as usize];
                let number = number_of(names.len());
                names.push(name.clone());
                packs.push(Pack {
                    name: PackName {
                        image: ImageId::FIRST,
                        number,
                    },
                    len: *len,
                });
                number
            });
            chunk.content = Content::Stored(Stored { pack, ..*place });
        }
        manifest.packs = packs;
        ImageObject {
            packs: names,
            manifest,
        }
    }

    /// Packs the chunks that `fill` adds and uploads the packs, several at a time. The new places are known afterwards.
    fn send(
        &mut self,
        first: usize,
        fill: impl FnOnce(&mut Packer) -> Result<(), RemoteError>,
        sent: &ByteCounter,
    ) -> Result<(), RemoteError> {
        let (sender, receiver) = sync_channel::<Complete>(1);
        let receiver = Mutex::new(receiver);
        let results = Mutex::new(Vec::new());
        let is_failed = AtomicBool::new(false);
        let spare = Spare::default();
        let this = &*self;
        let work = || {
            loop {
                let next = locked(&receiver).recv();
                let Ok(pack) = next else { return };
                if is_failed.load(Ordering::Relaxed) {
                    continue;
                }
                let number = pack.number;
                let put = this.put(pack, sent);
                is_failed.fetch_or(put.is_err(), Ordering::Relaxed);
                locked(&results).push((number, put));
            }
        };
        let (filled, places) = thread::scope(|scope| {
            for _ in 0..UPLOADS {
                Builder::new()
                    .name("upload".to_owned())
                    .spawn_scoped(scope, work)
                    .map_err(RemoteError::Thread)?;
            }
            let mut packer = Packer {
                first,
                count: 0,
                pack: PackMemory::take(&spare),
                chunks: blake3::Hasher::new(),
                places: Vec::new(),
                known: &this.places,
                sender,
                is_failed: &is_failed,
            };
            let filled = fill(&mut packer).and_then(|()| packer.complete());
            Ok::<_, RemoteError>((filled, packer.places))
        })?;
        let mut results = results.into_inner().unwrap_or_else(PoisonError::into_inner);
        results.sort_unstable_by_key(|(number, _)| *number);
        let mut uploaded = Vec::new();
        for (_, result) in results {
            uploaded.push(result?);
        }
        filled?;
        for (name, _) in &uploaded {
            self.existing.insert(name.clone());
        }
        self.packs.extend(uploaded);
        self.places.extend(places);
        Ok(())
    }

    /// Uploads a pack; returns its name and length.
    fn put(&self, pack: Complete, sent: &ByteCounter) -> Result<(String, u64), RemoteError> {
        let name = pack_name(self.series, pack.chunks);
        let len = pack.content.len();
        if !self.existing.contains(&name) {
            self.pace.wait(len);
            self.bucket.create(&name, pack.content)?;
            sent.add(len);
        }
        Ok((name, len as u64))
    }
}

/// A complete pack to be uploaded.
struct Complete {
    number: usize,
    content: Bytes,
    /// Hash of the list of its chunks.
    chunks: blake3::Hash,
}

/// Memory of uploaded packs.
type Spare = Arc<Mutex<Vec<Vec<u8>>>>;

/// Memory of a pack. It is used again: fresh memory from the kernel costs as much as the copy into it.
struct PackMemory {
    /// The bytes beyond `len` have no meaning.
    bytes: Vec<u8>,
    len: usize,
    spare: Spare,
}

impl PackMemory {
    /// Returns the beginning of a pack: zeros, where a store's pack has its header.
    fn take(spare: &Spare) -> Self {
        let bytes = locked(spare).pop();
        Self {
            bytes: bytes.unwrap_or_else(|| vec![0; PACK_BYTES]),
            len: HEADER_LEN,
            spare: Arc::clone(spare),
        }
    }
}

impl AsRef<[u8]> for PackMemory {
    fn as_ref(&self) -> &[u8] {
        &self.bytes[..self.len]
    }
}

impl Drop for PackMemory {
    fn drop(&mut self) {
        locked(&self.spare).push(std::mem::take(&mut self.bytes));
    }
}

/// Packs under construction.
struct Packer<'a> {
    /// Number of the first of these packs in [`Uploads::packs`].
    first: usize,
    count: usize,
    pack: PackMemory,
    /// Hash of the list of the pack's chunks. A hash of the content would take a tenth of the upload's processor time.
    chunks: blake3::Hasher,
    places: Vec<(Hash, Stored)>,
    /// Chunks that the remote store has.
    known: &'a HashMap<Hash, Stored>,
    sender: SyncSender<Complete>,
    is_failed: &'a AtomicBool,
}

impl Packer<'_> {
    /// Adds a chunk of this length; `fill` writes its bytes and returns their check.
    fn add(
        &mut self,
        hash: Hash,
        codec: Codec,
        len: u32,
        fill: impl FnOnce(&mut [u8]) -> Result<u64, RemoteError>,
    ) -> Result<Stored, RemoteError> {
        if self.pack.len + len as usize > PACK_BYTES {
            self.complete()?;
        }
        let (begin, end) = (self.pack.len, self.pack.len + len as usize);
        let check = fill(&mut self.pack.bytes[begin..end])?;
        let stored = Stored {
            hash,
            pack: number_of(self.first + self.count),
            offset: begin as u64,
            len,
            codec,
            check: Some(check),
        };
        self.chunks.update(&hash).update(&[codec as u8]);
        self.chunks
            .update(&len.to_le_bytes())
            .update(&check.to_le_bytes());
        self.places.push((hash, stored));
        self.pack.len = end;
        Ok(stored)
    }

    /// Adds a file as a stream of the image.
    fn add_file(
        &mut self,
        file: &companion::Opened,
        secrets: Option<&Secrets>,
        manifest: &mut Manifest,
    ) -> Result<(), RemoteError> {
        let mut indices = Vec::new();
        let mut sealed = Vec::new();
        file.chunks(|raw, codec, encoded| -> Result<(), RemoteError> {
            let hash = secrets.map_or_else(|| chunk::hash(raw), |secrets| secrets.name(raw));
            let stored = match secrets {
                None => encoded,
                Some(secrets) => {
                    sealed.resize(encoded.len() + OVERHEAD_BYTES, 0);
                    let result = secrets.chunks.seal(&hash, encoded, &mut sealed);
                    result.map_err(RemoteError::Seal)?;
                    &sealed
                }
            };
            let place = match self.known.get(&hash) {
                Some(known) => *known,
                None => self.add(hash, codec, number_of(stored.len()), |bytes| {
                    bytes.copy_from_slice(stored);
                    Ok(xxh3_64(stored))
                })?,
            };
            indices.push(number_of(manifest.chunks.len()));
            manifest.chunks.push(Chunk {
                raw_len: number_of(raw.len()),
                content: Content::Stored(place),
            });
            Ok(())
        })?;
        manifest.raw_bytes = manifest.raw_bytes.saturating_add(file.len);
        manifest.streams.push(Stream {
            name: file.stream.clone(),
            raw_len: file.len,
            chunks: indices,
        });
        Ok(())
    }

    /// Hands the pack over to the uploads, unless it is empty. Fails if one of them has failed.
    fn complete(&mut self) -> Result<(), RemoteError> {
        if self.is_failed.load(Ordering::Relaxed) {
            return Err(RemoteError::Stopped);
        }
        if self.pack.len == HEADER_LEN {
            return Ok(());
        }
        let next = PackMemory::take(&self.pack.spare);
        let content = Bytes::from_owner(std::mem::replace(&mut self.pack, next));
        // Fails only if all threads have panicked; then their panic is raised at the end of their scope.
        let _ = self.sender.send(Complete {
            number: self.count,
            content,
            chunks: std::mem::take(&mut self.chunks).finalize(),
        });
        self.count += 1;
        Ok(())
    }
}

/// Limit on the speed of the uploads.
struct Pace {
    bytes_per_second: Option<u64>,
    /// Time at which the next upload may begin.
    next: Mutex<Instant>,
}

impl Pace {
    fn new(bytes_per_second: Option<u64>) -> Self {
        Self {
            bytes_per_second,
            next: Mutex::new(clock::now()),
        }
    }

    /// Waits until `len` bytes may be sent.
    fn wait(&self, len: usize) {
        let Some(rate) = self.bytes_per_second else {
            return;
        };
        let takes = Duration::from_millis(1000 * len as u64 / rate.max(1));
        let begin = {
            let mut next = locked(&self.next);
            let begin = (*next).max(clock::now());
            *next = begin + takes;
            begin
        };
        thread::sleep(begin.saturating_duration_since(clock::now()));
    }
}

/// Converts a number that is limited by the format of manifests.
fn number_of(count: usize) -> u32 {
    u32::try_from(count).unwrap_or(u32::MAX)
}
