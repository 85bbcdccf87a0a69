//! Removal of data that no image needs, and marks on images that must not be used.
//!
//! A sweep is quick and meant for the start of a run. Pruning inspects every pack. Both first find the garbage and then
//! remove it, see `garbage`.

use super::garbage::Garbage;
use super::hole_punch::Scope;
use super::image_list::{REASON_BYTES_MAX, plain_text};
use crate::store::error::{ReadError, WriteError};
use crate::store::format::image_id::ImageId;
use crate::store::format::store_folder::Store;
use crate::store::fs::durable;
use crate::store::fs::lock::StoreLock;

/// Attempts to read a store while a writer removes images. A writer does so once per snapshot, and a snapshot takes
/// longer than one attempt.
const LOOKS_MAX: u32 = 5;

/// The garbage that was found and removed, or would be removed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Swept {
    /// Temporary files of killed writers.
    pub temporary_files: usize,
    /// Packs that no manifest names.
    pub packs: usize,
    /// Total disk space freed.
    pub bytes: u64,
    /// Share of `bytes` freed inside packs that stay.
    pub hole_bytes: u64,
    /// Images with unreadable manifests. While there are any, the data that they may need stays: all dead space in
    /// packs, and all packs if even the packs of these images are unknown.
    pub unreadable: Vec<ImageId>,
}

impl Store {
    /// Marks an image as not restorable and stores the reason. From now on the image is skipped, and no new image
    /// refers to its chunks.
    ///
    /// # Errors
    /// The image does not exist, or the mark cannot be written.
    ///
    /// # Panics
    /// If the lock belongs to another store.
    pub fn set_aside(&self, lock: &StoreLock, id: ImageId, reason: &str) -> Result<(), WriteError> {
        lock.check(self.path());
        if !self.manifest_file(id).exists() {
            return Err(WriteError::Missing { image: id });
        }
        let mut reason = plain_text(reason).into_bytes();
        // A character that is cut in two is read as U+FFFD.
        reason.truncate(REASON_BYTES_MAX);
        durable::write(&self.damaged_file(id), &reason)?;
        Ok(())
    }

    /// Removes the leftovers of a killed writer or pruner. No process may be writing to a file of the store with
    /// [`durable::write`] during the sweep: its temporary file would be removed.
    ///
    /// # Errors
    /// [`WriteError::Busy`] while an image is written. After another error some leftovers may be gone, but no image is.
    ///
    /// # Panics
    /// If the lock belongs to another store.
    pub fn sweep(&self, lock: &StoreLock) -> Result<Swept, WriteError> {
        let _busy = lock.claim(self.path()).ok_or(WriteError::Busy)?;
        let garbage = Garbage::of_images(self, &Scope::Nothing)?;
        garbage.with_temporary(self)?.remove(self)
    }

    /// Does the same as [`Store::sweep`] and also frees the dead space inside all packs. Reads every manifest in full.
    ///
    /// # Errors
    /// The same as [`Store::sweep`].
    ///
    /// # Panics
    /// If the lock belongs to another store.
    pub fn prune(&self, lock: &StoreLock) -> Result<Swept, WriteError> {
        let _busy = lock.claim(self.path()).ok_or(WriteError::Busy)?;
        self.leftovers()?.remove(self)
    }

    /// Returns the garbage that [`Store::prune`] would remove. Needs the lock, because data that is being written looks
    /// like garbage.
    ///
    /// # Errors
    /// The same as [`Store::prune`]; changes nothing.
    ///
    /// # Panics
    /// If the lock belongs to another store.
    pub fn prunable(&self, lock: &StoreLock) -> Result<Swept, WriteError> {
        let _busy = lock.claim(self.path()).ok_or(WriteError::Busy)?;
        Ok(self.leftovers()?.account())
    }

    /// Returns the same as [`Store::prunable`] while another process holds the lock. Does not block any process. Leaves
    /// out data that may be in the course of being written: temporary files, and packs of images newer than the newest
    /// existing image.
    ///
    /// # Errors
    /// The store cannot be read, or images keep appearing and disappearing.
    pub fn prunable_beside_writer(&self) -> Result<Swept, ReadError> {
        let mut looks = 1;
        loop {
            // This comes first: every image begun from now on has a higher number.
            let newest = self.ids()?.last().copied();
            match Garbage::of_images(self, &Scope::Everything) {
                Err(ReadError::Missing { .. }) if looks < LOOKS_MAX => looks += 1,
                garbage => return Ok(garbage?.not_after(newest).account()),
            }
        }
    }

    fn leftovers(&self) -> Result<Garbage, WriteError> {
        let garbage = Garbage::of_images(self, &Scope::Everything)?;
        Ok(garbage.with_temporary(self)?)
    }
}

#[cfg(test)]
mod tests {
    use crate::store::CHUNK_BYTES;
    use crate::store::format::codec::tests::noise;
    use crate::store::tests::support::{
        Child, OPTIONS, image_files, never, packs, read_stream, temporary_store, write_image,
    };
    use std::fs;
    use std::thread;
    use std::time::{Duration, Instant};

    use super::*;

    #[test]
    fn leftovers_of_a_killed_writer_are_swept() {
        let (_folder, store) = temporary_store();
        let lock = store.lock().unwrap();
        let image = write_image(&store, &lock, &[("a", &noise(1, CHUNK_BYTES))]);
        drop(lock);
        let before = packs(&store);
        let child = Child::start(
            concat!(module_path!(), "::child_writes_half_an_image"),
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
    fn data_of_a_concurrent_writer_are_not_garbage() {
        let (_folder, store) = temporary_store();
        let lock = store.lock().unwrap();
        write_image(&store, &lock, &[("a", &noise(1, CHUNK_BYTES))]);
        write_image(&store, &lock, &[("a", &noise(2, CHUNK_BYTES))]);
        // A pack is left of an image whose manifest is gone.
        fs::remove_file(store.path().join("images/000001.manifest")).unwrap();
        let writer = store.begin(&lock, OPTIONS).unwrap();
        let mut stream = writer.stream("a").unwrap();
        stream.write_all(&noise(9, 8 << 20)).unwrap();
        fs::write(store.path().join("images/.tmp-x"), "half a manifest").unwrap();
        // A thread of the writer begins its pack.
        let begun = Instant::now();
        let before = loop {
            let packs = packs(&store);
            if packs.iter().any(|name| name.starts_with("000003")) {
                break packs;
            }
            assert!(begun.elapsed() < Duration::from_secs(60), "{packs:?}");
            thread::sleep(Duration::from_millis(1));
        };
        let found = store.prunable_beside_writer().unwrap();
        assert_eq!((found.packs, found.temporary_files), (1, 0), "{found:?}");
        // Other threads may have begun their packs since.
        let now = packs(&store);
        assert!(
            before.iter().all(|pack| now.contains(pack)),
            "{before:?} {now:?}"
        );
        stream.finish().unwrap();
        let image = writer.commit(b"").unwrap();
        store.verify(image.id, &never).unwrap();
    }

    #[test]
    #[ignore = "the other process of a test"]
    fn child_writes_half_an_image() {
        Child::main(|path| {
            let store = Store::open(path).unwrap();
            let lock = store.lock().unwrap();
            let writer = store.begin(&lock, OPTIONS).unwrap();
            let mut stream = writer.stream("a").unwrap();
            // More than the buffer holds, so that some of the data is in packs.
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
    fn rotation_spares_files_that_another_thread_is_writing() {
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
        // The chunks written again can be relied on.
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
