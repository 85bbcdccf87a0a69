//! Space that the removal of images would free, computed before any of them is removed.

use std::collections::{HashMap, HashSet};

use super::garbage::{Live, space};
use super::hole_punch::{self, Pages, Scope, Users};
use crate::store::error::ReadError;
use crate::store::format::file_names::{self, FileKind};
use crate::store::format::image_id::ImageId;
use crate::store::format::pack::PackName;
use crate::store::format::store_folder::Store;

impl Store {
    /// Returns the minimum number of bytes that a thorough [`Store::forget`] frees after the removal of the first of
    /// these images, of the first two, and so on. It counts the packs that no other image names, and the dead space in
    /// those that stay.
    ///
    /// # Errors
    /// The images cannot be listed.
    pub fn gains(&self, ids: &[ImageId]) -> Result<Vec<u64>, ReadError> {
        let live = Live::of(self.summaries()?);
        let Some(first) = first_with_all(ids, &live.unreadable) else {
            return Ok(vec![0; ids.len()]);
        };
        let lost = self.packs_of_unreadable(&live)?;
        let mut gains = Reclaimable::new(self, &live.users, ids);
        let gained = match gains.all(first) {
            Err(ReadError::Manifest { .. } | ReadError::Missing { .. }) => {
                // The dead space in the packs that stay is unknown.
                gains.chosen.clear();
                gains.all(first)
            }
            gained => gained,
        };
        let mut gained = gained?;
        for gain in &mut gained[first..] {
            *gain += lost;
        }
        Ok(gained)
    }

    /// Returns the disk space of packs that were written by images without a readable manifest and that no other image
    /// names.
    fn packs_of_unreadable(&self, live: &Live) -> Result<u64, ReadError> {
        let packs = file_names::list(&self.packs_folder())?.into_iter();
        let lost = packs.filter(|(_, kind)| {
            matches!(kind, FileKind::Pack(name)
                if live.unreadable.contains(&name.image) && !live.users.contains_key(name))
        });
        Ok(lost.map(|(path, _)| space(&path)).sum())
    }
}

/// Returns the position in `ids` of the last unreadable image: before its removal no pack is touched. Returns `None` if
/// an unreadable image stays.
fn first_with_all(ids: &[ImageId], unreadable: &[ImageId]) -> Option<usize> {
    if !unreadable.iter().all(|image| ids.contains(image)) {
        return None;
    }
    let last = ids.iter().rposition(|image| unreadable.contains(image));
    Some(last.unwrap_or(0))
}

struct Reclaimable<'a> {
    store: &'a Store,
    users: &'a Users,
    ids: &'a [ImageId],
    /// The packs that the images name.
    packs: Vec<PackName>,
    /// The subset of these packs in which holes are looked for.
    chosen: Vec<PackName>,
}

impl<'a> Reclaimable<'a> {
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
            chosen: hole_punch::choose(users, &scope),
        }
    }

    /// Computes the sizes from the last image to `first`; the images before that get 0. Each image that is added back
    /// makes more ranges of its packs live.
    fn all(&self, first: usize) -> Result<Vec<u64>, ReadError> {
        let mut pages: Pages = HashMap::new();
        for image in hole_punch::images_of(self.users, &self.chosen) {
            if !self.ids.contains(&image) {
                hole_punch::add_live(&mut pages, &self.store.manifest(image)?, &self.chosen);
            }
        }
        let mut gone: HashSet<ImageId> = self.ids.iter().copied().collect();
        let mut gains = vec![0; self.ids.len()];
        for index in (first..self.ids.len()).rev() {
            gains[index] = self.gain(&gone, &pages);
            let image = self.ids[index];
            gone.remove(&image);
            if index > first && !self.chosen.is_empty() {
                hole_punch::add_live(&mut pages, &self.store.manifest(image)?, &self.chosen);
            }
        }
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
            hole_punch::holes_of(&path, *pack, live).map(|holes| holes.bytes)
        };
        self.packs.iter().filter_map(of_pack).sum()
    }
}
