//! Changes of the job's files since an image, according to the record.

use std::path::Path;

use super::super::describe::FileId;
use super::{Record, Touch};

/// Changes since an image, as far as known.
#[derive(Clone, Copy, Debug)]
pub struct Since<'a> {
    pub(super) record: &'a Record,
    /// Time of the image; `None` if the record does not contain it.
    pub(super) image: Option<usize>,
}

impl Record {
    /// Returns the files that the job has changed since a time, for which the path on record is not enough.
    pub(in crate::files) fn changed_files_since(
        &self,
        time: usize,
    ) -> impl Iterator<Item = FileId> {
        let files = self.changed_files.iter();
        let later = files.filter(move |(_, when)| **when >= time);
        later.map(|(id, _)| *id)
    }
}

impl Since<'_> {
    /// Returns true if the job was stopped at the image and has not run since: all changes since are by other programs.
    #[must_use]
    pub fn is_stopped(&self) -> bool {
        self.image.is_some() && self.image == self.record.stopped
    }

    /// Returns the time when the job was stopped, in nanoseconds since 1970; 0 if that is not known.
    pub fn stopped_ns(&self) -> i64 {
        self.record.stopped_ns
    }

    /// Returns the time from which the record has changes by the job. What it has after a stop is what its end caused.
    fn jobs_time(&self) -> Option<usize> {
        self.image.filter(|_| !self.is_stopped())
    }

    /// Returns the reason why changes at any time may be missing; `None` if all changes of watched file systems are
    /// known.
    #[must_use]
    pub fn gap(&self) -> Option<String> {
        let Some(image) = self.image else {
            return Some("no watcher was running when the image was made".to_owned());
        };
        self.record.gap_since(image)
    }

    /// Returns true if a change at this time may be missing because the watcher ended together with the job.
    #[must_use]
    pub fn may_miss(&self, changed_ns: i64) -> bool {
        self.cuts_at(changed_ns).next().is_some()
    }

    /// Returns true if a change at this time may be missing, and counts as the job's.
    #[must_use]
    pub fn may_miss_of_job(&self, changed_ns: i64) -> bool {
        self.cuts_at(changed_ns).any(|is_jobs| is_jobs)
    }

    fn cuts_at(&self, at_ns: i64) -> impl Iterator<Item = bool> {
        let image = self.image;
        let cuts = self.record.cuts.iter();
        let later = cuts.filter(move |(when, ..)| image.is_none_or(|image| *when >= image));
        let here = later.filter(move |(_, (from, until), _)| (*from..=*until).contains(&at_ns));
        here.map(|(.., is_jobs)| *is_jobs)
    }

    /// Returns true if a rollback since has changed the path, or may have.
    #[must_use]
    pub fn is_rolled_back(&self, path: &Path) -> bool {
        self.record.rolled_back.contains(path)
    }

    /// Returns true if there is a time at which changes may be missing.
    #[must_use]
    pub fn has_cuts(&self) -> bool {
        let mut cuts = self.record.cuts.iter();
        cuts.any(|(when, ..)| self.image.is_none_or(|image| *when >= image))
    }

    /// Returns the mount point of a file system that cannot be watched, if the path is on one.
    #[must_use]
    pub fn unwatched_mount(&self, path: &Path) -> Option<&Path> {
        self.record.unwatched_mount(path)
    }

    /// Returns the paths that the job has touched since, with their changes.
    pub fn touched(&self) -> impl Iterator<Item = (&Path, Touch)> {
        let image = self.jobs_time();
        let later = move |touch: &Touch| image.is_some_and(|image| touch.last >= image);
        self.record.touched().filter(move |(_, touch)| later(touch))
    }

    /// Returns the paths that the job has ever touched on this machine, with their changes.
    pub fn ever_touched(&self) -> impl Iterator<Item = (&Path, Touch)> {
        self.record.touched()
    }

    /// Returns true if the job has touched the path since.
    #[must_use]
    pub fn by_job(&self, path: &Path) -> bool {
        let touch = self.record.touched.get(path);
        touch
            .zip(self.jobs_time())
            .is_some_and(|(touch, image)| touch.last >= image)
    }

    /// Returns the files that the job has changed since, for which the path on record is not enough.
    pub(in crate::files) fn changed_files(&self) -> impl Iterator<Item = FileId> {
        let image = self.jobs_time().into_iter();
        image.flat_map(|image| self.record.changed_files_since(image))
    }

    /// Returns true if another program has touched the path since.
    #[must_use]
    pub fn by_others(&self, path: &Path) -> bool {
        let when = self.record.others.get(path);
        when.zip(self.image)
            .is_some_and(|(when, image)| *when >= image)
    }

    /// Returns true if another program has created the path since, so that it did not exist at the image.
    #[must_use]
    pub fn is_of_others(&self, path: &Path) -> bool {
        let when = self.record.created_by_others.get(path);
        when.zip(self.image)
            .is_some_and(|(when, image)| *when >= image)
    }

    /// Returns true if the job has changed content or attributes by this path since.
    #[must_use]
    pub fn has_changed(&self, touch: &Touch) -> bool {
        let when = touch.changed.zip(self.jobs_time());
        when.is_some_and(|(when, image)| when >= image)
    }

    /// Returns true if the job had not touched the path before the image.
    #[must_use]
    pub fn is_first(&self, touch: &Touch) -> bool {
        self.image.is_none_or(|image| touch.first >= image)
    }

    /// Returns true if the path existed at the image and the job had not touched it by then.
    #[must_use]
    pub fn was_not_jobs(&self, touch: &Touch) -> bool {
        !touch.is_jobs_own && self.is_first(touch)
    }
}
