//! Images from which the run can continue.

use super::state_machine::Machine;
use crate::store::{ImageEntry, ImageId};
use crate::supervisor::notice::Notice;
use crate::supervisor::policy::restart::Images;

impl Machine {
    /// Returns the images as `available` does; `None` if the store cannot be read, which ends the run.
    pub(super) fn available_or_fail(&mut self) -> Option<Vec<ImageId>> {
        if let Some(error) = self.now.images.take_error() {
            self.fail(error.into());
            return None;
        }
        Some(self.available())
    }

    /// Returns the images as `available_or_fail` does, and reports newer ones that cannot be read.
    pub(super) fn listed_images(&mut self) -> Option<Vec<ImageId>> {
        let available = self.available_or_fail()?;
        let instead = available.last().copied();
        let images = self.now.images.list_or_none();
        let unreadable = images
            .iter()
            .filter(|image| Some(image.id) > instead && self.state.may_go_on_from(image))
            .map(|image| Notice::Unreadable {
                image: image.id,
                instead,
                reason: image.damaged.clone().unwrap_or_default(),
            });
        for notice in unreadable.collect::<Vec<_>>() {
            self.notify(notice);
        }
        Some(available)
    }

    fn is_available(&self, image: &ImageEntry) -> bool {
        image.damaged.is_none()
            && self.state.goes_on_from(image)
            && !self.attempts.refused.contains(&image.id)
    }

    /// Returns the run's images that are good and were not refused, oldest first; none if the store cannot be read, which
    /// is no reason to end a job that computes.
    pub(super) fn available(&mut self) -> Vec<ImageId> {
        let images = self.now.images.list_or_none().iter();
        let ours = images.filter(|image| self.is_available(image));
        let ours: Vec<ImageId> = ours.map(|image| image.id).collect();
        if self.now.images.list().is_ok() {
            self.last_available.clone_from(&ours);
        }
        ours
    }

    pub(super) fn any_images(&self) -> bool {
        let mut images = self.now.images.list_or_none().iter();
        images.any(|image| self.state.may_have(image))
    }

    pub(super) fn newest(&mut self) -> Option<ImageId> {
        self.available().pop()
    }

    /// Returns the number of images to restore after a crash, for a decision. Returns one if the store cannot be read: an
    /// answer of "none" would give the run up.
    pub(super) fn images_to_restore(&mut self) -> Images {
        if self.now.images.list().is_err() {
            return Images { all: 1, older: 1 };
        }
        self.available();
        self.last_images_to_restore()
    }

    /// Returns the number of images to restore as of the last event that read the store.
    pub(super) fn last_images_to_restore(&self) -> Images {
        let attempts = &self.attempts;
        let tried = [attempts.restored_from, attempts.oldest_refused];
        let is_older = |id: &&ImageId| tried.iter().flatten().all(|tried| *id < tried);
        Images {
            all: self.last_available.len(),
            older: self.last_available.iter().filter(is_older).count(),
        }
    }
}
