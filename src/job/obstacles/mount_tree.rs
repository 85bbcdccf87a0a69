//! The mounts of a mount namespace, to find the one that a path leads to.

use std::collections::{HashMap, HashSet};
use std::path::{Path, PathBuf};

use crate::mount_table::Mount;

/// Mounts of a mount namespace.
#[derive(Debug, Default)]
pub(super) struct MountTree {
    /// Mount of `/` below all others.
    top: Option<u64>,
    /// Mounts by the mount that each is on, and by path.
    above: HashMap<u64, HashMap<PathBuf, u64>>,
    known: HashSet<u64>,
}

impl MountTree {
    /// Reads the mounts of a process (a host pid); empty if it has exited.
    pub fn of(pid: i32) -> Self {
        let list = Mount::all_of(pid).unwrap_or_default();
        Self::new(list.into_iter().map(|it| (it.id, it.below, it.point)))
    }

    /// Creates the tree from mounts, each with its number, the number of its parent mount, and its path.
    fn new(list: impl Iterator<Item = (u64, u64, PathBuf)>) -> Self {
        let list: Vec<_> = list.collect();
        let known: HashSet<u64> = list.iter().map(|(id, ..)| *id).collect();
        let mut mounts = Self {
            known,
            ..Self::default()
        };
        for (id, below, point) in list {
            if below == id || !mounts.known.contains(&below) {
                mounts.top = Some(id);
            } else {
                mounts.above.entry(below).or_default().insert(point, id);
            }
        }
        mounts
    }

    /// Returns true if the mount is in this tree and the path leads into another mount.
    pub fn cover(&self, path: &Path, mount: u64) -> bool {
        let reached = self.reached(path);
        self.known.contains(&mount) && reached.is_some_and(|reached| reached != mount)
    }

    /// Returns the mount that a path without links leads to.
    pub fn reached(&self, path: &Path) -> Option<u64> {
        let mut at = self.top?;
        let folders: Vec<&Path> = path.ancestors().collect();
        for folder in folders.into_iter().rev() {
            // Mounts form a tree, so the loop ends.
            while let Some(next) = self.above.get(&at).and_then(|above| above.get(folder)) {
                at = *next;
            }
        }
        Some(at)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_leads_into_the_mount_on_top() {
        let mounts = [
            (20, 1, "/"),
            (21, 20, "/a/b"),
            // Mounted over the parent folder of the previous mount.
            (22, 20, "/a"),
            (23, 22, "/a/c"),
            (24, 23, "/a/c"),
        ];
        let mounts = mounts.map(|(id, below, point)| (id, below, PathBuf::from(point)));
        let mounts = MountTree::new(mounts.into_iter());
        for (path, id) in [
            ("/", 20),
            ("/x/y", 20),
            ("/a", 22),
            ("/a/b/file", 22),
            ("/a/c", 24),
            ("/a/cc", 22),
        ] {
            assert_eq!(mounts.reached(Path::new(path)), Some(id), "{path}");
        }
        assert!(mounts.cover(Path::new("/a/b/file"), 21));
        assert!(!mounts.cover(Path::new("/a/b/file"), 22));
        assert!(
            !mounts.cover(Path::new("/a/b/file"), 99),
            "not in this namespace"
        );
    }
}
