//! Images from which the run can continue.

use super::state_machine::Machine;
use crate::store::{ImageEntry, ImageId};
use crate::supervisor::error::RunError;
use crate::supervisor::notice::Notice;
use crate::supervisor::policy::restart::Images;

impl Machine {
    /// Returns the run's images that are good and were not refused, oldest first.
    pub(super) fn available(&mut self) -> Result<Vec<ImageId>, RunError> {
        if self.now.images.is_err() {
            std::mem::replace(&mut self.now.images, Ok(Vec::new()))?;
        }
        Ok(self.available_or_none())
    }

    /// Returns the images as `available` does, and reports newer ones that cannot be read; `None` if the run ends.
    pub(super) fn listed_images(&mut self) -> Option<Vec<ImageId>> {
        let available = match self.available() {
            Ok(available) => available,
            Err(error) => {
                self.fail(error);
                return None;
            }
        };
        let instead = available.last().copied();
        let images = self.now.images.as_deref().unwrap_or_default();
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

    /// Returns the images as `available` does; none if the store cannot be read, which is no reason to end a job that
    /// computes.
    pub(super) fn available_or_none(&self) -> Vec<ImageId> {
        let images = self.now.images.iter().flatten();
        let ours = images.filter(|image| self.is_available(image));
        ours.map(|image| image.id).collect()
    }

    /// Returns true if the run has any image, good or not.
    pub(super) fn any_images(&self) -> bool {
        let mut images = self.now.images.iter().flatten();
        images.any(|image| self.state.may_have(image))
    }

    /// Returns the newest image from which the run can continue.
    pub(super) fn newest(&self) -> Option<ImageId> {
        self.available_or_none().pop()
    }

    /// Returns the number of images from which the run can continue, for a decision. Returns one if the store cannot be
    /// read: an answer of "none" would give the run up.
    pub(super) fn images_at_least(&self) -> usize {
        self.now
            .images
            .as_ref()
            .map_or(1, |_| self.available_or_none().len())
    }

    /// Returns the number of images to restore after a crash, for a decision; see `images_at_least`.
    pub(crate) fn images_to_restore(&self) -> Images {
        if self.now.images.is_err() {
            return Images { all: 1, older: 1 };
        }
        let images = self.available_or_none();
        let restored_from = self.attempts.restored_from;
        let is_older = |id: &&ImageId| restored_from.is_none_or(|from| **id < from);
        Images {
            all: images.len(),
            older: images.iter().filter(is_older).count(),
        }
    }
}
