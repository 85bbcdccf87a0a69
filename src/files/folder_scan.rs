//! Scan of folders for changes, used where no complete record exists.

use std::collections::BTreeSet;
use std::fs::Metadata;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use super::file_set::changed_ns;

/// Limit on the scanned entries, about two seconds.
const ENTRIES_MAX: usize = 1_000_000;
/// Permission bit of folders in which only owners remove and rename.
const STICKY: u32 = 0o1000;
/// Mode bits of a shared folder: writable by all, removal by the owner only.
const SHARED: u32 = 0o1002;
/// Names of a store's own entries (`store::format::store_folder`): other runs' stores are nobody's files.
const STORE_ENTRIES: [&str; 3] = ["format", "images", "packs"];

/// A folder has more entries than the limit.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{} has more than {ENTRIES_MAX} files", .0.display())]
pub struct TooMany(pub PathBuf);

/// Returns the folders of files, except those in which all users can create files, such as `/tmp`: other programs change
/// files there all the time.
pub(super) fn folders_of<'a>(files: impl Iterator<Item = &'a Path>) -> BTreeSet<&'a Path> {
    let is_shared = |folder: &&Path| {
        let found = folder.symlink_metadata();
        found.is_ok_and(|found| found.mode() & SHARED == SHARED)
    };
    let mut folders: BTreeSet<&Path> = files.filter_map(Path::parent).collect();
    folders.retain(|folder| !is_shared(folder));
    folders
}

/// Scope of a scan.
#[derive(Clone, Copy, Debug)]
pub struct Scan<'a> {
    /// Folder that is searched recursively. The root folder is never searched.
    pub tree: Option<&'a Path>,
    /// Folders whose entries are checked, but not their subfolders.
    pub folders: &'a BTreeSet<&'a Path>,
    /// Paths that belong to ckpt-run.
    pub ours: &'a [PathBuf],
}

impl Scan<'_> {
    /// Returns the files, folders and links that changed at `since_ns` or later.
    ///
    /// # Errors
    /// There are too many entries.
    pub fn changed(self, since_ns: i64) -> Result<BTreeSet<PathBuf>, TooMany> {
        let mut found = BTreeSet::new();
        let mut see = |path: &Path, metadata: &Metadata| {
            if changed_ns(metadata) >= since_ns && !is_special(metadata) {
                found.insert(path.to_owned());
            }
        };
        self.walk(&mut see)?;
        Ok(found)
    }

    /// Calls `see` for every entry.
    ///
    /// # Errors
    /// There are too many entries.
    pub fn walk(self, see: &mut dyn FnMut(&Path, &Metadata)) -> Result<(), TooMany> {
        let mut left = ENTRIES_MAX;
        let tree = self.tree.filter(|tree| tree.parent().is_some());
        let in_tree = |path: &Path| tree.is_some_and(|tree| path.starts_with(tree));
        if let Some(tree) = tree {
            self.folder(tree, true, &mut left, see)?;
        }
        for folder in self.folders.iter().filter(|folder| !in_tree(folder)) {
            self.folder(folder, false, &mut left, see)?;
        }
        Ok(())
    }

    fn folder(
        self,
        top: &Path,
        deep: bool,
        left: &mut usize,
        see: &mut dyn FnMut(&Path, &Metadata),
    ) -> Result<(), TooMany> {
        let mut folders = vec![top.to_owned()];
        while let Some(folder) = folders.pop() {
            let is_others = is_others_folder(&folder);
            for entry in folder.read_dir().into_iter().flatten().flatten() {
                let path = entry.path();
                let Ok(metadata) = entry.metadata() else {
                    continue;
                };
                let is_ours = self.ours.iter().any(|ours| path.starts_with(ours));
                if is_ours || metadata.is_dir() && is_store(&path) {
                    continue;
                }
                *left = left.checked_sub(1).ok_or_else(|| TooMany(top.to_owned()))?;
                if !(is_others && is_others_file(&path, &metadata)) {
                    see(&path, &metadata);
                }
                if deep && metadata.is_dir() {
                    folders.push(path);
                }
            }
        }
        Ok(())
    }
}

/// Returns true if neither this user nor a job of this user's can remove or rename what others have in the folder: it is
/// sticky, as `/tmp`, or not the user's to write to.
fn is_others_folder(folder: &Path) -> bool {
    let us = rustix::process::geteuid();
    let is_others = |about: Metadata| about.uid() != us.as_raw() && about.mode() & STICKY != 0;
    !us.is_root()
        && (folder.metadata().is_ok_and(is_others)
            || rustix::fs::access(folder, rustix::fs::Access::WRITE_OK).is_err())
}

/// Returns true if the file is another user's, and this one cannot write to it.
fn is_others_file(path: &Path, metadata: &Metadata) -> bool {
    metadata.uid() != rustix::process::geteuid().as_raw()
        && (metadata.is_symlink()
            || rustix::fs::access(path, rustix::fs::Access::WRITE_OK).is_err())
}

/// Returns true for a socket, a named pipe or a device.
pub(super) fn is_special(metadata: &Metadata) -> bool {
    let kind = metadata.file_type();
    !(kind.is_file() || kind.is_dir() || kind.is_symlink())
}

fn is_store(folder: &Path) -> bool {
    STORE_ENTRIES
        .iter()
        .all(|name| folder.join(name).symlink_metadata().is_ok())
}

/// Lists all files and folders below a folder, without following links.
pub(super) fn everything_in(folder: &Path) -> io::Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    let mut see = |path: &Path, _: &Metadata| found.push(path.to_owned());
    let scan = Scan {
        tree: Some(folder),
        folders: &BTreeSet::new(),
        ours: &[],
    };
    scan.walk(&mut see).map_err(io::Error::other)?;
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn a_scan_finds_changes_and_omits_stores_and_our_files() {
        let folder = tempfile::tempdir().unwrap();
        let top = folder.path();
        for name in ["a/b", "store/images", "store/packs", "ours"] {
            fs::create_dir_all(top.join(name)).unwrap();
        }
        for name in ["a/b/file", "store/format", "ours/x", "old"] {
            fs::write(top.join(name), "x").unwrap();
        }
        let ours = [top.join("ours")];
        let scan = Scan {
            tree: Some(top),
            folders: &BTreeSet::from([top]),
            ours: &ours,
        };
        let expected = ["a", "a/b", "a/b/file", "old"].map(|name| top.join(name));
        assert_eq!(scan.changed(0).unwrap(), BTreeSet::from(expected));
        assert_eq!(scan.changed(i64::MAX).unwrap(), BTreeSet::new());
    }

    #[test]
    fn folders_of_all_users_are_left_out() {
        let place = tempfile::tempdir().unwrap();
        let folders = ["own", "shared"].map(|name| place.path().join(name));
        for (folder, mode) in folders.iter().zip([0o755, 0o1777]) {
            fs::create_dir(folder).unwrap();
            fs::set_permissions(folder, fs::Permissions::from_mode(mode)).unwrap();
        }
        let files = folders.each_ref().map(|folder| folder.join("x"));
        let found = folders_of(files.iter().map(PathBuf::as_path));
        assert_eq!(found, BTreeSet::from([&*folders[0]]));
    }
}
