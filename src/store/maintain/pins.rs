//! Pins: images that no rule removes until they are unpinned.
//!
//! ```text
//! images/000012.pinned     an optional note
//! ```
//! A pin is set and removed while a supervisor holds the store's lock, so it must not need that lock. Instead each side
//! holds the image's manifest with an `flock`, and neither side waits.
//!
//! ```text
//! pin     manifest shared     ─▶ still there? ─▶ mark written durably ─▶ success
//! forget  manifest exclusive  ─▶ still there, no mark? ─▶ removed
//! ```
//! If both run at the same time, one of them fails to hold the manifest: `pin` reports that the image is being removed,
//! `forget` spares an image that is being pinned. So an image that was pinned successfully is never removed. Only
//! `unpin` removes the mark, or a sweep once the image is gone.

use std::fs::File;
use std::io::{self, Read};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};

use super::image_list::plain_text;
use crate::store::format::FORMAT;
use crate::store::format::image_id::ImageId;
use crate::store::format::store_folder::Store;
use crate::store::fs::durable::{self, DurableError};
use crate::store::fs::ops;

/// Maximum length of a note. A note is a line or two, and it is in memory whenever images are listed.
const NOTE_BYTES_MAX: usize = 4096;

/// Attempts to write a mark. A sweep may treat the temporary file of a mark as a leftover of a killed writer. Sweeps
/// are rare: this many collisions in a row do not happen by chance.
const MARK_TRIES: usize = 5;

/// An error that prevented setting or removing a pin.
#[derive(Debug, thiserror::Error)]
pub enum PinError {
    /// No image has this number.
    #[error("there is no image {image}")]
    Missing {
        /// The image.
        image: ImageId,
    },
    /// The image is being removed.
    #[error("cannot pin image {image}: it is being removed")]
    Removing {
        /// The image.
        image: ImageId,
    },
    /// The note is too long.
    #[error("the note has {len} bytes, more than {NOTE_BYTES_MAX}")]
    Note {
        /// Its length in bytes.
        len: usize,
    },
    /// The store has a format that this version does not know.
    #[error(
        "the store {path} has format {found}, this version writes {FORMAT}: use a newer ckpt-run"
    )]
    Newer {
        /// The store.
        path: PathBuf,
        /// The format of the store.
        found: u32,
    },
    /// The image's manifest cannot be held.
    #[error("cannot lock {path}")]
    Hold {
        /// The manifest.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// The mark cannot be written or removed.
    #[error(transparent)]
    Mark(#[from] DurableError),
}

/// Result of an attempt to hold a manifest.
pub(crate) enum Hold {
    /// The manifest is held until this is dropped.
    Held(Flock<File>),
    /// The other side holds the manifest.
    Busy,
    /// The image was removed.
    Gone,
}

/// Holds a manifest: shared to pin the image, exclusively to remove it. Does not wait.
pub(crate) fn hold(manifest: &Path, how: FlockArg) -> io::Result<Hold> {
    // Opened for writing, too: NFS requires it for an exclusive lock.
    let file = match ops::open(manifest) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Hold::Gone),
        opened => opened?,
    };
    match Flock::lock(file, how) {
        // Removed between opening and locking.
        Ok(file) if file.metadata()?.nlink() == 0 => Ok(Hold::Gone),
        Ok(file) => Ok(Hold::Held(file)),
        Err((_, Errno::EWOULDBLOCK)) => Ok(Hold::Busy),
        Err((_, errno)) => Err(errno.into()),
    }
}

impl Store {
    /// Pins an image: from now on no rule and no `forget` removes it. Pinning a pinned image replaces the note. Needs
    /// no lock, and is safe while images are written and removed.
    ///
    /// # Errors
    /// See [`PinError`]. An earlier pin stays as it was, except after [`DurableError::SyncFolder`].
    pub fn pin(&self, id: ImageId, note: &str) -> Result<(), PinError> {
        self.check_format()?;
        let note = checked_note(note)?;
        let path = self.manifest_file(id);
        let _held = match hold(&path, FlockArg::LockSharedNonblock) {
            Ok(Hold::Held(file)) => file,
            Ok(Hold::Busy) => return Err(PinError::Removing { image: id }),
            Ok(Hold::Gone) => return Err(PinError::Missing { image: id }),
            Err(source) => return Err(PinError::Hold { path, source }),
        };
        Ok(write_mark(&self.pinned_file(id), note.as_bytes())?)
    }

    /// Removes an image's pin. Returns true if the image was pinned.
    ///
    /// # Errors
    /// See [`PinError`].
    pub fn unpin(&self, id: ImageId) -> Result<bool, PinError> {
        self.check_format()?;
        if !self.manifest_file(id).exists() {
            return Err(PinError::Missing { image: id });
        }
        let mark = self.pinned_file(id);
        let had_one = mark.exists();
        durable::remove(&mark)?;
        durable::sync_folder(&self.images_folder())?;
        Ok(had_one)
    }

    /// Returns the note of an image's pin. A mark that cannot be read still counts as a pin.
    pub(crate) fn pin_note(&self, id: ImageId) -> Option<String> {
        let mut note = Vec::new();
        let read = File::open(self.pinned_file(id))
            .and_then(|file| file.take(NOTE_BYTES_MAX as u64).read_to_end(&mut note));
        match read {
            Ok(_) => Some(plain_text(&String::from_utf8_lossy(&note))),
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            Err(error) => Some(format!("the note cannot be read: {error}")),
        }
    }

    fn check_format(&self) -> Result<(), PinError> {
        if self.format() > FORMAT {
            return Err(PinError::Newer {
                path: self.path().to_owned(),
                found: self.format(),
            });
        }
        Ok(())
    }
}

/// Returns the note without characters that could control a terminal.
pub(crate) fn checked_note(note: &str) -> Result<String, PinError> {
    let note = plain_text(note);
    if note.len() > NOTE_BYTES_MAX {
        return Err(PinError::Note { len: note.len() });
    }
    Ok(note)
}

fn write_mark(path: &Path, note: &[u8]) -> Result<(), DurableError> {
    let mut tries = 1;
    loop {
        match durable::write(path, note) {
            Err(DurableError::Rename { source, .. })
                if source.kind() == io::ErrorKind::NotFound && tries < MARK_TRIES =>
            {
                tries += 1;
            }
            written => return written,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::tests::support::{image_files, temporary_store, write_image};

    fn id(number: u64) -> ImageId {
        ImageId::new(number).unwrap()
    }

    #[test]
    fn a_pinned_image_outlives_every_rotation_until_it_is_unpinned() {
        let (_folder, store) = temporary_store();
        let lock = store.lock().unwrap();
        for _ in 0..3 {
            write_image(&store, &lock, &[("a", b"x")]);
        }
        store.pin(id(1), "before the\x1b[31m change ").unwrap();
        let entry = store.images().unwrap().remove(0);
        assert_eq!(entry.pinned.as_deref(), Some("before the [31m change"));
        assert_eq!(store.rotate(&lock, 1).unwrap(), [id(2)]);
        store.pin(id(1), "").unwrap();
        assert_eq!(store.images().unwrap()[0].pinned.as_deref(), Some(""));
        assert_eq!(store.rotate(&lock, 1).unwrap(), [] as [ImageId; 0]);
        assert!(store.unpin(id(1)).unwrap());
        assert!(!store.unpin(id(1)).unwrap());
        assert_eq!(store.rotate(&lock, 1).unwrap(), [id(1)]);
        assert_eq!(image_files(&store), ["000003.manifest"]);
    }

    #[test]
    fn only_images_that_are_there_can_be_pinned() {
        let (_folder, store) = temporary_store();
        assert!(matches!(store.pin(id(1), ""), Err(PinError::Missing { image }) if image == id(1)));
        assert!(matches!(store.unpin(id(1)), Err(PinError::Missing { .. })));
        let lock = store.lock().unwrap();
        write_image(&store, &lock, &[]);
        let long = "x".repeat(NOTE_BYTES_MAX + 1);
        assert!(matches!(
            store.pin(id(1), &long),
            Err(PinError::Note { .. })
        ));
        assert_eq!(image_files(&store), ["000001.manifest"]);
    }

    #[test]
    fn pin_and_forget_exclude_each_other() {
        let (_folder, store) = temporary_store();
        let lock = store.lock().unwrap();
        write_image(&store, &lock, &[]);
        write_image(&store, &lock, &[]);
        let manifest = store.manifest_file(id(1));
        let pinning = hold(&manifest, FlockArg::LockSharedNonblock).unwrap();
        assert_eq!(store.rotate(&lock, 1).unwrap(), [] as [ImageId; 0]);
        drop(pinning);
        let removing = hold(&manifest, FlockArg::LockExclusiveNonblock).unwrap();
        assert!(matches!(
            store.pin(id(1), ""),
            Err(PinError::Removing { .. })
        ));
        drop(removing);
        assert_eq!(store.rotate(&lock, 1).unwrap(), [id(1)]);
    }

    #[test]
    fn pins_that_race_with_rotations_are_kept_or_refused() {
        let (_folder, store) = temporary_store();
        let lock = store.lock().unwrap();
        for round in 0..40 {
            let old = write_image(&store, &lock, &[]).id;
            write_image(&store, &lock, &[]);
            let start = std::sync::Barrier::new(2);
            let pinned = std::thread::scope(|scope| {
                let pin = scope.spawn(|| {
                    start.wait();
                    store.pin(old, "")
                });
                start.wait();
                store.rotate(&lock, 1).unwrap();
                pin.join().unwrap()
            });
            match pinned {
                Ok(()) => {
                    store.rotate(&lock, 1).unwrap();
                    assert!(store.manifest(old).is_ok(), "round {round}");
                    store.unpin(old).unwrap();
                }
                Err(PinError::Missing { .. } | PinError::Removing { .. }) => {}
                Err(error) => panic!("{error}"),
            }
            store.rotate(&lock, 1).unwrap();
        }
    }

    #[test]
    fn pin_retries_if_a_sweep_removes_its_temporary_file() {
        let (_folder, store) = temporary_store();
        let lock = store.lock().unwrap();
        write_image(&store, &lock, &[]);
        for round in 0..30 {
            std::thread::scope(|scope| {
                let pin = scope.spawn(|| store.pin(id(1), "note"));
                // Each sweep can spoil one try.
                for _ in 1..MARK_TRIES {
                    store.sweep(&lock).unwrap();
                }
                pin.join()
                    .unwrap()
                    .unwrap_or_else(|error| panic!("{round}: {error}"));
            });
            assert!(store.unpin(id(1)).unwrap());
        }
    }

    #[test]
    fn a_number_is_not_given_again_while_a_pin_has_it() {
        let (_folder, store) = temporary_store();
        let lock = store.lock().unwrap();
        std::fs::write(store.pinned_file(id(7)), "").unwrap();
        assert_eq!(write_image(&store, &lock, &[]).id, id(8));
        store.sweep(&lock).unwrap();
        assert_eq!(image_files(&store), ["000008.manifest"]);
    }
}
