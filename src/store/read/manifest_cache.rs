//! Manifests of the newest images, as the next image needs them before the job is frozen: decoding one takes half a
//! second for 64 GiB.

use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::{Arc, Mutex};

use crate::store::error::ReadError;
use crate::store::format::image_id::ImageId;
use crate::store::format::manifest::Manifest;
use crate::store::format::store_folder::Store;
use crate::sync::locked;

/// Number of manifests: as many as the deduplication index uses.
const KEPT_MAX: usize = 2;
/// Number of chunks of a manifest, of 84 bytes each: 170 MiB. Larger ones, of some 200 GiB, are read again.
const CHUNKS_MAX: usize = 2 << 20;

/// Manifests in memory, those of the newest images.
#[derive(Clone, Debug, Default)]
pub(crate) struct ManifestCache(Arc<Mutex<Vec<Cached>>>);

#[derive(Debug)]
struct Cached {
    version: Version,
    manifest: Arc<Manifest>,
}

/// Device, inode, length and time of the last change of a manifest's file. They differ after another process has replaced
/// the file, to repair the image.
type Version = (u64, u64, u64, (i64, i64));

fn version(path: &Path) -> Option<Version> {
    let found = fs::metadata(path).ok()?;
    let changed = (found.ctime(), found.ctime_nsec());
    Some((found.dev(), found.ino(), found.len(), changed))
}

impl ManifestCache {
    fn find(&self, id: ImageId, version: Version) -> Option<Arc<Manifest>> {
        let cached = locked(&self.0);
        let found = cached
            .iter()
            .find(|one| one.manifest.id == id && one.version == version)?;
        Some(Arc::clone(&found.manifest))
    }

    fn keep(&self, version: Version, manifest: Arc<Manifest>) {
        if manifest.chunks.len() > CHUNKS_MAX {
            return;
        }
        let mut cached = locked(&self.0);
        cached.retain(|one| one.manifest.id != manifest.id);
        cached.push(Cached { version, manifest });
        cached.sort_unstable_by_key(|one| std::cmp::Reverse(one.manifest.id));
        cached.truncate(KEPT_MAX);
    }

    /// Drops the manifests of images that no longer exist.
    pub(crate) fn retain(&self, existing: &[ImageId]) {
        locked(&self.0).retain(|one| existing.contains(&one.manifest.id));
    }
}

impl Store {
    /// Returns the manifest of an image like [`manifest`](Self::manifest), from memory if its file is the same.
    ///
    /// # Errors
    /// The same as [`manifest`](Self::manifest).
    pub(crate) fn cached_manifest(&self, id: ImageId) -> Result<Arc<Manifest>, ReadError> {
        // Before it is read: a file that is replaced meanwhile has another version than what was read.
        let version = version(&self.manifest_file(id));
        if let Some(found) = version.and_then(|version| self.manifests.find(id, version)) {
            return Ok(found);
        }
        let manifest = Arc::new(self.manifest(id)?);
        if let Some(version) = version {
            self.manifests.keep(version, Arc::clone(&manifest));
        }
        Ok(manifest)
    }

    /// Keeps the manifest of an image that was just written under the store's lock.
    pub(crate) fn cache_manifest(&self, manifest: &Arc<Manifest>) {
        if let Some(version) = version(&self.manifest_file(manifest.id)) {
            self.manifests.keep(version, Arc::clone(manifest));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::fs::durable;
    use crate::store::tests::support::{OPTIONS, temporary_store};

    fn write(store: &Store) -> Manifest {
        let lock = store.lock().unwrap();
        let writer = store.begin(&lock, OPTIONS).unwrap();
        Arc::unwrap_or_clone(writer.commit(b"original").unwrap())
    }

    #[test]
    fn manifests_of_the_newest_images_are_in_memory() {
        let (_folder, store) = temporary_store();
        let written = [(); 3].map(|()| write(&store));
        let is_cached = |manifest: &Manifest| {
            let version = version(&store.manifest_file(manifest.id)).unwrap();
            store.manifests.find(manifest.id, version).is_some()
        };
        assert_eq!(written.each_ref().map(is_cached), [false, true, true]);
        // An older image is read, and does not displace the newest ones.
        for manifest in &written {
            assert_eq!(*store.cached_manifest(manifest.id).unwrap(), *manifest);
        }
        assert_eq!(written.each_ref().map(is_cached), [false, true, true]);
        store.manifests.retain(&[written[2].id]);
        assert_eq!(written.each_ref().map(is_cached), [false, false, true]);
    }

    #[test]
    fn a_manifest_that_was_replaced_is_read_again() {
        let (_folder, store) = temporary_store();
        let written = write(&store);
        let repaired = Manifest {
            meta: b"repaired".to_vec(),
            ..written.clone()
        };
        let file = store.encode(&repaired).unwrap();
        let path = store.manifest_file(written.id);
        assert_eq!(file.len() as u64, fs::metadata(&path).unwrap().len());
        durable::write(&path, &file).unwrap();
        assert_eq!(*store.cached_manifest(written.id).unwrap(), repaired);
        fs::remove_file(path).unwrap();
        assert!(matches!(
            store.cached_manifest(written.id),
            Err(ReadError::Missing { .. })
        ));
    }
}
