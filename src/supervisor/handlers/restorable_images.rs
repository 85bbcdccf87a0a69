//! The images from which the run can continue.

use crate::run::format::chain;
use crate::store::{ImageEntry, ImageId};
use crate::supervisor::error::RunError;
use crate::supervisor::event_loop::Supervisor;
use crate::supervisor::policy::restart::Images;

impl Supervisor {
    /// This run's images that are not set aside, oldest first.
    pub fn available(&self) -> Result<Vec<ImageId>, RunError> {
        Ok(self.available_of(&self.context.store.images()?))
    }

    /// Returns the images for a restore, as `available` does, and logs why newer ones cannot be read.
    pub fn to_restore(&self) -> Result<Vec<ImageId>, RunError> {
        let images = self.context.store.images()?;
        let available = self.available_of(&images);
        let newest = available.last().copied();
        let instead = newest.map_or("there is no older one", |_| "an older one is used");
        for image in &images {
            if Some(image.id) > newest && self.state.may_go_on_from(image) {
                let reason = image.damaged.as_deref().unwrap_or_default();
                tracing::warn!(image = %image.id, "the image cannot be read, {instead}: {reason}");
            }
        }
        Ok(available)
    }

    fn available_of(&self, images: &[ImageEntry]) -> Vec<ImageId> {
        let ours = images
            .iter()
            .filter(|image| image.damaged.is_none() && self.state.goes_on_from(image));
        ours.map(|image| image.id)
            .filter(|id| !self.refused.contains(id))
            .collect()
    }

    /// Returns true if the run has any image, good or not.
    pub fn any_images(&self) -> Result<bool, RunError> {
        let images = self.context.store.images()?;
        Ok(images.iter().any(|image| self.state.may_have(image)))
    }

    /// Returns the number of images from which the run can continue, for a decision. Returns one if the store cannot be
    /// read: an answer of "none" would give the run up.
    pub fn images_at_least(&self) -> usize {
        match self.available() {
            Ok(images) => images.len(),
            Err(error) => {
                tracing::warn!("cannot look for images: {}", chain(&error));
                1
            }
        }
    }

    /// Returns the number of images to restore after a crash, for a decision; see `images_at_least`.
    pub fn images_to_restore(&self) -> Images {
        let Ok(images) = self.available() else {
            let all = self.images_at_least();
            return Images { all, older: all };
        };
        let is_older = |id: &&ImageId| self.restored_from.is_none_or(|from| **id < from);
        Images {
            all: images.len(),
            older: images.iter().filter(is_older).count(),
        }
    }

    /// Returns the images as `available` does; none if the store cannot be read, which is no reason to end a job that
    /// computes.
    pub fn available_or_none(&self) -> Vec<ImageId> {
        self.available().unwrap_or_else(|error| {
            tracing::warn!("cannot look for images: {}", chain(&error));
            Vec::new()
        })
    }

    /// The newest image to go on from.
    pub fn newest(&self) -> Option<ImageId> {
        self.available_or_none().pop()
    }
}
