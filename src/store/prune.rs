//! Removing what is no longer wanted: old images, and what a killed writer left.
//!
//! A manifest goes first and durably, then the packs that no manifest names, then the
//! mark of a damaged image: cut short at any point, every image that is left is whole,
//! and the next sweep finishes the work. As long as one manifest cannot be read, nobody
//! knows its packs, and none is removed.

use std::collections::HashSet;
use std::fs;
use std::path::Path;

use super::durable;
use super::entries::{REASON_BYTES_MAX, plain_text};
use super::error::{ReadError, WriteError};
use super::files::{self, FileKind};
use super::id::ImageId;
use super::layout::Store;
use super::lock::StoreLock;
use super::pack::PackName;
use super::retention::{self, Candidate, Condition};

/// What a sweep found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Swept {
    /// Temporary files that were removed.
    pub temporary_files: usize,
    /// Packs that no manifest names and that were removed.
    pub packs: usize,
    /// Length of all these files.
    pub bytes: u64,
    /// Images whose manifests cannot be read. If there are any, no pack was removed.
    pub unreadable: Vec<ImageId>,
}

impl Store {
    /// Remembers that an image cannot be restored, and why: it is passed over from now
    /// on, and no new image relies on its chunks.
    ///
    /// # Errors
    /// There is no such image, or the mark cannot be written.
    ///
    /// # Panics
    /// If the lock is that of another store.
    pub fn set_aside(&self, lock: &StoreLock, id: ImageId, reason: &str) -> Result<(), WriteError> {
        lock.check(self.path());
        if !self.manifest_file(id).exists() {
            return Err(WriteError::Missing { image: id });
        }
        let mut reason = plain_text(reason).into_bytes();
        // A character that is cut in two reads as U+FFFD.
        reason.truncate(REASON_BYTES_MAX);
        durable::write(&self.damaged_file(id), &reason)?;
        Ok(())
    }

    /// Removes the images that `keep_last` newer good ones have replaced; returns which.
    /// The newest good image always stays.
    ///
    /// # Errors
    /// [`WriteError::Busy`] while an image is written. After another error some images
    /// may be gone; those left are whole.
    ///
    /// # Panics
    /// If the lock is that of another store.
    pub fn rotate(&self, lock: &StoreLock, keep_last: usize) -> Result<Vec<ImageId>, WriteError> {
        let _busy = lock.claim(self.path()).ok_or(WriteError::Busy)?;
        let images: Vec<Candidate> = self
            .images()?
            .into_iter()
            .map(|entry| Candidate {
                id: entry.id,
                condition: match entry.damaged {
                    None => Condition::Good,
                    Some(_) => Condition::Damaged,
                },
            })
            .collect();
        let planned = retention::plan(&images, keep_last);
        if planned.is_empty() {
            return Ok(planned);
        }
        for id in &planned {
            durable::remove(&self.manifest_file(*id))?;
        }
        durable::sync_folder(&self.images_folder())?;
        self.remove_garbage(&mut Swept::default())?;
        tracing::debug!(images = planned.len(), "old images removed");
        Ok(planned)
    }

    /// Removes what a killed writer or pruner left. Nobody may be writing to a file of the store
    /// by [`durable::write`] then: its temporary file would go.
    ///
    /// # Errors
    /// [`WriteError::Busy`] while an image is written. After another error some
    /// leftovers may be gone, no image is.
    ///
    /// # Panics
    /// If the lock is that of another store.
    pub fn sweep(&self, lock: &StoreLock) -> Result<Swept, WriteError> {
        let _busy = lock.claim(self.path()).ok_or(WriteError::Busy)?;
        let mut swept = Swept::default();
        // Only here: the caller may be writing a file of its own there when images rotate.
        remove_temporary(self.path(), &mut swept)?;
        self.remove_garbage(&mut swept)?;
        Ok(swept)
    }

    fn remove_garbage(&self, swept: &mut Swept) -> Result<(), WriteError> {
        remove_temporary(&self.images_folder(), swept)?;
        remove_temporary(&self.packs_folder(), swept)?;
        let images = self.live()?;
        swept.unreadable = images.unreadable;
        if swept.unreadable.is_empty() {
            self.remove_packs(&images.packs, swept)?;
        }
        self.remove_marks(&images.ids)
    }

    fn remove_packs(&self, live: &HashSet<PackName>, swept: &mut Swept) -> Result<(), WriteError> {
        for (path, kind) in files::list(&self.packs_folder())? {
            if matches!(kind, FileKind::Pack(name) if !live.contains(&name)) {
                swept.bytes += length(&path);
                swept.packs += 1;
                durable::remove(&path)?;
            }
        }
        durable::sync_folder(&self.packs_folder())?;
        Ok(())
    }

    /// Removes the marks of images that are gone.
    fn remove_marks(&self, ids: &HashSet<ImageId>) -> Result<(), WriteError> {
        for (path, kind) in files::list(&self.images_folder())? {
            if matches!(kind, FileKind::Damaged(id) if !ids.contains(&id)) {
                durable::remove(&path)?;
            }
        }
        durable::sync_folder(&self.images_folder())?;
        Ok(())
    }

    fn live(&self) -> Result<Live, ReadError> {
        let mut live = Live::default();
        for found in self.summaries()? {
            live.ids.insert(found.id);
            match found.summary {
                Ok(summary) => live
                    .packs
                    .extend(summary.packs.iter().map(|pack| pack.name)),
                Err(error) => {
                    tracing::warn!(image = %found.id, %error, "packs stay while a manifest cannot be read");
                    live.unreadable.push(found.id);
                }
            }
        }
        Ok(live)
    }
}

#[derive(Default)]
struct Live {
    ids: HashSet<ImageId>,
    packs: HashSet<PackName>,
    unreadable: Vec<ImageId>,
}

fn remove_temporary(folder: &Path, swept: &mut Swept) -> Result<(), WriteError> {
    for (path, kind) in files::list(folder)? {
        if kind == FileKind::Temporary && path.is_file() {
            swept.bytes += length(&path);
            swept.temporary_files += 1;
            durable::remove(&path)?;
        }
    }
    Ok(())
}

/// For the account only: 0 where it cannot be had.
fn length(path: &Path) -> u64 {
    fs::symlink_metadata(path).map_or(0, |found| found.len())
}

#[cfg(test)]
mod tests {
    use super::super::CHUNK_BYTES;
    use super::super::codec::tests::noise;
    use super::super::testing::{
        Child, OPTIONS, image_files, never, packs, read_stream, temporary_store, write_image,
    };
    use super::*;

    #[test]
    fn what_a_killed_writer_leaves_is_swept() {
        let (_folder, store) = temporary_store();
        let lock = store.lock().unwrap();
        let image = write_image(&store, &lock, &[("a", &noise(1, CHUNK_BYTES))]);
        drop(lock);
        let before = packs(&store);
        let child = Child::start(
            "store::prune::tests::child_writes_half_an_image",
            store.path(),
        );
        child.kill();
        let lock = store.lock().unwrap();
        fs::write(store.path().join("images/.tmp-x"), "half a manifest").unwrap();
        assert!(packs(&store).len() > before.len());
        let next = store.begin(&lock, OPTIONS).unwrap();
        assert_eq!(next.id().to_string(), "000003");
        drop(next);
        let swept = store.sweep(&lock).unwrap();
        assert!(
            swept.packs > 0 && swept.bytes > 0 && swept.unreadable.is_empty(),
            "{swept:?}"
        );
        assert_eq!(swept.temporary_files, 1);
        assert_eq!(
            (packs(&store), image_files(&store)),
            (before, vec!["000001.manifest".to_owned()])
        );
        store.verify(image.id, &never).unwrap();
        assert_eq!(store.sweep(&lock).unwrap(), Swept::default());
    }

    #[test]
    #[ignore = "the other process of a test"]
    fn child_writes_half_an_image() {
        Child::main(|path| {
            let store = Store::open(path).unwrap();
            let lock = store.lock().unwrap();
            let writer = store.begin(&lock, OPTIONS).unwrap();
            let mut stream = writer.stream("a").unwrap();
            // More than the buffer holds, so that some of it is in packs.
            stream.write_all(&noise(9, 8 << 20)).unwrap();
            (writer, stream)
        });
    }

    #[test]
    fn no_pack_is_removed_while_a_manifest_cannot_be_read() {
        let (_folder, store) = temporary_store();
        let lock = store.lock().unwrap();
        let first = write_image(&store, &lock, &[("a", &noise(1, CHUNK_BYTES))]);
        let second = write_image(&store, &lock, &[("a", &noise(2, CHUNK_BYTES))]);
        write_image(&store, &lock, &[("a", &noise(3, CHUNK_BYTES))]);
        let path = store.path().join(format!("images/{}.manifest", second.id));
        let good = fs::read(&path).unwrap();
        fs::write(&path, &good[..good.len() - 1]).unwrap();
        let before = packs(&store);
        assert!(
            store.images().unwrap()[1]
                .damaged
                .as_deref()
                .unwrap()
                .contains("length")
        );
        let swept = store.sweep(&lock).unwrap();
        assert_eq!((swept.unreadable, swept.packs), (vec![second.id], 0));
        assert_eq!(store.rotate(&lock, 2).unwrap(), []);
        fs::remove_file(store.path().join(format!("images/{}.manifest", first.id))).unwrap();
        store.sweep(&lock).unwrap();
        assert_eq!(packs(&store), before);
        fs::write(&path, &good).unwrap();
        assert_eq!(store.sweep(&lock).unwrap().packs, 1);
        store.verify(second.id, &never).unwrap();
    }

    #[test]
    fn a_file_that_is_being_written_beside_the_images_survives_their_rotation() {
        let (_folder, store) = temporary_store();
        let lock = store.lock().unwrap();
        let first = write_image(&store, &lock, &[("a", &noise(1, CHUNK_BYTES))]);
        write_image(&store, &lock, &[("a", &noise(2, CHUNK_BYTES))]);
        let file = store.path().join(".tmp-run");
        fs::write(&file, "{").unwrap();
        assert_eq!(store.rotate(&lock, 1).unwrap(), [first.id]);
        assert!(file.exists());
        assert_eq!(store.sweep(&lock).unwrap().temporary_files, 1);
        assert!(!file.exists());
    }

    #[test]
    fn a_chunk_that_a_damaged_image_shares_is_not_relied_on() {
        let (_folder, store) = temporary_store();
        let lock = store.lock().unwrap();
        let data = noise(1, CHUNK_BYTES);
        write_image(&store, &lock, &[("a", &data)]);
        let second = write_image(&store, &lock, &[("a", &data)]);
        store.set_aside(&lock, second.id, "torn").unwrap();
        let third = write_image(&store, &lock, &[("a", &data)]);
        assert!(third.stored_bytes > 0, "written again");
        // What was written again is as good as any.
        let fourth = write_image(&store, &lock, &[("a", &data)]);
        assert_eq!((fourth.stored_bytes, fourth.packs), (0, third.packs));
    }

    #[test]
    fn an_image_set_aside_is_remembered_and_never_relied_on() {
        let (_folder, store) = temporary_store();
        let lock = store.lock().unwrap();
        let data = noise(1, CHUNK_BYTES);
        let first = write_image(&store, &lock, &[("a", &data)]);
        store
            .set_aside(&lock, first.id, "criu said\x1b[31m no ")
            .unwrap();
        let entry = store.images().unwrap().remove(0);
        assert_eq!(entry.damaged.as_deref(), Some("criu said [31m no"));
        let second = write_image(&store, &lock, &[("a", &data)]);
        assert!(second.stored_bytes > 0, "the chunk is written again");
        assert_eq!(store.rotate(&lock, 1).unwrap(), [first.id]);
        assert_eq!(image_files(&store), ["000002.manifest"]);
        assert!(read_stream(&store, second.id, "a") == data);
        let missing = store.set_aside(&lock, first.id, "gone");
        assert!(matches!(missing, Err(WriteError::Missing { .. })));
    }
}
