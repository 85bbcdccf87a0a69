//! Disk usage of a store, computed from its files alone: no key is needed, and no manifest is read.

use std::path::Path;

use serde::{Deserialize, Serialize};

use super::image_list::manifest_id;
use crate::sparse_file::allocated_bytes;
use crate::store::error::ReadError;
use crate::store::format::file_names;
use crate::store::format::store_folder::{IMAGES, PACKS};

/// Disk usage of a store.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Usage {
    /// Images in the store, including damaged ones.
    pub images: u64,
    /// Bytes that the images and their data occupy.
    pub bytes: u64,
}

/// Measures the store in this folder.
///
/// # Errors
/// The folder is not a store, or cannot be listed.
pub fn usage(store: &Path) -> Result<Usage, ReadError> {
    let mut usage = Usage::default();
    for folder in [IMAGES, PACKS] {
        for (path, kind) in file_names::list(&store.join(folder))? {
            // A file that was removed meanwhile occupies nothing.
            let found = path.symlink_metadata();
            usage.bytes += found.map_or(0, |found| allocated_bytes(&found));
            usage.images += u64::from(manifest_id(kind).is_some());
        }
    }
    Ok(usage)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn images_are_counted_and_holes_take_nothing() {
        let folder = tempfile::tempdir().unwrap();
        assert!(usage(folder.path()).is_err());
        for name in [IMAGES, PACKS] {
            fs::create_dir(folder.path().join(name)).unwrap();
        }
        assert_eq!(usage(folder.path()).unwrap(), Usage::default());
        for name in ["000001.manifest", "000002.manifest", "000002.damaged"] {
            fs::write(folder.path().join(IMAGES).join(name), "x").unwrap();
        }
        let pack = fs::File::create(folder.path().join(PACKS).join("any")).unwrap();
        pack.set_len(1 << 40).unwrap();
        let found = usage(folder.path()).unwrap();
        assert_eq!(found.images, 2);
        assert!(found.bytes < 1 << 20, "{found:?}");
    }
}
