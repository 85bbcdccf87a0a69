//! What the removal of images would give back, told before any of them goes.

use std::collections::{HashMap, HashSet};

use super::error::ReadError;
use super::garbage::{Live, space};
use super::holes::{self, Pages, Scope, Users};
use super::id::ImageId;
use super::layout::Store;
use super::pack::PackName;

impl Store {
    /// How much a thorough [`Store::forget`] gives back, at least, once the first of these images is gone,
    /// the first two, and so on: the packs that no other image names, and the dead space in
    /// those that stay.
    ///
    /// # Errors
    /// The images cannot be listed.
    pub fn gains(&self, ids: &[ImageId]) -> Result<Vec<u64>, ReadError> {
        let live = Live::of(self.summaries()?);
        if !live.unreadable.is_empty() {
            // No pack is touched then.
            return Ok(vec![0; ids.len()]);
        }
        match Gains::new(self, &live.users, ids).all() {
            Err(ReadError::Manifest { .. } | ReadError::Missing { .. }) => Ok(vec![0; ids.len()]),
            gains => gains,
        }
    }
}

struct Gains<'a> {
    store: &'a Store,
    users: &'a Users,
    ids: &'a [ImageId],
    /// The packs that the images name.
    packs: Vec<PackName>,
    /// Those of them in which holes are looked for.
    chosen: Vec<PackName>,
}

impl<'a> Gains<'a> {
    fn new(store: &'a Store, users: &'a Users, ids: &'a [ImageId]) -> Self {
        let named = users.iter().filter(|(_, (_, images))| {
            let mut images = images.iter();
            images.any(|image| ids.contains(image))
        });
        let packs: Vec<PackName> = named.map(|(name, _)| *name).collect();
        let scope = Scope::These(packs.iter().copied().collect());
        Self {
            store,
            users,
            ids,
            packs,
            chosen: holes::choose(users, &scope),
        }
    }

    /// From the last to the first: each image that comes back makes more of its packs live.
    fn all(&self) -> Result<Vec<u64>, ReadError> {
        let mut pages: Pages = HashMap::new();
        for image in holes::images_of(self.users, &self.chosen) {
            if !self.ids.contains(&image) {
                holes::add_live(&mut pages, &self.store.manifest(image)?, &self.chosen);
            }
        }
        let mut gone: HashSet<ImageId> = self.ids.iter().copied().collect();
        let mut gains = Vec::new();
        for image in self.ids.iter().rev() {
            gains.push(self.gain(&gone, &pages));
            holes::add_live(&mut pages, &self.store.manifest(*image)?, &self.chosen);
            gone.remove(image);
        }
        gains.reverse();
        Ok(gains)
    }

    fn gain(&self, gone: &HashSet<ImageId>, pages: &Pages) -> u64 {
        let of_pack = |name: &PackName| {
            let (pack, images) = self.users.get(name)?;
            let path = self.store.pack_file(*name);
            if images.iter().all(|image| gone.contains(image)) {
                return Some(space(&path));
            }
            let is_affected = images.iter().any(|image| gone.contains(image));
            if !is_affected || !self.chosen.contains(name) {
                return None;
            }
            let live = pages.get(name).map_or(&[][..], Vec::as_slice);
            holes::holes_of(&path, *pack, live).map(|holes| holes.bytes)
        };
        self.packs.iter().filter_map(of_pack).sum()
    }
}
