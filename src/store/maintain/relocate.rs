//! Search for other places of chunks that are bad in the place that a manifest names.
//!
//! Chunks with the same hash are the same, wherever they lie. This module uses the results of a scan to make new
//! manifests; it changes nothing in the store.

use std::collections::{HashMap, HashSet};

use super::scan::{PackState, Place, Scan};
use super::verify_report::{ImageReport, is_manifest_lost};
use crate::store::error::ReadError;
use crate::store::format::FORMAT;
use crate::store::format::chunk::Hash;
use crate::store::format::image_id::ImageId;
use crate::store::format::manifest::{Content, Manifest, Stored};
use crate::store::format::manifest_file::ManifestError;
use crate::store::format::pack::{Pack, PackFiles, PackName};
use crate::store::format::store_folder::Store;
use crate::store::read::chunk_fetcher;

/// Finds other places for bad chunks.
pub(crate) struct Relocator<'a> {
    scan: &'a Scan,
    files: PackFiles,
    /// The whole copies of chunks that are bad somewhere.
    spares: HashMap<(Hash, u32), &'a Place>,
    /// True if every file that may contain a copy could be read.
    is_complete: bool,
}

pub(crate) enum Relocation {
    Healed {
        manifest: Manifest,
        chunks: usize,
    },
    Lost,
    /// The missing chunk may lie in a file that cannot be read at present.
    Uncertain,
}

impl<'a> Relocator<'a> {
    pub(crate) fn new(store: &Store, scan: &'a Scan, images: &[ImageReport]) -> Self {
        let name = |place: &Place| (place.stored.hash, place.raw_len);
        let wanted: HashSet<_> = scan.faults().map(|(place, _)| name(place)).collect();
        let good = scan.good().filter(|place| wanted.contains(&name(place)));
        let reached = |image: &ImageReport| match &image.manifest {
            None | Some(ManifestError::Newer { .. }) => true,
            Some(error) => is_manifest_lost(error),
        };
        Self {
            scan,
            files: scan.files(store),
            spares: good.map(|place| (name(place), place)).collect(),
            is_complete: images.iter().all(reached) && scan.reached_all(),
        }
    }

    /// Returns the manifest with every chunk in a place where it is whole, and with the present lengths of the packs.
    pub(crate) fn heal(&self, manifest: &Manifest) -> Result<Relocation, ReadError> {
        let bad = self.scan.bad_chunks(manifest);
        let mut table = PackTable::default();
        let mut healed = manifest.clone();
        let mut chunks = 0;
        for (chunk, fault) in healed.chunks.iter_mut().zip(bad) {
            let Content::Stored(stored) = &mut chunk.content else {
                continue;
            };
            let place = if fault.is_some() {
                chunks += 1;
                let spare = self.spares.get(&(stored.hash, chunk.raw_len));
                spare.map(|spare| spare.stored)
            } else {
                let number = self.scan.number(manifest.packs[stored.pack as usize].name);
                number.map(|pack| Stored { pack, ..*stored })
            };
            let Some((place, pack)) = place.and_then(|place| Some((place, self.pack(place)?)))
            else {
                return Ok(if self.is_complete {
                    Relocation::Lost
                } else {
                    Relocation::Uncertain
                });
            };
            *stored = Stored {
                pack: table.position(pack),
                check: Some(self.check(manifest.id, &place)?),
                ..place
            };
        }
        (healed.packs, healed.format) = (table.packs, FORMAT);
        Ok(Relocation::Healed {
            manifest: healed,
            chunks,
        })
    }

    /// Returns the pack of a place, with its present length.
    fn pack(&self, place: Stored) -> Option<Pack> {
        let (name, state) = self.scan.packs()[place.pack as usize];
        match state {
            PackState::Readable(probe) => Some(Pack {
                name,
                len: probe.len,
            }),
            PackState::Lost | PackState::OutOfReach => None,
        }
    }

    fn check(&self, image: ImageId, place: &Stored) -> Result<u64, ReadError> {
        let missing = || chunk_fetcher::missing_check(&self.files, place);
        let check = place.check.map_or_else(missing, Ok);
        check.map_err(|source| ReadError::Pack { image, source })
    }
}

/// The packs of a healed manifest.
#[derive(Default)]
struct PackTable {
    packs: Vec<Pack>,
    positions: HashMap<PackName, u32>,
}

impl PackTable {
    fn position(&mut self, pack: Pack) -> u32 {
        *self.positions.entry(pack.name).or_insert_with(|| {
            self.packs.push(pack);
            // Never more packs than the scan has, and the scan counts them with a `u32`.
            u32::try_from(self.packs.len() - 1).unwrap_or(u32::MAX)
        })
    }
}
