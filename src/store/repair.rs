//! Repairing a store: what can be healed is, what is lost goes, the rest stays.
//!
//! ```text
//! verify all ─▶ plan ─▶ headers of packs ─▶ healed manifests ─▶ lost manifests removed
//!                                                             ─▶ marks ─▶ packs nobody needs
//! ```
//! A chunk that is bad in one place may be whole in another, by its hash: then the manifest is
//! written anew and points there. A pack that was cut or has grown serves on with the length it has,
//! one whose header is damaged gets it back, as long as the chunks in it are whole. An image that lacks a
//! single byte is removed: it can never be restored.
//!
//! Each step is durable before the next begins, and packs go last: cut short at any point,
//! what was whole is whole, and a second repair finishes the work. Nothing is removed on
//! the word of a file that cannot be read for now, or that a newer version wrote.
//!
//! An image that was set aside stays so, even if it is whole: its bytes say nothing of
//! why it could not be restored. Only [`Marks::Clear`] makes it one to restore again.

use std::collections::{HashMap, HashSet};
use std::fs;

use super::chunk::Hash;
use super::durable;
use super::error::{ReadError, WriteError};
use super::fetch;
use super::files::{self, FileKind};
use super::id::ImageId;
use super::layout::{FORMAT, Store};
use super::lock::{Busy, StoreLock};
use super::manifest::{Content, Manifest, Stored};
use super::pack::{Pack, PackFiles, PackName};
use super::probe;
use super::report::{ImageReport, Verdict, is_manifest_lost};
use super::scan::{PackState, Place, Scan};
use super::verify::Selection;
use super::wire::{self, ManifestError};

/// What becomes of images that were set aside but are whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Marks {
    /// They stay set aside.
    Keep,
    /// They are images to restore again.
    Clear,
}

/// What a repair does, or did.
#[derive(Debug, Default)]
pub struct Repaired {
    /// Every image, oldest first.
    pub images: Vec<RepairedImage>,
    /// Packs whose header is written again.
    pub mended_packs: Vec<PackName>,
    /// Packs that no image needs and that are removed.
    pub removed_packs: Vec<PackName>,
    /// Length of the packs that are removed.
    pub freed_bytes: u64,
    /// Images whose packs are not known, because their manifests need a newer version or
    /// cannot be read for now. If there are any, no pack is removed.
    pub unknown: Vec<ImageId>,
}

/// What a repair does with an image.
#[derive(Debug)]
pub struct RepairedImage {
    /// What was wrong with it before.
    pub report: ImageReport,
    /// What becomes of it.
    pub fate: Fate,
    /// Whether the mark that sets it aside is removed and the image stays.
    pub unmarked: bool,
}

/// What becomes of an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    /// It was whole and stays as it is.
    Whole,
    /// It is whole again.
    Healed {
        /// Chunks that it has from another place now.
        chunks: usize,
    },
    /// It cannot be restored and is removed.
    Dropped,
    /// It is not whole, but whether it is lost cannot be told: it stays as it is.
    Left,
}

impl Repaired {
    /// Whether there is nothing to do.
    #[must_use]
    pub fn is_nothing(&self) -> bool {
        let untouched = |image: &RepairedImage| {
            matches!(image.fate, Fate::Whole | Fate::Left) && !image.unmarked
        };
        self.images.iter().all(untouched)
            && self.mended_packs.is_empty()
            && self.removed_packs.is_empty()
    }
}

/// A repair that has been thought out. Nothing is changed before [`RepairPlan::apply`], and
/// nobody else changes the store as long as the plan exists.
#[derive(Debug)]
pub struct RepairPlan {
    store: Store,
    outcome: Repaired,
    /// The files of healed manifests.
    manifests: Vec<(ImageId, Vec<u8>)>,
    /// Packs whose header is written again, and where their first chunk lies.
    mended: Vec<(PackName, u64)>,
    _busy: Busy,
}

impl Store {
    /// Verifies the whole store and says how it can be repaired. `progress` as in
    /// [`Store::verify_all`].
    ///
    /// # Errors
    /// [`WriteError::Busy`] while an image is written. The store cannot be read for now.
    ///
    /// # Panics
    /// If the lock is that of another store.
    pub fn plan_repair(
        &self,
        lock: &StoreLock,
        marks: Marks,
        progress: &(dyn Fn(u64, u64) + Sync),
    ) -> Result<RepairPlan, WriteError> {
        let busy = lock.claim(self.path()).ok_or(WriteError::Busy)?;
        let (report, scan) = self.survey(Selection::All, progress)?;
        let healer = Healer::new(self, &scan, &report.images);
        let mut plan = RepairPlan {
            store: self.clone(),
            outcome: Repaired::default(),
            manifests: Vec::new(),
            mended: Vec::new(),
            _busy: busy,
        };
        let (mut needed, mut healed) = (HashSet::new(), HashSet::new());
        for image in report.images {
            let decided = plan.decide(&healer, &image)?;
            let names = decided.packs.iter().map(|pack| pack.name);
            needed.extend(names.clone());
            let stays = match decided.fate {
                Fate::Whole => true,
                Fate::Healed { .. } => {
                    healed.extend(names);
                    true
                }
                Fate::Dropped | Fate::Left => false,
            };
            let unmarked = image.set_aside.is_some() && stays && marks == Marks::Clear;
            plan.outcome.images.push(RepairedImage {
                report: image,
                fate: decided.fate,
                unmarked,
            });
        }
        let misnamed = scan.misnamed().into_iter();
        plan.mended = misnamed.filter(|(name, _)| healed.contains(name)).collect();
        plan.outcome.mended_packs = plan.mended.iter().map(|(name, _)| *name).collect();
        plan.find_garbage(&needed)?;
        Ok(plan)
    }
}

impl RepairPlan {
    /// What [`RepairPlan::apply`] will do.
    #[must_use]
    pub fn outcome(&self) -> &Repaired {
        &self.outcome
    }

    /// Repairs the store; returns what was done, which is what was planned.
    ///
    /// # Errors
    /// A file cannot be written or removed. What was done until then lasts, and another
    /// repair does the rest.
    pub fn apply(self) -> Result<Repaired, WriteError> {
        let store = &self.store;
        for (name, first) in &self.mended {
            probe::mend_header(store, *name, *first).map_err(|source| WriteError::Pack {
                path: store.pack_file(*name),
                source,
            })?;
        }
        if !self.manifests.is_empty() {
            store.upgrade()?;
        }
        for (image, file) in &self.manifests {
            durable::write(&store.manifest_file(*image), file)?;
        }
        self.remove_images()?;
        for name in &self.outcome.removed_packs {
            durable::remove(&store.pack_file(*name))?;
        }
        durable::sync_folder(&store.packs_folder())?;
        tracing::debug!(
            images = self.outcome.images.len(),
            healed = self.manifests.len(),
            packs_removed = self.outcome.removed_packs.len(),
            "store repaired"
        );
        Ok(self.outcome)
    }

    /// Removes lost images, then marks: an image without its mark must not be one that was dropped.
    fn remove_images(&self) -> Result<(), WriteError> {
        let images = &self.outcome.images;
        let dropped = |image: &&RepairedImage| image.fate == Fate::Dropped;
        for image in images.iter().filter(dropped) {
            durable::remove(&self.store.manifest_file(image.report.id))?;
        }
        durable::sync_folder(&self.store.images_folder())?;
        let unmarked = |image: &&RepairedImage| image.unmarked || dropped(image);
        for image in images.iter().filter(unmarked) {
            durable::remove(&self.store.damaged_file(image.report.id))?;
        }
        durable::sync_folder(&self.store.images_folder())?;
        Ok(())
    }

    fn decide(&mut self, healer: &Healer<'_>, image: &ImageReport) -> Result<Decided, WriteError> {
        if let Some(error) = &image.manifest {
            if is_manifest_lost(error) {
                return Ok(Decided::without_packs(Fate::Dropped));
            }
            self.outcome.unknown.push(image.id);
            return Ok(Decided::without_packs(Fate::Left));
        }
        let manifest = self.store.manifest(image.id)?;
        let healing = match image.verdict() {
            Verdict::Whole => return Ok(Decided::as_is(Fate::Whole, manifest)),
            Verdict::Unknown => return Ok(Decided::as_is(Fate::Left, manifest)),
            Verdict::Damaged => healer.heal(&manifest)?,
        };
        match healing {
            Healing::Lost => Ok(Decided::without_packs(Fate::Dropped)),
            Healing::Uncertain => Ok(Decided::as_is(Fate::Left, manifest)),
            Healing::Healed { manifest, chunks } => {
                self.manifests.push((image.id, encode(&manifest)?));
                Ok(Decided::as_is(Fate::Healed { chunks }, manifest))
            }
        }
    }

    fn find_garbage(&mut self, needed: &HashSet<PackName>) -> Result<(), ReadError> {
        if !self.outcome.unknown.is_empty() {
            return Ok(());
        }
        for (path, kind) in files::list(&self.store.packs_folder())? {
            if let FileKind::Pack(name) = kind
                && !needed.contains(&name)
            {
                self.outcome.removed_packs.push(name);
                // For the account only: 0 where it cannot be had.
                let len = fs::symlink_metadata(&path).map_or(0, |found| found.len());
                self.outcome.freed_bytes += len;
            }
        }
        self.outcome.removed_packs.sort_unstable();
        Ok(())
    }
}

/// What becomes of an image, and the packs that it needs then.
struct Decided {
    fate: Fate,
    packs: Vec<Pack>,
}

impl Decided {
    fn as_is(fate: Fate, manifest: Manifest) -> Self {
        let packs = manifest.packs;
        Self { fate, packs }
    }

    fn without_packs(fate: Fate) -> Self {
        let packs = Vec::new();
        Self { fate, packs }
    }
}

fn encode(manifest: &Manifest) -> Result<Vec<u8>, WriteError> {
    // What no reader would accept must not get a name.
    let valid = manifest.validate().map_err(ManifestError::Invalid);
    let encoded = valid.and_then(|()| wire::encode(manifest));
    encoded.map_err(|source| WriteError::Manifest {
        image: manifest.id,
        source,
    })
}

/// Finds other places for chunks that are bad where they should be.
struct Healer<'a> {
    scan: &'a Scan,
    files: PackFiles,
    /// For chunks that are bad somewhere, where they are whole.
    spares: HashMap<(Hash, u32), &'a Place>,
    /// Whether everything that may have a spare could be read.
    is_complete: bool,
}

enum Healing {
    Healed {
        manifest: Manifest,
        chunks: usize,
    },
    Lost,
    /// The missing chunk may lie in what cannot be read for now.
    Uncertain,
}

impl<'a> Healer<'a> {
    fn new(store: &Store, scan: &'a Scan, images: &[ImageReport]) -> Self {
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

    /// The manifest with every chunk where it is whole, and packs as long as they are.
    fn heal(&self, manifest: &Manifest) -> Result<Healing, ReadError> {
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
                    Healing::Lost
                } else {
                    Healing::Uncertain
                });
            };
            *stored = Stored {
                pack: table.position(pack),
                check: Some(self.check(manifest.id, &place)?),
                ..place
            };
        }
        (healed.packs, healed.format) = (table.packs, FORMAT);
        Ok(Healing::Healed {
            manifest: healed,
            chunks,
        })
    }

    /// The pack of a place, as long as it is.
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
        let missing = || fetch::missing_check(&self.files, place);
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
            // No more than the scan has, which counts them so.
            u32::try_from(self.packs.len() - 1).unwrap_or(u32::MAX)
        })
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::unix::fs::FileExt;

    use super::super::codec::tests::noise;
    use super::super::damage::{files_of, reads_back, small_store};
    use super::super::fixtures;
    use super::super::testing::{
        OPTIONS, image_files, never, packs, read_stream, temporary_store, write_image,
    };
    use super::*;

    /// Less than the shortest chunk that is cut: one chunk, in one pack.
    const BYTES: usize = 10_000;

    fn plan(store: &Store, lock: &StoreLock) -> RepairPlan {
        store.plan_repair(lock, Marks::Keep, &never).unwrap()
    }

    fn fates(repaired: &Repaired) -> Vec<Fate> {
        repaired.images.iter().map(|image| image.fate).collect()
    }

    fn id(number: u64) -> ImageId {
        ImageId::new(number).unwrap()
    }

    fn flip(store: &Store, pack: PackName, at: u64) {
        let path = store.pack_file(pack);
        let file = File::options().read(true).write(true).open(path).unwrap();
        let mut byte = [0];
        file.read_exact_at(&mut byte, at).unwrap();
        file.write_all_at(&[!byte[0]], at).unwrap();
    }

    /// Two images of the same bytes that share nothing, and the only pack of each.
    fn twice(store: &Store, lock: &StoreLock, bytes: &[u8]) -> [PackName; 2] {
        let first = write_image(store, lock, &[("a", bytes)]);
        store.set_aside(lock, first.id, "torn").unwrap();
        let second = write_image(store, lock, &[("a", bytes)]);
        [first.packs[0].name, second.packs[0].name]
    }

    #[test]
    fn a_whole_store_is_left_alone() {
        let (_folder, store, _) = small_store();
        let lock = store.lock().unwrap();
        let before = (packs(&store), image_files(&store));
        let plan = plan(&store, &lock);
        assert!(plan.outcome().is_nothing());
        let repaired = plan.apply().unwrap();
        assert_eq!(fates(&repaired), [Fate::Whole, Fate::Whole]);
        assert_eq!((packs(&store), image_files(&store)), before);
    }

    #[test]
    fn a_chunk_that_is_whole_elsewhere_heals_the_image() {
        for damaged in [0, 1] {
            let (_folder, store) = temporary_store();
            let lock = store.lock().unwrap();
            let bytes = noise(1, BYTES);
            let pack = twice(&store, &lock, &bytes)[damaged];
            flip(&store, pack, 1000);
            let repaired = plan(&store, &lock).apply().unwrap();
            let mut expected = [Fate::Whole; 2];
            expected[damaged] = Fate::Healed { chunks: 1 };
            assert_eq!(fates(&repaired), expected);
            assert_eq!(repaired.removed_packs, [pack], "nobody needs it");
            for image in [id(1), id(2)] {
                assert!(read_stream(&store, image, "a") == bytes);
            }
            let meta = &store.images().unwrap()[damaged].meta;
            assert_eq!(meta, b"meta", "all else is kept");
        }
    }

    #[test]
    fn an_image_that_lacks_a_byte_is_dropped_and_the_others_stay() {
        let (_folder, store) = temporary_store();
        let lock = store.lock().unwrap();
        let (old, new) = (noise(1, BYTES), noise(2, BYTES));
        let first = write_image(&store, &lock, &[("a", &old)]);
        let second = write_image(&store, &lock, &[("a", &old), ("b", &new)]);
        store.set_aside(&lock, second.id, "torn").unwrap();
        let own = second.packs.iter().map(|pack| pack.name);
        let own: Vec<PackName> = own.filter(|name| name.image == second.id).collect();
        flip(&store, own[0], 1000);
        let repaired = plan(&store, &lock).apply().unwrap();
        assert_eq!(fates(&repaired), [Fate::Whole, Fate::Dropped]);
        assert_eq!((&repaired.removed_packs, packs(&store).len()), (&own, 1));
        assert!(repaired.freed_bytes > BYTES as u64);
        assert_eq!(image_files(&store), ["000001.manifest"], "nor its mark");
        assert!(read_stream(&store, first.id, "a") == old);
    }

    #[test]
    fn a_manifest_that_cannot_be_read_goes_with_its_packs() {
        let (_folder, store, contents) = small_store();
        let lock = store.lock().unwrap();
        fs::write(store.manifest_file(id(2)), "nonsense").unwrap();
        let repaired = plan(&store, &lock).apply().unwrap();
        assert_eq!(fates(&repaired), [Fate::Whole, Fate::Dropped]);
        assert!(!repaired.removed_packs.is_empty());
        assert!(
            repaired
                .removed_packs
                .iter()
                .all(|pack| pack.image == id(2))
        );
        assert!(reads_back(&store, id(1), &contents[&id(1)]));
    }

    #[test]
    fn an_image_of_a_newer_version_and_all_packs_stay() {
        let (_folder, store, _) = small_store();
        let lock = store.lock().unwrap();
        let path = store.manifest_file(id(2));
        let mut bytes = fs::read(&path).unwrap();
        bytes[12] = 9;
        fs::write(&path, &bytes).unwrap();
        fs::write(store.manifest_file(id(1)), "nonsense").unwrap();
        let before = packs(&store);
        let repaired = plan(&store, &lock).apply().unwrap();
        assert_eq!(fates(&repaired), [Fate::Dropped, Fate::Left]);
        assert_eq!(repaired.unknown, [id(2)]);
        assert_eq!((packs(&store), fs::read(&path).unwrap()), (before, bytes));
    }

    #[test]
    fn nothing_is_dropped_for_what_cannot_be_read_for_now() {
        let (_folder, store) = temporary_store();
        let lock = store.lock().unwrap();
        let [first, second] = twice(&store, &lock, &noise(1, BYTES));
        flip(&store, first, 1000);
        let pack = store.pack_file(second);
        let spare = store.path().join("spare");
        fs::rename(&pack, &spare).unwrap();
        std::os::unix::fs::symlink(&pack, &pack).unwrap();
        let repaired = plan(&store, &lock).apply().unwrap();
        assert_eq!(fates(&repaired), [Fate::Left, Fate::Left]);
        fs::rename(&spare, &pack).unwrap();
        let repaired = plan(&store, &lock).apply().unwrap();
        assert_eq!(fates(&repaired), [Fate::Healed { chunks: 1 }, Fate::Whole]);
    }

    #[test]
    fn packs_whose_chunks_are_whole_serve_on() {
        let harms: [fn(&mut Vec<u8>); 3] = [
            |bytes| bytes.push(0),
            |bytes| bytes[0] ^= 1,
            |bytes| {
                bytes[20] ^= 1;
                bytes.extend(b"more");
            },
        ];
        for harm in harms {
            let (_folder, store, contents) = small_store();
            let lock = store.lock().unwrap();
            for path in files_of(&store) {
                if path.starts_with(store.packs_folder()) {
                    let mut bytes = fs::read(&path).unwrap();
                    harm(&mut bytes);
                    fs::write(&path, bytes).unwrap();
                }
            }
            assert!(!reads_back(&store, id(1), &contents[&id(1)]));
            let repaired = plan(&store, &lock).apply().unwrap();
            assert_eq!(fates(&repaired), [Fate::Healed { chunks: 0 }; 2]);
            for (image, streams) in &contents {
                assert!(reads_back(&store, *image, streams));
            }
            let next = write_image(&store, &lock, &[("pages", &contents[&id(1)][0].1)]);
            assert_eq!(next.stored_bytes, 0, "new images rely on it again");
        }
    }

    #[test]
    fn an_image_of_format_1_is_healed_into_one_of_today() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("store");
        fixtures::copy(&fixtures::folder(1), &path);
        let store = Store::open(&path).unwrap();
        let lock = store.lock().unwrap();
        let before = read_stream(&store, id(2), "pages-1.img");
        for pack in packs(&store) {
            let path = store.packs_folder().join(pack);
            let bytes = fs::read(&path).unwrap();
            fs::write(&path, [&bytes[..], b"x"].concat()).unwrap();
        }
        let repaired = plan(&store, &lock).apply().unwrap();
        assert_eq!(fates(&repaired), [Fate::Healed { chunks: 0 }; 3]);
        assert_eq!(Store::open(&path).unwrap().format(), FORMAT);
        assert!(store.verify_all(Selection::All, &never).unwrap().is_whole());
        let next = write_image(&store, &lock, &[("pages-1.img", &before)]);
        store.verify(next.id, &never).unwrap();
    }

    #[test]
    fn a_plan_changes_nothing_and_keeps_others_from_it() {
        let (_folder, store, _) = small_store();
        let lock = store.lock().unwrap();
        fs::write(store.manifest_file(id(2)), "nonsense").unwrap();
        let before = (packs(&store), image_files(&store));
        let plan = plan(&store, &lock);
        assert_eq!(fates(plan.outcome()), [Fate::Whole, Fate::Dropped]);
        assert!(matches!(store.begin(&lock, OPTIONS), Err(WriteError::Busy)));
        drop(plan);
        assert_eq!((packs(&store), image_files(&store)), before);
        let writer = store.begin(&lock, OPTIONS).unwrap();
        let busy = store.plan_repair(&lock, Marks::Keep, &never);
        assert!(matches!(busy, Err(WriteError::Busy)));
        drop(writer);
    }

    #[test]
    fn marks_stay_unless_they_are_to_be_cleared() {
        let (_folder, store, _) = small_store();
        let lock = store.lock().unwrap();
        store.set_aside(&lock, id(1), "criu failed").unwrap();
        let kept = plan(&store, &lock).apply().unwrap();
        assert!(kept.is_nothing() && store.damage_mark(id(1)).is_some());
        let plan = store.plan_repair(&lock, Marks::Clear, &never).unwrap();
        let cleared = plan.apply().unwrap();
        let unmarked: Vec<bool> = cleared.images.iter().map(|image| image.unmarked).collect();
        assert_eq!(unmarked, [true, false]);
        assert_eq!(store.damage_mark(id(1)), None);
    }
}
