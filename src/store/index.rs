//! The chunks that a new image need not write again: those of the images that exist.
//!
//! What lies where a damaged image has a chunk is not trusted, nor is a pack that is
//! missing or has another length: a new image must never depend on bytes that may be
//! bad. The same bytes written once more, elsewhere, are.

use std::collections::{HashMap, HashSet};
use std::fs;

use super::chunk::Hash;
use super::error::ReadError;
use super::layout::Store;
use super::manifest::{Chunk, Content, Manifest, Stored};
use super::pack::{Pack, PackName};

/// Where the chunks of existing images lie.
#[derive(Debug, Default)]
pub(super) struct Index {
    chunks: HashMap<Hash, Chunk>,
    packs: Vec<Pack>,
    /// Where chunks of damaged images lie.
    doubted: HashSet<(PackName, u64)>,
}

impl Index {
    /// Reads the manifests of all images. Those that cannot be read add nothing.
    pub(super) fn load(store: &Store) -> Result<Self, ReadError> {
        let mut index = Self::default();
        let (damaged, good): (Vec<_>, Vec<_>) = store
            .ids()?
            .into_iter()
            .partition(|id| store.damage_mark(*id).is_some());
        for manifest in damaged.iter().filter_map(|id| store.manifest(*id).ok()) {
            let places = stored(&manifest).map(|(_, stored)| place(&manifest, stored));
            index.doubted.extend(places);
        }
        for manifest in good.iter().filter_map(|id| store.manifest(*id).ok()) {
            index.add(store, &manifest);
        }
        Ok(index)
    }

    /// The known chunk of this hash, which was checked to have this length.
    pub(super) fn get(&self, hash: &Hash, raw_len: u32) -> Option<Chunk> {
        let chunk = self.chunks.get(hash).copied();
        chunk.filter(|chunk| chunk.raw_len == raw_len)
    }

    /// The packs that known chunks refer to by position.
    pub(super) fn packs(&self) -> &[Pack] {
        &self.packs
    }

    fn add(&mut self, store: &Store, manifest: &Manifest) {
        let places: Vec<Option<u32>> = manifest
            .packs
            .iter()
            .map(|pack| self.pack_position(store, *pack))
            .collect();
        for (chunk, stored) in stored(manifest) {
            if self.doubted.contains(&place(manifest, stored)) {
                continue;
            }
            if let Some(pack) = places[stored.pack as usize] {
                let content = Content::Stored(Stored { pack, ..stored });
                self.chunks
                    .entry(stored.hash)
                    .or_insert(Chunk { content, ..*chunk });
            }
        }
    }

    fn pack_position(&mut self, store: &Store, pack: Pack) -> Option<u32> {
        let known = self.packs.iter().position(|known| *known == pack);
        if let Some(position) = known {
            return u32::try_from(position).ok();
        }
        let found = fs::metadata(store.pack_file(pack.name)).ok()?;
        if found.len() != pack.len {
            return None;
        }
        self.packs.push(pack);
        u32::try_from(self.packs.len() - 1).ok()
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
