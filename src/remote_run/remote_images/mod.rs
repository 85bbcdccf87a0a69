//! The images of a run in a remote store, for verbs: they hold no lease, and work beside the supervisor that does.
//!
//! ```text
//! pin, unpin, forget   the newest entry with other images ─▶ appended; repeated if another entry came first
//! prune                a free lease ─▶ an entry with the next series ─▶ objects of earlier series are removed
//! ```
//! An entry of `pin` or `forget` repeats the lease of the one before: the holder, whose next entry finds its number
//! taken, reads the newest one and makes its change to that. Forgotten images leave the list only. Their objects are
//! removed by the holder, which alone knows the objects that its present upload relies on, or by `prune` while nobody
//! uploads. Whoever uploads after `prune` relies on the images of its entry and on objects of its series or later ones.

use std::time::Duration;

use crate::remote_run::lease_wait::{LeaseWait, Patience};
use crate::remote_run::remote_retention::{candidates, plan_by_rules};
use crate::remote_run::shared_state::{Holder, State};
use crate::remote_run::state_log::{Entry, StateLog};
use crate::store::remote::bucket::Bucket;
use crate::store::remote::unneeded_objects::Garbage;
use crate::store::remote::{download, image_object, image_verification};
use crate::store::{
    ImageEntry, ImageId, Key, Manifest, Planned, Policy, RemoteError, RemoteImage, Report, Secrets,
    Selection, Store, StoreLock, checked_note, plan_named,
};

/// Time for one request with all its attempts: a part of 4 MiB within it needs 70 KiB/s.
const REQUEST_LIMIT: Duration = Duration::from_secs(60);
/// Attempts to change the state. A holder appends an entry at most every few seconds, so only dozens of verbs at once
/// could exceed it.
const EDITS_MAX: usize = 100;

/// Images of a run.
pub(crate) struct RemoteImages {
    bucket: Bucket,
    log: StateLog,
    secrets: Option<Secrets>,
}

/// Selection of images to forget.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Removal<'a> {
    Named(&'a [ImageId]),
    /// The images that these rules do not keep.
    Rules(&'a Policy),
}

/// Result of a removal of objects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Pruned {
    pub manifests: usize,
    pub packs: usize,
    pub bytes: u64,
}

impl From<&Garbage> for Pruned {
    fn from(garbage: &Garbage) -> Self {
        Self {
            manifests: garbage.manifests(),
            packs: garbage.packs(),
            bytes: garbage.bytes(),
        }
    }
}

impl RemoteImages {
    /// Opens the images at an address; makes no request and creates nothing.
    pub(crate) fn open(url: &str, key: Option<&Key>) -> Result<Self, RemoteError> {
        let bucket = Bucket::open_existing(url, REQUEST_LIMIT)?;
        Ok(Self {
            log: StateLog::new(bucket.clone()),
            bucket,
            secrets: key.map(Secrets::new),
        })
    }

    pub(crate) fn url(&self) -> &str {
        self.bucket.url()
    }

    /// Returns the images, oldest first. One whose manifest is damaged is listed with the reason.
    pub(crate) fn images(&self) -> Result<Vec<ImageEntry>, RemoteError> {
        let listed = self.listed()?.into_iter();
        Ok(listed.map(|(image, _)| image).collect())
    }

    /// Returns the images like [`images`](Self::images), each with true if the run has left it for an older one.
    pub(crate) fn listed(&self) -> Result<Vec<(ImageEntry, bool)>, RemoteError> {
        let images = self.state()?.images;
        let entry = |image: &RemoteImage| Ok((self.entry(image)?, image.abandoned));
        images.iter().map(entry).collect()
    }

    /// Returns the image from which the run continues.
    pub(crate) fn newest(&self) -> Result<Option<ImageId>, RemoteError> {
        Ok(self.state()?.newest().map(|image| image.id))
    }

    /// Returns an image's manifest.
    pub(crate) fn manifest(&self, id: ImageId) -> Result<Manifest, RemoteError> {
        let state = self.state()?;
        self.read(self.find(&state.images, id)?)
    }

    /// Reads and checks every chunk of the images; see [`image_verification::verify`].
    pub(crate) fn verify(
        &self,
        images: Selection<'_>,
        progress: &(dyn Fn(u64, u64) + Sync),
    ) -> Result<Report, RemoteError> {
        let state = self.state()?;
        let chosen: Vec<RemoteImage> = match images {
            Selection::All => state.images,
            Selection::These(ids) => ids
                .iter()
                .map(|id| self.find(&state.images, *id).cloned())
                .collect::<Result<_, _>>()?,
        };
        let secrets = self.secrets.as_ref();
        let mut report = image_verification::verify(&self.bucket, &chosen, secrets, progress)?;
        if !report.is_whole() {
            let left = self.state()?.images;
            let is_there = |id| left.iter().any(|image| image.id == id);
            let (there, gone) = report
                .images
                .into_iter()
                .partition(|image| is_there(image.id));
            report.images = there;
            report.gone = Vec::from_iter(gone).iter().map(|image| image.id).collect();
        }
        Ok(report)
    }

    /// Copies an image to a local store; see [`download::copy`].
    pub(crate) fn copy(
        &self,
        id: ImageId,
        store: &Store,
        lock: &StoreLock,
        progress: &(dyn Fn(u64, u64) + Sync),
    ) -> Result<Manifest, RemoteError> {
        let state = self.state()?;
        let image = self.find(&state.images, id)?;
        download::copy(&self.bucket, image, store, lock, progress)
    }

    /// Pins an image: retention and `forget` keep it.
    pub(crate) fn pin(&self, id: ImageId, note: &str) -> Result<(), RemoteError> {
        let note = checked_note(note)?;
        self.edit(|images| {
            self.find_mut(images, id)?.pinned = Some(note.clone());
            Ok(())
        })
    }

    /// Removes an image's pin. Returns true if it was pinned.
    pub(crate) fn unpin(&self, id: ImageId) -> Result<bool, RemoteError> {
        self.edit(|images| Ok(self.find_mut(images, id)?.pinned.take().is_some()))
    }

    /// Removes images from the list, and returns the decision about each one. The newest image of the run and pinned
    /// ones stay.
    pub(crate) fn forget(&self, removal: Removal<'_>) -> Result<Vec<Planned>, RemoteError> {
        self.edit(|images| {
            let planned = self.planned(images, removal)?;
            let mut fates = planned.iter().map(|planned| planned.fate);
            // The plan has the order of the images.
            images.retain(|_| fates.next().is_none_or(|fate| !fate.is_removed()));
            Ok(planned)
        })
    }

    /// Returns the decisions of [`forget`](Self::forget). Changes nothing.
    pub(crate) fn plan(&self, removal: Removal<'_>) -> Result<Vec<Planned>, RemoteError> {
        self.planned(&self.state()?.images, removal)
    }

    fn planned(
        &self,
        images: &[RemoteImage],
        removal: Removal<'_>,
    ) -> Result<Vec<Planned>, RemoteError> {
        match removal {
            Removal::Rules(policy) => Ok(plan_by_rules(images, policy)),
            Removal::Named(ids) => {
                plan_named(&candidates(images), ids).map_err(|source| RemoteError::Forget {
                    url: self.url().to_owned(),
                    source,
                })
            }
        }
    }

    /// Removes the objects that no image needs, while no supervisor holds the lease. If a lease was not released, waits
    /// until it has expired, after a call of `report` with its holder and the time.
    ///
    /// # Errors
    /// [`RemoteError::Held`] if the holder renews its lease. Nothing is removed then.
    pub(crate) fn prune(
        &self,
        mut report: impl FnMut(&Holder, Duration),
    ) -> Result<Pruned, RemoteError> {
        let mut wait = LeaseWait::new(&self.log, Patience::UntilRenewed { own: None }, &mut report);
        let mut known = Some(self.newest_entry(None)?);
        loop {
            let free = wait.until_free(known)?;
            let state = free.as_ref().map(|entry| entry.state.before_removal());
            let state = state.ok_or_else(|| self.no_run())?;
            if let Some(Entry { state, .. }) = self.log.append(free.as_ref(), state)? {
                let garbage = Garbage::find(&self.bucket, &state.images, state.series)?;
                garbage.remove(&self.bucket)?;
                return Ok(Pruned::from(&garbage));
            }
            known = Some(self.newest_entry(free.as_ref())?);
        }
    }

    /// Returns what [`prune`](Self::prune) would remove now, and the holder of a lease that is not released: objects of
    /// its present upload are among them.
    pub(crate) fn prunable(&self) -> Result<(Pruned, Option<Holder>), RemoteError> {
        let state = self.state()?;
        let garbage = Garbage::find(&self.bucket, &state.images, state.epoch + 1)?;
        let holder = (!state.released).then_some(state.holder);
        Ok((Pruned::from(&garbage), holder))
    }

    fn state(&self) -> Result<State, RemoteError> {
        Ok(self.newest_entry(None)?.state)
    }

    fn newest_entry(&self, after: Option<&Entry>) -> Result<Entry, RemoteError> {
        self.log.newest(after)?.ok_or_else(|| self.no_run())
    }

    fn no_run(&self) -> RemoteError {
        RemoteError::NoRun {
            url: self.url().to_owned(),
        }
    }

    /// Changes the list of images, and nothing else of the state. `change` is repeated with the newest list until no
    /// other entry comes first.
    fn edit<T>(
        &self,
        mut change: impl FnMut(&mut Vec<RemoteImage>) -> Result<T, RemoteError>,
    ) -> Result<T, RemoteError> {
        let mut entry = self.newest_entry(None)?;
        for _ in 0..EDITS_MAX {
            let mut images = entry.state.images.clone();
            let result = change(&mut images)?;
            let is_same = images == entry.state.images;
            if is_same
                || self
                    .log
                    .append(Some(&entry), entry.state.edited(images))?
                    .is_some()
            {
                return Ok(result);
            }
            entry = self.newest_entry(Some(&entry))?;
        }
        Err(RemoteError::Busy {
            url: self.url().to_owned(),
        })
    }

    fn find<'a>(
        &self,
        images: &'a [RemoteImage],
        id: ImageId,
    ) -> Result<&'a RemoteImage, RemoteError> {
        let found = images.iter().find(|image| image.id == id);
        found.ok_or_else(|| self.missing(id))
    }

    fn find_mut<'a>(
        &self,
        images: &'a mut [RemoteImage],
        id: ImageId,
    ) -> Result<&'a mut RemoteImage, RemoteError> {
        let found = images.iter_mut().find(|image| image.id == id);
        found.ok_or_else(|| self.missing(id))
    }

    fn missing(&self, image: ImageId) -> RemoteError {
        RemoteError::NoImage {
            url: self.url().to_owned(),
            image,
        }
    }

    fn read(&self, image: &RemoteImage) -> Result<Manifest, RemoteError> {
        image_object::read_manifest(&self.bucket, image, self.secrets.as_ref())
    }

    fn entry(&self, image: &RemoteImage) -> Result<ImageEntry, RemoteError> {
        let (manifest, damaged) = match self.read(image) {
            Ok(manifest) => (Some(manifest), None),
            Err(error @ RemoteError::Damaged { .. }) => (None, Some(error.to_string())),
            Err(error) => return Err(error),
        };
        let stored_bytes = manifest
            .as_ref()
            .map_or(0, |manifest| manifest.stored_bytes);
        Ok(ImageEntry {
            id: image.id,
            created_unix_ms: image.created_unix_ms,
            raw_bytes: image.raw_bytes,
            stored_bytes,
            meta: manifest.map_or_else(Vec::new, |manifest| manifest.meta),
            damaged,
            pinned: image.pinned.clone(),
        })
    }
}

#[cfg(test)]
mod tests;
