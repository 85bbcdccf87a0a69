//! Open files and folders below a mount point that was mounted later. Their paths lead to other files or to none.

use std::collections::{HashMap, HashSet};
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, FileType, StatxFlags, statx};

use super::{Finding, Obstacle};
use crate::job::descriptors::{Descriptors, Target};
use crate::job::files::is_deleted;
use crate::job::tree::Process;
use crate::mount_table::Mount;

/// Mounts of a mount namespace.
#[derive(Debug, Default)]
struct Mounts {
    /// Mount of `/` below all others.
    top: Option<u64>,
    /// Mounts by the mount that each is on, and by path.
    above: HashMap<u64, HashMap<PathBuf, u64>>,
    known: HashSet<u64>,
}

/// Searches for the first open file or working directory whose path leads elsewhere.
pub(super) fn find(processes: &[Process], open: &[Descriptors]) -> Option<Obstacle> {
    let root = processes.first().map(|root| Mounts::of(root.host_pid));
    let mounts = root.unwrap_or_default();
    let mut seen = HashSet::new();
    for one in open {
        for (link, listed) in one.with_folders() {
            // What is no path stays none, and needs no look.
            let Some((path, mount)) = listed.is_absolute().then(|| place_of(&link)).flatten()
            else {
                continue;
            };
            if !is_deleted(&path)
                && seen.insert((path.clone(), mount))
                && mounts.cover(&path, mount)
            {
                return Some(Obstacle::of(&one.process, Finding::Covered(path)));
            }
        }
    }
    None
}

impl Mounts {
    /// Reads the mounts of a process (a host pid); empty if it has exited.
    fn of(pid: i32) -> Self {
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
    fn cover(&self, path: &Path, mount: u64) -> bool {
        let reached = self.reached(path);
        self.known.contains(&mount) && reached.is_some_and(|reached| reached != mount)
    }

    /// Returns the mount that a path without links leads to.
    fn reached(&self, path: &Path) -> Option<u64> {
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

/// Returns path and mount number of a link's target in `/proc`; `None` if it is neither a file nor a folder, or the
/// kernel is older than 5.8.
fn place_of(link: &Path) -> Option<(PathBuf, u64)> {
    let target = Target::of(link)?;
    let wanted = StatxFlags::TYPE | StatxFlags::MNT_ID;
    let about = statx(&target.held, "", AtFlags::EMPTY_PATH, wanted).ok()?;
    let kind = FileType::from_raw_mode(about.stx_mode.into());
    let has_mount = StatxFlags::from_bits_retain(about.stx_mask).contains(StatxFlags::MNT_ID);
    let is_kept = matches!(kind, FileType::RegularFile | FileType::Directory);
    (has_mount && is_kept).then_some((target.path, about.stx_mnt_id))
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::fd::AsRawFd;
    use std::process::Command;

    use super::*;
    use crate::job::tree;

    /// Looks at a process that changes its descriptors all the time. With two readings, about 110 of them find an obstacle.
    const LOOKS: usize = 500;

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
        let mounts = Mounts::new(mounts.into_iter());
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

    #[test]
    fn own_files_are_reached_by_their_paths() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a");
        let file = File::create(&path).unwrap();
        let me = i32::try_from(std::process::id()).unwrap();
        let place = place_of(&link(me, &file)).unwrap();
        assert_eq!(place.0, path);
        assert_eq!(Mounts::of(me).reached(&path), Some(place.1));
        let device = File::open("/dev/null").unwrap();
        assert_eq!(place_of(&link(me, &device)), None);
    }

    fn link(pid: i32, file: &File) -> PathBuf {
        format!("/proc/{pid}/fd/{}", file.as_raw_fd()).into()
    }

    #[test]
    fn a_descriptor_that_changes_meanwhile_is_no_obstacle() {
        let file = tempfile::NamedTempFile::new().unwrap();
        // Device files are in a file system of their own.
        let script = "while :; do exec 9< /dev/null; exec 9< \"$0\"; done";
        let mut shell = Command::new("bash")
            .args(["-c", script])
            .arg(file.path())
            .spawn()
            .unwrap();
        let process = tree::describe(i32::try_from(shell.id()).unwrap()).unwrap();
        let found: Vec<_> = (0..LOOKS)
            .filter_map(|_| find(&[process], &Descriptors::of_present(&[process])))
            .collect();
        shell.kill().unwrap();
        shell.wait().unwrap();
        assert_eq!(found, []);
    }
}
