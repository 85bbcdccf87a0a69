//! Objects of a remote store that no image needs: those of removed images and of interrupted uploads.

use std::collections::HashSet;

use super::bucket::{Bucket, Object};
use super::image_object::{IMAGES, PACKS, RemoteImage, packs_of, series_of};
use super::remote_error::RemoteError;

/// Objects to be removed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Garbage {
    objects: Vec<Object>,
}

impl Garbage {
    /// Finds the objects of earlier series than `series` that none of these images needs.
    ///
    /// # Errors
    /// A request failed, or the packs of an image are not known.
    pub(crate) fn find(
        bucket: &Bucket,
        images: &[RemoteImage],
        series: u64,
    ) -> Result<Self, RemoteError> {
        let mut needed = HashSet::new();
        for image in images {
            needed.insert(image.object.clone());
            needed.extend(packs_of(bucket, image)?);
        }
        let mut objects = [bucket.list(IMAGES, None)?, bucket.list(PACKS, None)?].concat();
        objects.retain(|object| {
            let is_earlier = series_of(&object.name).is_some_and(|of| of < series);
            is_earlier && !needed.contains(&object.name)
        });
        Ok(Self { objects })
    }

    /// Removes the objects.
    ///
    /// # Errors
    /// A request failed; the objects that remain are found again.
    pub(crate) fn remove(&self, bucket: &Bucket) -> Result<(), RemoteError> {
        self.objects
            .iter()
            .try_for_each(|object| bucket.remove(&object.name))
    }

    /// Returns the number of packs among them.
    pub(crate) fn packs(&self) -> usize {
        let names = self.objects.iter().map(|object| &object.name);
        names.filter(|name| name.starts_with(PACKS)).count()
    }

    /// Returns the number of manifests among them.
    pub(crate) fn manifests(&self) -> usize {
        self.objects.len() - self.packs()
    }

    /// Returns the sum of their lengths.
    pub(crate) fn bytes(&self) -> u64 {
        self.objects.iter().map(|object| object.bytes).sum()
    }
}
