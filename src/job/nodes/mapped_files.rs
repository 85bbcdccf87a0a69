//! Access to the files that processes have mapped.
//!
//! `/proc/PID/map_files` has a link to each of them. Following it requires `CAP_CHECKPOINT_RESTORE` on the machine;
//! without it, a file is opened by its name or through a descriptor. A file that has neither cannot be opened.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use procfs::process::{MMapPath, MemoryMap};

use crate::job::files::is_deleted;

/// Returns a path that leads to the file that a process (a host pid) has mapped, also if the file's name has changed.
pub(in crate::job) fn map_link(pid: i32, map: &MemoryMap) -> PathBuf {
    let (from, to) = map.address;
    let link = PathBuf::from(format!("/proc/{pid}/map_files/{from:x}-{to:x}"));
    if are_followed() {
        return link;
    }
    another_way(pid, map).unwrap_or(link)
}

/// Returns true if this process may follow the links to mapped files: its own, and then also those of others.
fn are_followed() -> bool {
    static ARE_FOLLOWED: OnceLock<bool> = OnceLock::new();
    *ARE_FOLLOWED.get_or_init(|| {
        let links = fs::read_dir("/proc/self/map_files").into_iter().flatten();
        let looked = links.flatten().map(|link| fs::metadata(link.path()));
        let refused = |error: &io::Error| error.kind() == io::ErrorKind::PermissionDenied;
        !looked.filter_map(Result::err).any(|error| refused(&error))
    })
}

fn another_way(pid: i32, map: &MemoryMap) -> Option<PathBuf> {
    let MMapPath::Path(path) = &map.pathname else {
        return None;
    };
    let is_it = |path: &PathBuf| is_file(path, map.inode);
    if !is_deleted(path) {
        return Some(path.clone()).filter(is_it);
    }
    let descriptors = entries(Path::new(&format!("/proc/{pid}/fd")));
    descriptors
        .chain(path.parent().into_iter().flat_map(entries))
        .find(is_it)
}

fn entries(folder: &Path) -> impl Iterator<Item = PathBuf> + use<> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    entries.map(|entry| entry.path())
}

/// Returns true if the path leads to the file. The devices of `/proc/PID/maps` differ from others on some file systems.
fn is_file(path: &Path, inode: u64) -> bool {
    use std::os::unix::fs::MetadataExt;
    fs::metadata(path).is_ok_and(|found| found.ino() == inode)
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::fd::AsRawFd;
    use std::os::unix::fs::MetadataExt;

    use procfs::process::{MMPermissions, Process};

    use super::*;

    fn mapping(name: PathBuf, inode: u64) -> MemoryMap {
        let of_us = Process::myself().unwrap().maps().unwrap();
        let mut map = of_us.into_iter().next().unwrap();
        map.pathname = MMapPath::Path(name);
        map.inode = inode;
        map.perms = MMPermissions::SHARED;
        map
    }

    #[test]
    fn a_file_is_found_by_name_descriptor_or_other_name() {
        let folder = tempfile::tempdir().unwrap();
        let us = i32::try_from(std::process::id()).unwrap();
        let name = folder.path().join("a");
        let file = File::create(&name).unwrap();
        let inode = file.metadata().unwrap().ino();
        let found = another_way(us, &mapping(name.clone(), inode));
        assert_eq!(found, Some(name.clone()));

        let deleted = folder.path().join("a (deleted)");
        let other = folder.path().join("b");
        fs::rename(&name, &other).unwrap();
        let found = another_way(us, &mapping(deleted.clone(), inode));
        assert_eq!(
            found,
            Some(format!("/proc/{us}/fd/{}", file.as_raw_fd()).into())
        );
        drop(file);
        let found = another_way(us, &mapping(deleted.clone(), inode));
        assert_eq!(found, Some(other.clone()));
        fs::remove_file(other).unwrap();
        assert_eq!(another_way(us, &mapping(deleted, inode)), None);
    }
}
