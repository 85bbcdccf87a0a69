//! Removal of images: first a plan, which can be shown, then its execution.
//!
//! The manifests of the images are removed first and durably, then the data that only they needed. Regardless of the
//! plan, a pinned image stays, and so do the newest good image and the newest good image that the run continues from:
//! newer images may belong to an abandoned attempt.

use std::collections::HashSet;

use jiff::Zoned;
use nix::fcntl::FlockArg;

use super::garbage::{Garbage, space};
use super::hole_punch::Scope;
use super::image_list::Found;
use super::pins::{Hold, hold};
use super::retention::{
    self, Candidate, Condition, Fate, KeptBy, Line, Pin, Planned, Policy, RemovedBy,
};
use super::sweep::Swept;
use super::verify_report::is_manifest_lost;
use crate::store::error::{ReadError, WriteError};
use crate::store::format::image_id::ImageId;
use crate::store::format::pack::PackName;
use crate::store::format::store_folder::Store;
use crate::store::fs::durable::{self, DurableError};
use crate::store::fs::lock::StoreLock;

/// Predicate that returns true if the run continues from an image, given its number and its meta data.
pub type GoesOn<'a> = &'a dyn Fn(ImageId, &[u8]) -> bool;

/// An error that prevented the removal of named images. Nothing was removed.
#[derive(Debug, thiserror::Error)]
pub enum ForgetError {
    /// The images cannot be read.
    #[error(transparent)]
    Read(#[from] ReadError),
    /// The images do not exist.
    #[error("there is no image {}", listed(images))]
    Missing {
        /// Their numbers.
        images: Vec<ImageId>,
    },
    /// The images are pinned.
    #[error("cannot forget pinned images: {}; unpin them first", listed(images))]
    Pinned {
        /// The images.
        images: Vec<ImageId>,
    },
    /// The run would have no image to continue from.
    #[error("cannot forget image {image}: it is the newest good image")]
    Newest {
        /// The image.
        image: ImageId,
    },
    /// The run could not continue without the image.
    #[error("cannot forget image {image}: it is the newest good image that the run continues from")]
    Current {
        /// The image.
        image: ImageId,
    },
}

/// Extent to which dead space inside the remaining packs is freed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effort {
    /// Dead space that a rotation has time for: the largest parts of packs that few images share.
    Quick,
    /// Every dead range that the removed images leave.
    Thorough,
}

/// The result of a removal.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Forgotten {
    /// The removed images, oldest first.
    pub images: Vec<ImageId>,
    /// Images that were to be removed but stay: they were pinned meanwhile, or no newer image is good.
    pub spared: Vec<ImageId>,
    /// The garbage removed with them.
    pub swept: Swept,
}

impl Store {
    /// Applies a policy to the images, oldest first. Changes nothing.
    ///
    /// # Errors
    /// The images cannot be listed.
    pub fn plan(
        &self,
        policy: &Policy,
        now: &Zoned,
        continues_from: GoesOn<'_>,
    ) -> Result<Vec<Planned>, ReadError> {
        Ok(retention::plan(
            &self.candidates(continues_from)?,
            policy,
            now,
        ))
    }

    /// Plans as [`Store::plan`] will once the run has one more good image. The present newest good images stay, because
    /// the new one may fail.
    ///
    /// # Errors
    /// The images cannot be listed.
    pub fn plan_ahead(
        &self,
        policy: &Policy,
        now: &Zoned,
        continues_from: GoesOn<'_>,
    ) -> Result<Vec<Planned>, ReadError> {
        let mut candidates = self.candidates(continues_from)?;
        let (newest, current) = (newest_good(&candidates), current(&candidates));
        let last = candidates.last().map(|image| image.id);
        let Some(next) = last.and_then(ImageId::next) else {
            return Ok(retention::plan(&candidates, policy, now));
        };
        candidates.push(Candidate {
            id: next,
            created_unix_ms: u64::try_from(now.timestamp().as_millisecond()).unwrap_or(0),
            condition: Condition::Good,
            pin: Pin::Loose,
            line: Line::Ours,
        });
        let mut planned = retention::plan(&candidates, policy, now);
        planned.pop();
        for planned in &mut planned {
            if Some(planned.id) == newest {
                planned.fate = Fate::Kept(KeptBy::Newest);
            } else if Some(planned.id) == current {
                planned.fate = Fate::Kept(KeptBy::Current);
            }
        }
        Ok(planned)
    }

    /// Plans to remove these images, regardless of the rules.
    ///
    /// # Errors
    /// See [`ForgetError`].
    pub fn plan_named(
        &self,
        ids: &[ImageId],
        continues_from: GoesOn<'_>,
    ) -> Result<Vec<Planned>, ForgetError> {
        plan_named(&self.candidates(continues_from)?, ids)
    }

    /// Removes the images that the plan removes, and the data that only they needed.
    ///
    /// # Errors
    /// [`WriteError::Busy`] while an image is written. After another error some images may be gone; the remaining ones
    /// are whole.
    ///
    /// # Panics
    /// If the lock belongs to another store.
    pub fn forget(
        &self,
        lock: &StoreLock,
        plan: &[Planned],
        effort: Effort,
        continues_from: GoesOn<'_>,
    ) -> Result<Forgotten, WriteError> {
        let _busy = lock.claim(self.path()).ok_or(WriteError::Busy)?;
        let going = plan.iter().filter(|planned| planned.fate.is_removed());
        let going: Vec<ImageId> = going.map(|planned| planned.id).collect();
        let mut forgotten = Forgotten::default();
        if going.is_empty() {
            return Ok(forgotten);
        }
        let found = self.summaries()?;
        let candidates = self.candidates_of(&found, continues_from);
        let needed = [newest_good(&candidates), current(&candidates)];
        let mut manifest_bytes = 0;
        for id in going {
            let bytes = space(&self.manifest_file(id));
            if !needed.contains(&Some(id)) && self.remove_manifest(id)? {
                manifest_bytes += bytes;
                forgotten.images.push(id);
            } else {
                forgotten.spared.push(id);
            }
        }
        let packs = packs_of(&found, &forgotten.images);
        let scope = match effort {
            Effort::Quick => Scope::Quick(packs),
            Effort::Thorough => Scope::These(packs),
        };
        forgotten.swept = Garbage::of_images(self, &scope)?.remove(self)?;
        forgotten.swept.bytes += manifest_bytes;
        Ok(forgotten)
    }

    /// Removes a manifest unless its image is pinned; returns true if the manifest is gone. See `pins`.
    pub(crate) fn remove_manifest(&self, id: ImageId) -> Result<bool, WriteError> {
        let path = self.manifest_file(id);
        match hold(&path, FlockArg::LockExclusiveNonblock) {
            Ok(Hold::Held(_held)) if self.pin_note(id).is_none() => {
                durable::remove(&path)?;
                Ok(true)
            }
            Ok(Hold::Held(_) | Hold::Busy) => Ok(false),
            Ok(Hold::Gone) => {
                self.pending.withdraw(id);
                Ok(true)
            }
            Err(source) => Err(DurableError::Remove { path, source }.into()),
        }
    }

    fn candidates(&self, continues_from: GoesOn<'_>) -> Result<Vec<Candidate>, ReadError> {
        Ok(self.candidates_of(&self.summaries()?, continues_from))
    }

    fn candidates_of(&self, found: &[Found], continues_from: GoesOn<'_>) -> Vec<Candidate> {
        let candidates = found
            .iter()
            .map(|found| self.candidate(found, continues_from));
        candidates.collect()
    }

    fn candidate(&self, found: &Found, continues_from: GoesOn<'_>) -> Candidate {
        let summary = found.summary.as_ref();
        let is_ours = summary.is_ok_and(|summary| continues_from(found.id, &summary.meta));
        Candidate {
            id: found.id,
            created_unix_ms: summary.map_or(0, |summary| summary.created_unix_ms),
            condition: self.condition(found),
            pin: match self.pin_note(found.id) {
                None => Pin::Loose,
                Some(_) => Pin::Pinned,
            },
            line: if is_ours { Line::Ours } else { Line::Other },
        }
    }

    /// Returns the condition of an image. An image is damaged only if that is certain: a shortage of descriptors or
    /// memory, or a different key, is no reason to remove it.
    fn condition(&self, found: &Found) -> Condition {
        match (self.read_damage_mark(found.id), &found.summary) {
            (Ok(Some(_)), _) => Condition::Damaged,
            (Ok(None), Ok(_)) => Condition::Good,
            (Ok(None), Err(error)) if is_manifest_lost(error) => Condition::Damaged,
            (Ok(None) | Err(_), _) => Condition::Unknown,
        }
    }
}

/// Plans to remove these images, regardless of the rules.
pub(crate) fn plan_named(
    candidates: &[Candidate],
    ids: &[ImageId],
) -> Result<Vec<Planned>, ForgetError> {
    let there: HashSet<ImageId> = candidates.iter().map(|image| image.id).collect();
    let named: HashSet<ImageId> = ids.iter().copied().collect();
    refuse(named.difference(&there), |images| ForgetError::Missing {
        images,
    })?;
    let pinned = candidates
        .iter()
        .filter(|image| image.pin == Pin::Pinned && named.contains(&image.id));
    refuse(pinned.map(|image| &image.id), |images| {
        ForgetError::Pinned { images }
    })?;
    if let Some(image) = newest_good(candidates).filter(|image| named.contains(image)) {
        return Err(ForgetError::Newest { image });
    }
    if let Some(image) = current(candidates).filter(|image| named.contains(image)) {
        return Err(ForgetError::Current { image });
    }
    let plan = candidates.iter().map(|image| Planned {
        id: image.id,
        fate: if named.contains(&image.id) {
            Fate::Removed(RemovedBy::Name)
        } else {
            Fate::Kept(KeptBy::Unnamed)
        },
    });
    Ok(plan.collect())
}

fn newest_good(images: &[Candidate]) -> Option<ImageId> {
    let mut newest_first = images.iter().rev();
    let good = newest_first.find(|image| image.condition == Condition::Good);
    good.map(|image| image.id)
}

/// Returns the newest good image that the run continues from.
fn current(images: &[Candidate]) -> Option<ImageId> {
    let mut newest_first = images.iter().rev();
    let good =
        newest_first.find(|image| image.condition == Condition::Good && image.line == Line::Ours);
    good.map(|image| image.id)
}

fn packs_of(found: &[Found], ids: &[ImageId]) -> HashSet<PackName> {
    let gone = found.iter().filter(|found| ids.contains(&found.id));
    let summaries = gone.filter_map(|found| found.summary.as_ref().ok());
    summaries
        .flat_map(|summary| summary.packs.iter().map(|pack| pack.name))
        .collect()
}

/// Returns an error about these images, if there are any.
fn refuse<'a>(
    images: impl Iterator<Item = &'a ImageId>,
    error: impl FnOnce(Vec<ImageId>) -> ForgetError,
) -> Result<(), ForgetError> {
    let mut images: Vec<ImageId> = images.copied().collect();
    images.sort_unstable();
    if images.is_empty() {
        Ok(())
    } else {
        Err(error(images))
    }
}

fn listed(images: &[ImageId]) -> String {
    let names: Vec<String> = images.iter().map(ToString::to_string).collect();
    names.join(", ")
}

#[cfg(test)]
mod tests;
