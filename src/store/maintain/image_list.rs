//! List of a store's images.
//!
//! Reads names, summaries and marks, but no chunk. Needs no lock: images that are removed meanwhile are left out.

use std::fs::File;
use std::io::{self, Read};

use crate::printable::chain;
use crate::store::error::ReadError;
use crate::store::format::file_names::{self, FileKind};
use crate::store::format::image_id::ImageId;
use crate::store::format::manifest::Manifest;
use crate::store::format::manifest_file::{self, ManifestError, Summary};
use crate::store::format::store_folder::Store;

/// Maximum length of a reason, which is a few lines for users.
pub(crate) const REASON_BYTES_MAX: usize = 4096;

/// An image of a store, as shown in lists.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ImageEntry {
    /// Its number.
    pub id: ImageId,
    /// Start of the image, in milliseconds since 1970 UTC; 0 if unknown.
    pub created_unix_ms: u64,
    /// Total length of all its streams; 0 if unknown.
    pub raw_bytes: u64,
    /// Bytes that the image added to the packs; 0 if unknown.
    pub stored_bytes: u64,
    /// Meta data that the caller stored with the image; empty if unknown.
    pub meta: Vec<u8>,
    /// Reason why the image must not be restored: it was set aside, or its manifest cannot be read.
    pub damaged: Option<String>,
    /// Note of its pin, possibly empty; `None` if it is not pinned.
    pub pinned: Option<String>,
}

impl ImageEntry {
    /// Returns true if the manifest cannot be read, at present or permanently: the image's own data is unknown.
    #[must_use]
    pub fn is_unreadable(&self) -> bool {
        self.damaged.is_some() && self.meta.is_empty()
    }
}

/// An image's number and the summary of its manifest.
pub(crate) struct Found {
    pub(crate) id: ImageId,
    pub(crate) summary: Result<Summary, ManifestError>,
}

impl Store {
    /// Returns the images, oldest first.
    ///
    /// # Errors
    /// The folder cannot be listed. An unreadable image is listed with the reason.
    pub fn images(&self) -> Result<Vec<ImageEntry>, ReadError> {
        let found = self.summaries()?;
        Ok(found.into_iter().map(|found| self.entry(found)).collect())
    }

    /// Returns the manifest of an image.
    ///
    /// # Errors
    /// [`ReadError::Missing`] or [`ReadError::Manifest`].
    pub fn manifest(&self, id: ImageId) -> Result<Manifest, ReadError> {
        if let Some(pending) = self.pending.find(id) {
            return Ok(pending.manifest().clone());
        }
        manifest_file::read_manifest(&self.manifest_file(id), id, self.secrets()).map_err(
            |source| match source {
                ManifestError::Read(error) if error.kind() == io::ErrorKind::NotFound => {
                    ReadError::Missing { image: id }
                }
                source => ReadError::Manifest { image: id, source },
            },
        )
    }

    /// Returns the numbers of the images that have a manifest, oldest first: not of those that are being downloaded.
    pub(crate) fn ids(&self) -> Result<Vec<ImageId>, ReadError> {
        self.check_place()?;
        let files = file_names::list(&self.images_folder())?;
        let ids = files.into_iter().filter_map(|(_, kind)| manifest_id(kind));
        let mut ids: Vec<ImageId> = ids.collect();
        ids.sort_unstable();
        Ok(ids)
    }

    /// Returns the summaries of all manifests, oldest first.
    pub(crate) fn summaries(&self) -> Result<Vec<Found>, ReadError> {
        // Before the folder: a download that is completed in between is in both, and not in neither.
        let pending = self.pending.all();
        let found = self.ids()?.into_iter().filter_map(|id| {
            match manifest_file::read_summary(&self.manifest_file(id), id, self.secrets()) {
                Err(ManifestError::Read(error)) if error.kind() == io::ErrorKind::NotFound => None,
                summary => Some(Found { id, summary }),
            }
        });
        let mut found: Vec<Found> = found.collect();
        for pending in pending {
            let (id, summary) = (pending.manifest().id, Summary::of(pending.manifest()));
            if found.iter().all(|found| found.id != id) {
                let summary = Ok(summary);
                found.push(Found { id, summary });
            }
        }
        found.sort_unstable_by_key(|found| found.id);
        Ok(found)
    }

    fn entry(&self, found: Found) -> ImageEntry {
        let mark = self.damage_mark(found.id);
        let (summary, unreadable) = match found.summary {
            Ok(summary) => (Some(summary), None),
            Err(error) => (None, Some(chain(&error))),
        };
        let summary = summary.unwrap_or_default();
        ImageEntry {
            id: found.id,
            created_unix_ms: summary.created_unix_ms,
            raw_bytes: summary.raw_bytes,
            stored_bytes: summary.stored_bytes,
            meta: summary.meta,
            damaged: mark.or(unreadable),
            pinned: self.pin_note(found.id),
        }
    }

    /// Returns the reason why an image was set aside. A mark that cannot be read still counts.
    pub(crate) fn damage_mark(&self, id: ImageId) -> Option<String> {
        self.read_damage_mark(id).unwrap_or_else(|error| {
            Some(format!(
                "it was set aside, the reason cannot be read: {error}"
            ))
        })
    }

    /// Reads the mark like [`Store::damage_mark`], but returns an error if it cannot be read.
    pub(crate) fn read_damage_mark(&self, id: ImageId) -> io::Result<Option<String>> {
        let mut reason = Vec::new();
        let read = File::open(self.damaged_file(id))
            .and_then(|file| file.take(REASON_BYTES_MAX as u64).read_to_end(&mut reason));
        match read {
            Ok(_) => Ok(Some(plain_text(&String::from_utf8_lossy(&reason)))),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }
}

/// Returns the text without characters that could control a terminal.
pub(crate) fn plain_text(text: &str) -> String {
    let plain = |c: char| if c.is_control() && c != '\n' { ' ' } else { c };
    text.trim().chars().map(plain).collect()
}

pub(crate) fn manifest_id(kind: FileKind) -> Option<ImageId> {
    match kind {
        FileKind::Manifest(id) => Some(id),
        FileKind::Damaged(_)
        | FileKind::Pinned(_)
        | FileKind::Pack(_)
        | FileKind::Temporary
        | FileKind::Foreign => None,
    }
}
