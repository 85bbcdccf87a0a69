//! Repair of a store: images that can be healed are healed, lost images are removed, all others stay.
//!
//! ```text
//! verify all ─▶ plan ─▶ headers of packs ─▶ healed manifests ─▶ lost manifests removed
//!                                                             ─▶ marks ─▶ unneeded packs
//! ```
//! A chunk that is bad in one place may be whole in another place with the same hash. Then the manifest is rewritten
//! and refers to that place. A pack that was cut or has grown stays in use with its present length, and a damaged pack
//! header is rewritten, if the chunks in the pack are whole. An image with a single missing byte is removed: it can
//! never be restored.
//!
//! Each step is durable before the next one begins, and packs are removed last. After an interruption at any point, all
//! data that was whole is whole, and a second repair finishes the work. Nothing is removed because a file cannot be
//! read at present or was written by a newer version, and no pinned image is removed.
//!
//! An image that was set aside stays so, even if it is whole: its bytes do not show why it could not be restored. Only
//! [`Marks::Clear`] makes it available for restores again.

use std::collections::HashSet;

use super::garbage::space;
use super::relocate::{Relocation, Relocator};
use super::scan::rewrite_header;
use super::verification::Selection;
use super::verify_report::{ImageReport, Verdict, is_manifest_lost};
use crate::store::error::{ReadError, WriteError};
use crate::store::format::file_names::{self, FileKind};
use crate::store::format::image_id::ImageId;
use crate::store::format::manifest::Manifest;
use crate::store::format::pack::{Pack, PackName};
use crate::store::format::store_folder::Store;
use crate::store::fs::durable;
use crate::store::fs::lock::{Busy, StoreLock};

/// Treatment of images that were set aside but are whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Marks {
    /// They stay set aside.
    Keep,
    /// They become available for restores again.
    Clear,
}

/// The changes that a repair makes or has made.
#[derive(Debug, Default)]
pub struct Repaired {
    /// Every image, oldest first.
    pub images: Vec<RepairedImage>,
    /// Packs whose header is rewritten.
    pub mended_packs: Vec<PackName>,
    /// Packs that no image needs and that are removed.
    pub removed_packs: Vec<PackName>,
    /// Disk space of the removed packs.
    pub freed_bytes: u64,
    /// Images that stay although their packs are unknown, because their manifests cannot be read. If there are any, no
    /// pack is removed.
    pub unknown: Vec<ImageId>,
}

/// The treatment of an image by a repair.
#[derive(Debug)]
pub struct RepairedImage {
    /// The faults found before the repair.
    pub report: ImageReport,
    /// The treatment.
    pub remedy: Remedy,
    /// True if the mark that sets the image aside is removed and the image stays.
    pub unmarked: bool,
}

/// The treatment of an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Remedy {
    /// The image was whole and stays as it is.
    Whole,
    /// The image is whole again.
    Healed {
        /// Chunks that the manifest now refers to in another place.
        chunks: usize,
    },
    /// The image cannot be restored and is removed.
    Dropped,
    /// The image is not whole, but may not be lost: it stays as it is.
    Left,
    /// The image cannot be restored, but it is pinned: it stays until it is unpinned.
    Spared,
}

impl Repaired {
    /// Returns true if there is nothing to do.
    #[must_use]
    pub fn is_nothing(&self) -> bool {
        let untouched = |image: &RepairedImage| {
            let stays = match image.remedy {
                Remedy::Whole | Remedy::Left | Remedy::Spared => true,
                Remedy::Healed { .. } | Remedy::Dropped => false,
            };
            stays && !image.unmarked
        };
        self.images.iter().all(untouched)
            && self.mended_packs.is_empty()
            && self.removed_packs.is_empty()
    }
}

/// A completed plan for a repair. Nothing is changed before [`RepairPlan::apply`], and no other writer changes the
/// store as long as the plan exists.
#[derive(Debug)]
pub struct RepairPlan {
    store: Store,
    outcome: Repaired,
    /// The files of healed manifests.
    manifests: Vec<(ImageId, Vec<u8>)>,
    /// Packs whose header is rewritten, each with the offset of its first whole chunk.
    mended: Vec<(PackName, u64)>,
    _busy: Busy,
}

impl Store {
    /// Verifies the whole store and plans its repair. `progress` is used as in [`Store::verify_all`].
    ///
    /// # Errors
    /// [`WriteError::Busy`] while an image is written, or the store cannot be read at present.
    ///
    /// # Panics
    /// If the lock belongs to another store.
    pub fn plan_repair(
        &self,
        lock: &StoreLock,
        marks: Marks,
        progress: &(dyn Fn(u64, u64) + Sync),
    ) -> Result<RepairPlan, WriteError> {
        let busy = lock.claim(self.path()).ok_or(WriteError::Busy)?;
        let (report, scan) = self.survey(Selection::All, progress)?;
        let healer = Relocator::new(self, &scan, &report.images);
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
            let stays = match decided.remedy {
                Remedy::Whole => true,
                Remedy::Healed { .. } => {
                    healed.extend(names);
                    true
                }
                Remedy::Dropped | Remedy::Left | Remedy::Spared => false,
            };
            let unmarked = image.set_aside.is_some() && stays && marks == Marks::Clear;
            plan.outcome.images.push(RepairedImage {
                report: image,
                remedy: decided.remedy,
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
    /// Returns the changes that [`RepairPlan::apply`] will make.
    #[must_use]
    pub fn outcome(&self) -> &Repaired {
        &self.outcome
    }

    /// Repairs the store. Returns the changes made; they differ from the planned ones only for images that were pinned
    /// meanwhile.
    ///
    /// # Errors
    /// A file cannot be written or removed. The changes made until then stay, and another repair makes the rest.
    pub fn apply(mut self) -> Result<Repaired, WriteError> {
        let store = &self.store;
        for (name, first) in &self.mended {
            rewrite_header(store, *name, *first).map_err(|source| WriteError::Pack {
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
            durable::remove(&self.store.pack_file(*name))?;
        }
        durable::sync_folder(&self.store.packs_folder())?;
        tracing::debug!(
            images = self.outcome.images.len(),
            healed = self.manifests.len(),
            packs_removed = self.outcome.removed_packs.len(),
            "store repaired"
        );
        Ok(self.outcome)
    }

    /// Removes lost images, then marks: a dropped image must never exist without its mark.
    fn remove_images(&mut self) -> Result<(), WriteError> {
        let store = &self.store;
        for image in &mut self.outcome.images {
            let id = image.report.id;
            if image.remedy == Remedy::Dropped && !store.remove_manifest(id)? {
                image.remedy = Remedy::Spared;
                self.outcome.unknown.push(id);
                self.outcome.removed_packs.clear();
                self.outcome.freed_bytes = 0;
            }
        }
        durable::sync_folder(&store.images_folder())?;
        let unmarked = |image: &&RepairedImage| image.unmarked || image.remedy == Remedy::Dropped;
        for image in self.outcome.images.iter().filter(unmarked) {
            durable::remove(&store.damaged_file(image.report.id))?;
        }
        durable::sync_folder(&store.images_folder())?;
        Ok(())
    }

    fn decide(
        &mut self,
        healer: &Relocator<'_>,
        image: &ImageReport,
    ) -> Result<Decided, WriteError> {
        let id = image.id;
        let lost = if self.store.pin_note(id).is_some() {
            Remedy::Spared
        } else {
            Remedy::Dropped
        };
        if let Some(error) = &image.manifest {
            let remedy = if is_manifest_lost(error) {
                lost
            } else {
                Remedy::Left
            };
            if remedy != Remedy::Dropped {
                self.outcome.unknown.push(id);
            }
            return Ok(Decided::without_packs(remedy));
        }
        let manifest = self.store.manifest(id)?;
        let healing = match image.verdict() {
            Verdict::Whole => return Ok(Decided::as_is(Remedy::Whole, manifest)),
            Verdict::Unknown => return Ok(Decided::as_is(Remedy::Left, manifest)),
            Verdict::Damaged => healer.heal(&manifest)?,
        };
        match healing {
            Relocation::Lost if lost == Remedy::Dropped => Ok(Decided::without_packs(lost)),
            Relocation::Lost => Ok(Decided::as_is(lost, manifest)),
            Relocation::Uncertain => Ok(Decided::as_is(Remedy::Left, manifest)),
            Relocation::Healed { manifest, chunks } => {
                self.manifests.push((id, self.store.encode(&manifest)?));
                Ok(Decided::as_is(Remedy::Healed { chunks }, manifest))
            }
        }
    }

    fn find_garbage(&mut self, needed: &HashSet<PackName>) -> Result<(), ReadError> {
        if !self.outcome.unknown.is_empty() {
            return Ok(());
        }
        for (path, kind) in file_names::list(&self.store.packs_folder())? {
            if let FileKind::Pack(name) = kind
                && !needed.contains(&name)
            {
                self.outcome.removed_packs.push(name);
                self.outcome.freed_bytes += space(&path);
            }
        }
        self.outcome.removed_packs.sort_unstable();
        Ok(())
    }
}

/// The treatment of an image, and the packs that it needs afterwards.
struct Decided {
    remedy: Remedy,
    packs: Vec<Pack>,
}

impl Decided {
    fn as_is(remedy: Remedy, manifest: Manifest) -> Self {
        let packs = manifest.packs;
        Self { remedy, packs }
    }

    fn without_packs(remedy: Remedy) -> Self {
        let packs = Vec::new();
        Self { remedy, packs }
    }
}

#[cfg(test)]
mod tests;
