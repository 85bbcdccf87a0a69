//! Garbage of a store: data that no image needs. It is found first, so that it can be shown, and then removed.
//!
//! ```text
//! manifests removed durably ─▶ packs that no manifest names ─▶ dead space in packs ─▶ marks
//! ```
//! After an interruption at any point, every remaining image is whole and the next sweep continues the work. While one
//! manifest cannot be read, its packs are unknown, and no pack is removed.

use std::collections::HashSet;
use std::fs;
use std::path::{Path, PathBuf};

use super::hole_punch::{self, Holes, Scope, Users};
use super::image_list::Found;
use super::sweep::Swept;
use crate::sparse_file::allocated_bytes;
use crate::store::error::{ReadError, WriteError};
use crate::store::format::file_names::{self, FileKind};
use crate::store::format::image_id::ImageId;
use crate::store::format::pack::PackName;
use crate::store::format::store_folder::Store;
use crate::store::fs::durable::{self, DurableError};

/// Files, and parts of files, that no image needs.
#[derive(Debug, Default)]
pub(crate) struct Garbage {
    temporary: Vec<PathBuf>,
    packs: Vec<PathBuf>,
    /// Marks of removed images.
    marks: Vec<PathBuf>,
    holes: Vec<Holes>,
    unreadable: Vec<ImageId>,
}

impl Garbage {
    /// Finds the garbage of removed images. No image may be being written.
    pub(crate) fn of_images(store: &Store, scope: &Scope) -> Result<Self, ReadError> {
        let live = Live::of(store.summaries()?);
        let mut garbage = Self {
            marks: marks(store, &live.ids)?,
            unreadable: live.unreadable,
            ..Self::default()
        };
        if garbage.unreadable.is_empty() {
            let packs = file_names::list(&store.packs_folder())?.into_iter();
            let dead = packs.filter(|(_, kind)| match kind {
                FileKind::Pack(name) => !live.users.contains_key(name),
                FileKind::Manifest(_)
                | FileKind::Damaged(_)
                | FileKind::Pinned(_)
                | FileKind::Temporary
                | FileKind::Foreign => false,
            });
            garbage.packs = dead.map(|(path, _)| path).collect();
            garbage.find_holes(store, &live.users, scope)?;
        }
        Ok(garbage)
    }

    /// Adds the temporary files of killed writers.
    pub(crate) fn with_temporary(mut self, store: &Store) -> Result<Self, ReadError> {
        let root = store.path().to_owned();
        for folder in [root, store.images_folder(), store.packs_folder()] {
            let found = file_names::list(&folder)?.into_iter();
            let temporary =
                found.filter(|(path, kind)| *kind == FileKind::Temporary && path.is_file());
            self.temporary.extend(temporary.map(|(path, _)| path));
        }
        Ok(self)
    }

    /// Leaves out packs of images newer than `newest`.
    pub(crate) fn not_after(mut self, newest: Option<ImageId>) -> Self {
        self.packs.retain(|path| {
            let name = path.file_name().and_then(|name| name.to_str());
            let pack = name.and_then(PackName::from_file_name);
            pack.is_some_and(|pack| Some(pack.image) <= newest)
        });
        self
    }

    /// Returns the numbers of files and bytes.
    pub(crate) fn account(&self) -> Swept {
        let files = self.temporary.iter().chain(&self.packs);
        let hole_bytes = self.holes.iter().map(|holes| holes.bytes).sum();
        Swept {
            temporary_files: self.temporary.len(),
            packs: self.packs.len(),
            bytes: files.map(|path| space(path)).sum::<u64>() + hole_bytes,
            hole_bytes,
            unreadable: self.unreadable.clone(),
        }
    }

    /// Removes the garbage and returns the account of it.
    pub(crate) fn remove(self, store: &Store) -> Result<Swept, WriteError> {
        let mut swept = self.account();
        for path in &self.temporary {
            durable::remove(path)?;
        }
        // The manifests were removed by the caller or by a pruner that was killed. A manifest that reappears after a
        // power failure must find its packs, without holes.
        durable::sync_folder(&store.images_folder())?;
        remove_all(&self.packs, &store.packs_folder())?;
        let given_back = hole_punch::give_back(&self.holes)?;
        swept.bytes = swept.bytes - swept.hole_bytes + given_back;
        swept.hole_bytes = given_back;
        remove_all(&self.marks, &store.images_folder())?;
        Ok(swept)
    }

    fn find_holes(&mut self, store: &Store, users: &Users, scope: &Scope) -> Result<(), ReadError> {
        match hole_punch::find(store, users, scope) {
            Ok(holes) => self.holes = holes,
            // The summary of this image was readable, so its packs are known, but not the dead space in them.
            Err(ReadError::Manifest { image, source }) => {
                tracing::warn!(%image, error = %source, "unused space is kept, because a manifest cannot be read");
                self.unreadable.push(image);
            }
            Err(error) => return Err(error),
        }
        Ok(())
    }
}

/// Removes files of one folder, durably.
fn remove_all(files: &[PathBuf], folder: &Path) -> Result<(), DurableError> {
    if files.is_empty() {
        return Ok(());
    }
    for path in files {
        durable::remove(path)?;
    }
    durable::sync_folder(folder)
}

/// The images of a store and the packs that their manifests name.
#[derive(Default)]
pub(crate) struct Live {
    ids: HashSet<ImageId>,
    pub(crate) users: Users,
    pub(crate) unreadable: Vec<ImageId>,
}

impl Live {
    pub(crate) fn of(images: Vec<Found>) -> Self {
        let mut live = Self::default();
        for found in images {
            live.ids.insert(found.id);
            match found.summary {
                Ok(summary) => {
                    for pack in summary.packs {
                        let (_, images) = live
                            .users
                            .entry(pack.name)
                            .or_insert_with(|| (pack, Vec::new()));
                        images.push(found.id);
                    }
                }
                Err(error) => {
                    tracing::warn!(image = %found.id, %error, "unused packs are kept, because a manifest cannot be read");
                    live.unreadable.push(found.id);
                }
            }
        }
        live
    }
}

/// Returns the marks of removed images.
fn marks(store: &Store, ids: &HashSet<ImageId>) -> Result<Vec<PathBuf>, ReadError> {
    let found = file_names::list(&store.images_folder())?.into_iter();
    let stale = found.filter(|(_, kind)| match kind {
        FileKind::Damaged(id) | FileKind::Pinned(id) => !ids.contains(id),
        FileKind::Manifest(_) | FileKind::Pack(_) | FileKind::Temporary | FileKind::Foreign => {
            false
        }
    });
    Ok(stale.map(|(path, _)| path).collect())
}

/// Returns the disk space of a file, or 0 if it cannot be read: the number is only reported.
pub(crate) fn space(path: &Path) -> u64 {
    fs::symlink_metadata(path).map_or(0, |found| allocated_bytes(&found))
}
