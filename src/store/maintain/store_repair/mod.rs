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
//! the word of a file that cannot be read for now, or that a newer version wrote, and no
//! pinned image is.
//!
//! An image that was set aside stays so, even if it is whole: its bytes say nothing of
//! why it could not be restored. Only [`Marks::Clear`] makes it one to restore again.

use std::collections::HashSet;

use super::garbage::space;
use super::relocate::{Relocation, Relocator};
use super::scan::mend_header;
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
    /// They are images to restore again.
    Clear,
}

/// Plan or result of a repair.
#[derive(Debug, Default)]
pub struct Repaired {
    /// Every image, oldest first.
    pub images: Vec<RepairedImage>,
    /// Packs whose header is written again.
    pub mended_packs: Vec<PackName>,
    /// Packs that no image needs and that are removed.
    pub removed_packs: Vec<PackName>,
    /// Disk space of the packs that are removed.
    pub freed_bytes: u64,
    /// Images that stay and whose packs are not known, because their manifests cannot be
    /// read. If there are any, no pack is removed.
    pub unknown: Vec<ImageId>,
}

/// Repair of one image.
#[derive(Debug)]
pub struct RepairedImage {
    /// Its defects before.
    pub report: ImageReport,
    /// Its remedy.
    pub remedy: Remedy,
    /// True if the mark that sets it aside is removed and the image stays.
    pub unmarked: bool,
}

/// Remedy for an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Remedy {
    /// The image was whole and stays as it is.
    Whole,
    /// The image is whole again.
    Healed {
        /// Number of chunks that the image now takes from another place.
        chunks: usize,
    },
    /// The image cannot be restored and is removed.
    Dropped,
    /// The image is not whole, but it is unknown whether it is lost: it stays as it is.
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
    /// Returns the expected result of [`RepairPlan::apply`].
    #[must_use]
    pub fn outcome(&self) -> &Repaired {
        &self.outcome
    }

    /// Repairs the store; returns what was done, which is what was planned, but for images
    /// that were pinned meanwhile.
    ///
    /// # Errors
    /// A file cannot be written or removed. What was done until then lasts, and another
    /// repair does the rest.
    pub fn apply(mut self) -> Result<Repaired, WriteError> {
        let store = &self.store;
        for (name, first) in &self.mended {
            mend_header(store, *name, *first).map_err(|source| WriteError::Pack {
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

    /// Removes lost images, then marks: an image without its mark must not be one that was
    /// dropped.
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

/// Decision about an image, and the packs that it needs then.
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
