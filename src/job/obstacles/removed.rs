//! Removed files and folders that a process has open and CRIU (4.2) cannot make again, and sockets that it binds elsewhere.
//!
//! CRIU makes removed folders and files again for the restore, in the order of the dump, and removes them in the same order
//! after they were opened.
//! - If there is another folder at the path of a removed one, the process gets that one, and an empty one is gone afterwards;
//!   with files in it, no restore succeeds.
//! - For a removed file it needs the folders above it.
//! - It adds up to 18 bytes to the name of a removed file for a moment.
//! - Without root, a file can get no owner and group but the user's, or the group of its folder (setgid).
//! - A file without a name in the folder of a removed one is not found.
//! - A unix socket is bound by its former name, and its file neither renamed nor linked afterwards. Where ckpt-run cannot do that
//!   either, programs would connect to a file that belongs to no socket, and fail (ECONNREFUSED).
//! - A connection whose other end was closed, and the file of whose socket was removed: the restore waits for ever.
//! - A folder in which it has made something else later cannot be removed, and the restore fails ("Couldn't unlink remap").

use std::collections::{HashMap, HashSet};
use std::ffi::OsStr;
use std::fs::{self, File, Metadata};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use nix::libc;
use nix::unistd::{getegid, geteuid};
use procfs::process::Stat;

use super::{Finding, Obstacle};
use crate::job::descriptors::{Descriptor, Descriptors, Target, is_memfd};
use crate::job::files::{is_deleted, path_without_names};
use crate::job::nodes::{Borrower, BoundFile, Use, is_socket};
use crate::job::tree::Process;

/// Longest name of a file (`NAME_MAX`), and what CRIU adds to it: `.cr.`, up to eight digits, `.ghost`.
const NAME_BYTES_MAX: usize = 255;
const ADDED_BYTES: usize = 18;
/// End of the target of a link to a removed file; a name may end in this way, too.
const REMOVED: &[u8] = b" (deleted)";

/// Searches for the first such file or folder. The first of the processes is the root of their tree.
pub(super) fn find(processes: &[(Process, Stat)], open: &[Descriptors]) -> Option<Obstacle> {
    let by_pid: HashMap<i32, &Descriptors> =
        open.iter().map(|one| (one.process.host_pid, one)).collect();
    let order = dump_order(processes).into_iter();
    let mut folders = Vec::new();
    let mut seen = HashSet::new();
    order.filter_map(|pid| by_pid.get(&pid)).find_map(|one| {
        let opened = one.all.iter().filter(|one| is_deleted(&one.target));
        let folder = PathBuf::from(format!("/proc/{}/cwd", one.process.host_pid));
        let mut links = opened.map(Descriptor::link).chain([folder]);
        let finding = links.find_map(|link| {
            // While the process computes, the link may lead elsewhere at the next look.
            let Target { held, path } = Target::of(&link)?;
            let about = File::from(held).metadata().ok()?;
            if let Some(path) = path_without_names(&path, &about) {
                return Some(Finding::NameElsewhere(path));
            }
            let path = removed(&path, &about)?;
            let is_new = seen.insert((about.dev(), about.ino()));
            let finding = is_new.then(|| {
                let by_path = lost(&path, about.is_dir(), &folders);
                by_path.or_else(|| {
                    is_of_others(&path, &about).then(|| Finding::RemovedOwner(path.clone()))
                })
            })?;
            if about.is_dir() {
                folders.push(path);
            }
            finding
        });
        Some(Obstacle::of(&one.process, finding?))
    })
}

/// Searches for the first unix socket whose file no longer has the name by which it was bound.
pub(super) fn find_moved_sockets(open: &[Descriptors]) -> Option<Obstacle> {
    for Descriptors { process, all } in open {
        let mut sockets = all.iter().filter(|one| is_socket(&one.target)).peekable();
        if sockets.peek().is_none() {
            continue;
        }
        let Some(borrower) = Borrower::new(process.host_pid) else {
            continue;
        };
        let finding = sockets.find_map(|one| {
            let (file, usage) = borrower.named_socket(one.number)?;
            match (file, usage) {
                (BoundFile::Removed(name) | BoundFile::Lost(name), Use::HungUp) => {
                    Some(Finding::HungUp(name))
                }
                (BoundFile::Lost(name), Use::Bound) => Some(Finding::LostSocket(name)),
                (BoundFile::Elsewhere(name), Use::Bound | Use::BoundAndConnected) => {
                    Some(Finding::MovedSocket(name))
                }
                _ => None,
            }
        });
        if let Some(finding) = finding {
            return Some(Obstacle::of(process, finding));
        }
    }
    None
}

/// Returns the host pids in the order in which CRIU dumps them: a child with all below it, then the next child.
fn dump_order(processes: &[(Process, Stat)]) -> Vec<i32> {
    let mut children: HashMap<i32, Vec<i32>> = HashMap::new();
    for (process, stat) in processes.iter().rev() {
        children
            .entry(stat.ppid)
            .or_default()
            .push(process.host_pid);
    }
    let root = processes.first().map(|(root, _)| root.host_pid);
    let mut next: Vec<i32> = root.into_iter().collect();
    let mut order = Vec::new();
    while let Some(pid) = next.pop() {
        order.push(pid);
        next.extend(children.remove(&pid).unwrap_or_default());
    }
    order
}

/// Returns the former path of a removed file or folder.
fn removed(path: &Path, about: &Metadata) -> Option<PathBuf> {
    let bytes = path.as_os_str().as_bytes();
    // The kernel removes the names of an exited process from /proc itself.
    let is_kernels = path.starts_with("/proc") || is_memfd(path);
    let is_removed = about.nlink() == 0 && !is_kernels;
    let path = bytes.strip_suffix(REMOVED).filter(|_| is_removed)?;
    Some(OsStr::from_bytes(path).into())
}

/// Returns the problem with a removed file or folder; `earlier` are the removed folders that CRIU makes before it.
fn lost(path: &Path, is_folder: bool, earlier: &[PathBuf]) -> Option<Finding> {
    let path = path.to_owned();
    if let Some(folder) = earlier.iter().find(|folder| path.starts_with(folder)) {
        let folder = folder.clone();
        return Some(Finding::RemovedTogether { path, folder });
    }
    let name_bytes = path.file_name().map_or(0, OsStr::len);
    if !is_folder && name_bytes > NAME_BYTES_MAX - ADDED_BYTES {
        return Some(Finding::RemovedName(path));
    }
    let other = in_the_way(&path, is_folder)?.to_owned();
    Some(Finding::Removed { path, other })
}

/// Returns true if a file cannot have its owner and group again.
fn is_of_others(path: &Path, about: &Metadata) -> bool {
    let (user, group) = (geteuid(), getegid().as_raw());
    let is_given = || {
        let folder = path.parent().and_then(|folder| folder.metadata().ok());
        folder.is_some_and(|it| it.mode() & libc::S_ISGID != 0 && it.gid() == about.gid())
    };
    let has_group = about.gid() == group || is_given();
    !(user.is_root() || about.uid() == user.as_raw() && has_group)
}

/// Returns what is in the way of a removed file or folder.
fn in_the_way(path: &Path, is_folder: bool) -> Option<&Path> {
    let kind = |path: &Path| fs::symlink_metadata(path).ok();
    if is_folder && kind(path).is_some() {
        return Some(path);
    }
    // The kernel's path has no links.
    let mut above = path.ancestors().skip(1);
    let nearest = above.find_map(|folder| Some((folder, kind(folder)?)));
    let (folder, about) = nearest?;
    (!about.is_dir()).then_some(folder)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;
    use crate::job::tree::stat;

    fn found_below(root: &Path) -> Option<Finding> {
        let me = i32::try_from(std::process::id()).unwrap();
        let mut open = Descriptors::of(me).unwrap();
        // Other tests of this process have files open.
        open.all.retain(|one| one.target.starts_with(root));
        let found = find(&[(open.process, stat(me).unwrap())], &[open]);
        found.map(|found| found.finding)
    }

    #[test]
    fn what_is_made_within_a_folder_that_is_removed_first_is_found() {
        let place = tempfile::tempdir().unwrap();
        let path = |name: &str| place.path().join(name);
        let lost = |name: &str, earlier: &str| super::lost(&path(name), true, &[path(earlier)]);
        for name in ["a/b", "a/b/c", "a"] {
            let (path, folder) = (path(name), path("a"));
            let expected = Finding::RemovedTogether { path, folder };
            assert_eq!(lost(name, "a"), Some(expected));
        }
        assert_eq!(lost("a", "a/b"), None);
        for (bytes, is_long) in [(237, false), (238, true)] {
            let path = path(&"a".repeat(bytes));
            let found = super::lost(&path, false, &[]);
            assert_eq!(found, is_long.then_some(Finding::RemovedName(path)));
        }
        assert_eq!(lost("ab", "a"), None);
    }

    #[test]
    fn a_child_is_dumped_with_all_below_it() {
        let me = i32::try_from(std::process::id()).unwrap();
        let process = |(pid, parent)| {
            let process = Process {
                host_pid: pid,
                pid,
                resident: 0,
            };
            let mut stat = stat(me).unwrap();
            stat.ppid = parent;
            (process, stat)
        };
        // In the order in which they are found: by their distance from the root.
        let tree = [(1, 0), (2, 1), (3, 1), (6, 2), (5, 2), (4, 3), (7, 6)];
        assert_eq!(dump_order(&tree.map(process)), [1, 2, 6, 7, 5, 3, 4]);
    }

    #[test]
    fn what_has_taken_the_place_of_a_removed_folder_is_found() {
        let place = tempfile::tempdir().unwrap();
        let root = place.path().canonicalize().unwrap();
        let (folder, above) = (root.join("above/folder"), root.join("above"));
        let lone = above.join("other/file");
        fs::create_dir_all(&folder).unwrap();
        fs::create_dir(lone.parent().unwrap()).unwrap();
        let opened = File::open(&folder).unwrap();
        let file = File::create(&lone).unwrap();
        let found = || match found_below(&root)? {
            Finding::Removed { path, other } => Some((path, other)),
            other => panic!("{other}"),
        };
        assert_eq!(found(), None);
        let odd = root.join("name (deleted)");
        let _odd = File::create(&odd).unwrap();
        fs::create_dir(root.join("name")).unwrap();
        assert_eq!(found(), None);
        fs::remove_dir_all(lone.parent().unwrap()).unwrap();
        fs::remove_dir(&folder).unwrap();
        assert_eq!(found(), None);
        fs::create_dir(&folder).unwrap();
        assert_eq!(found(), Some((folder.clone(), folder.clone())));
        drop(opened);
        assert_eq!(found(), None);
        fs::remove_dir(&folder).unwrap();
        fs::remove_dir(&above).unwrap();
        for make in [
            |path: &Path| fs::write(path, ""),
            |path: &Path| symlink("/", path),
        ] {
            make(&above).unwrap();
            assert_eq!(found(), Some((lone.clone(), above.clone())));
            fs::remove_file(&above).unwrap();
        }
        drop(file);
    }
}
