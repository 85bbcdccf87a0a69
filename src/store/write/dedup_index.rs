//! Deduplication index: chunks of the newest images, which a new image need not write again.
//!
//! Nearly all chunks that an older image shares with the next image are also in the images between. So only the newest
//! images are read, and the cost of beginning an image does not grow with their number.
//!
//! Chunks of damaged images are not trusted, nor are packs that are missing or have a different length: a new image
//! must never depend on bytes that may be bad. The same bytes are trusted if they were written again at another place.

use std::collections::{HashMap, HashSet};
use std::fs;
use std::sync::{Arc, LazyLock};
use std::thread::Builder;

use hashbrown::HashTable;

use crate::store::error::ReadError;
use crate::store::format::FORMAT;
use crate::store::format::chunk::{Hash, key_of};
use crate::store::format::image_id::ImageId;
use crate::store::format::manifest::{Chunk, Content, Manifest, Stored};
use crate::store::format::pack::{Pack, PackName};
use crate::store::format::store_folder::Store;
use crate::sync::in_parts_of;

/// Maximum number of good images to read: the newest, and the one before it because jobs that alternate between two
/// phases resemble that one more. Takes about 70 bytes of memory per chunk.
const IMAGES_MAX: usize = 2;
/// Maximum number of manifests to read in search of these images; manifests of other formats are not usable.
const TRIES_MAX: usize = 4;

/// Index that is read at its first use.
pub(crate) type LazyIndex = LazyLock<DedupIndex, Box<dyn FnOnce() -> DedupIndex + Send>>;

/// Positions of the chunks of existing images.
#[derive(Debug, Default)]
pub(crate) struct DedupIndex {
    chunks: Vec<Chunk>,
    /// Positions in `chunks` by hash.
    by_hash: HashTable<u32>,
    packs: Vec<Pack>,
    positions: HashMap<Pack, Option<u32>>,
    /// Positions of chunks of damaged images.
    doubted: HashSet<(PackName, u64)>,
}

impl DedupIndex {
    /// Begins to read the index of a store on a thread: a large one takes some tenths of a second. Its first user waits.
    pub(crate) fn read_ahead(store: &Store) -> Result<Arc<LazyIndex>, ReadError> {
        let ids = store.ids()?;
        store.manifests.retain(&ids);
        let store = store.clone();
        let read: Box<dyn FnOnce() -> Self + Send> = Box::new(move || Self::load(&store, ids));
        let index = Arc::new(LazyIndex::new(read));
        let ahead = Arc::clone(&index);
        // Without a thread, the first user reads it.
        let _ = Builder::new().name("index".to_owned()).spawn(move || {
            LazyLock::force(&ahead);
        });
        Ok(index)
    }

    /// Reads the manifests of the newest images and of the damaged ones. Manifests that are unreadable or of another
    /// format are skipped.
    fn load(store: &Store, ids: Vec<ImageId>) -> Self {
        let mut index = Self::default();
        let newest_first = ids.into_iter().rev();
        let (damaged, good): (Vec<_>, Vec<_>) =
            newest_first.partition(|id| store.damage_mark(*id).is_some());
        for manifest in damaged.iter().filter_map(|id| store.manifest(*id).ok()) {
            let places = stored(&manifest).map(|(_, stored)| place(&manifest, stored));
            index.doubted.extend(places);
        }
        for manifest in newest_usable(store, &good) {
            index.add(store, &manifest);
        }
        index
    }

    /// Returns the known chunk with this hash and length.
    pub(crate) fn get(&self, hash: &Hash, raw_len: u32) -> Option<Chunk> {
        self.find(hash).filter(|chunk| chunk.raw_len == raw_len)
    }

    fn find(&self, hash: &Hash) -> Option<Chunk> {
        let same = |position: &u32| hash_of(&self.chunks[*position as usize]) == Some(*hash);
        let position = self.by_hash.find(key_of(hash), same)?;
        Some(self.chunks[*position as usize])
    }

    /// Returns the number of known chunks.
    pub(crate) fn len(&self) -> usize {
        self.chunks.len()
    }

    /// Returns the packs to which known chunks refer by position.
    pub(crate) fn packs(&self) -> &[Pack] {
        &self.packs
    }

    fn add(&mut self, store: &Store, manifest: &Manifest) {
        let places: Vec<Option<u32>> = manifest
            .packs
            .iter()
            .map(|pack| self.pack_position(store, *pack))
            .collect();
        self.reserve(manifest.chunks.len());
        for (chunk, stored) in stored(manifest) {
            let Some(pack) = places[stored.pack as usize] else {
                continue;
            };
            if self.doubted.contains(&place(manifest, stored)) || self.find(&stored.hash).is_some()
            {
                continue;
            }
            let content = Content::Stored(Stored { pack, ..stored });
            self.insert(stored.hash, Chunk { content, ..*chunk });
        }
    }

    /// Makes room for the chunks of a manifest. The second one usually adds few.
    fn reserve(&mut self, count: usize) {
        let Self {
            by_hash, chunks, ..
        } = self;
        let more = count.saturating_sub(chunks.len());
        chunks.reserve(more);
        let chunks = &*chunks;
        by_hash.reserve(more, |position| key_at(chunks, *position));
    }

    fn insert(&mut self, hash: Hash, chunk: Chunk) {
        // A manifest has less than 2^32 chunks. If two manifests have more, the remaining chunks are written again.
        let Ok(position) = u32::try_from(self.chunks.len()) else {
            return;
        };
        self.chunks.push(chunk);
        let chunks = &self.chunks;
        let key = |position: &u32| key_at(chunks, *position);
        self.by_hash.insert_unique(key_of(&hash), position, key);
    }

    fn pack_position(&mut self, store: &Store, pack: Pack) -> Option<u32> {
        if let Some(known) = self.positions.get(&pack) {
            return *known;
        }
        let whole =
            fs::metadata(store.pack_file(pack.name)).is_ok_and(|found| found.len() == pack.len);
        let position = u32::try_from(self.packs.len()).ok().filter(|_| whole);
        if position.is_some() {
            self.packs.push(pack);
        }
        self.positions.insert(pack, position);
        position
    }
}

/// Returns the manifests of the newest images that are readable and of this format, the newest first. Reading one takes
/// about as long as adding it to the index, so the first ones are read at the same time.
fn newest_usable(store: &Store, newest_first: &[ImageId]) -> Vec<Arc<Manifest>> {
    let read = |ids: &[ImageId]| ids.iter().find_map(|id| store.cached_manifest(*id).ok());
    let mut usable = Vec::new();
    for ids in newest_first[..newest_first.len().min(TRIES_MAX)].chunks(IMAGES_MAX) {
        let manifests = in_parts_of(1, ids, read).into_iter().flatten();
        usable.extend(manifests.filter(|manifest| manifest.format == FORMAT));
        if usable.len() >= IMAGES_MAX {
            break;
        }
    }
    usable.truncate(IMAGES_MAX);
    usable
}

fn key_at(chunks: &[Chunk], position: u32) -> u64 {
    hash_of(&chunks[position as usize]).map_or(0, |hash| key_of(&hash))
}

fn hash_of(chunk: &Chunk) -> Option<Hash> {
    match chunk.content {
        Content::Zero => None,
        Content::Stored(stored) => Some(stored.hash),
    }
}

fn place(manifest: &Manifest, stored: Stored) -> (PackName, u64) {
    (manifest.packs[stored.pack as usize].name, stored.offset)
}

fn stored(manifest: &Manifest) -> impl Iterator<Item = (&Chunk, Stored)> {
    manifest
        .chunks
        .iter()
        .filter_map(|chunk| match chunk.content {
            Content::Zero => None,
            Content::Stored(stored) => Some((chunk, stored)),
        })
}
