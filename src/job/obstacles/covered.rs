//! Open files and folders below a mount point that was mounted later. Their paths lead to other files or to none.

use std::collections::HashSet;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, FileType, StatxFlags, statx};

use super::mount_tree::MountTree;
use super::{Finding, Obstacle};
use crate::job::descriptors::{Descriptors, Target};
use crate::job::files::is_deleted;
use crate::job::tree::Process;

/// Searches for the first open file or working directory whose path leads elsewhere.
pub(super) fn find(processes: &[Process], open: &[Descriptors]) -> Option<Obstacle> {
    let root = processes.first().map(|root| MountTree::of(root.host_pid));
    let mounts = root.unwrap_or_default();
    let mut right = HashSet::new();
    for one in open {
        for (link, path) in one.with_folders() {
            if !path.is_absolute() || is_deleted(&path) {
                continue;
            }
            let is_covered = |(path, mount): &(PathBuf, u64)| mounts.cover(path, *mount);
            let Some(place) = mount_of(&link).map(|mount| (path, mount)) else {
                continue;
            };
            if right.contains(&place) {
                continue;
            }
            // Most are found right without opening them: on older kernels a job that watches them could receive events.
            if !is_covered(&place) {
                right.insert(place);
                continue;
            }
            let place = Target::of(&link).and_then(|target| place_of(&target));
            if let Some((path, _)) = place.filter(is_covered) {
                return Some(Obstacle::of(&one.process, Finding::Covered(path)));
            }
        }
    }
    None
}

fn place_of(target: &Target) -> Option<(PathBuf, u64)> {
    let mount = mount_of(format!("/proc/self/fd/{}", target.held.as_raw_fd()))?;
    Some((target.path.clone(), mount))
}

/// Returns the mount number of the target of a link in `/proc`; `None` if it is neither a file nor a folder, or the
/// kernel is older than 5.8.
fn mount_of(link: impl AsRef<Path>) -> Option<u64> {
    let wanted = StatxFlags::TYPE | StatxFlags::MNT_ID;
    let about = statx(CWD, link.as_ref(), AtFlags::empty(), wanted).ok()?;
    let kind = FileType::from_raw_mode(about.stx_mode.into());
    let has_mount = StatxFlags::from_bits_retain(about.stx_mask).contains(StatxFlags::MNT_ID);
    let is_kept = matches!(kind, FileType::RegularFile | FileType::Directory);
    (has_mount && is_kept).then_some(about.stx_mnt_id)
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::process::Command;

    use super::*;
    use crate::job::tree;

    /// Looks at a process that changes its descriptors all the time. With two readings, about 110 of them find an obstacle.
    const LOOKS: usize = 500;

    #[test]
    fn own_files_are_reached_by_their_paths() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a");
        let file = File::create(&path).unwrap();
        let me = i32::try_from(std::process::id()).unwrap();
        let place = place_of(&Target::of(&link(me, &file)).unwrap()).unwrap();
        assert_eq!(place.0, path);
        assert_eq!(MountTree::of(me).reached(&path), Some(place.1));
        let device = File::open("/dev/null").unwrap();
        assert_eq!(mount_of(link(me, &device)), None);
    }

    fn link(pid: i32, file: &File) -> PathBuf {
        format!("/proc/{pid}/fd/{}", file.as_raw_fd()).into()
    }

    #[test]
    fn a_descriptor_that_changes_meanwhile_is_no_obstacle() {
        let file = tempfile::NamedTempFile::new().unwrap();
        // Device files are in a file system of their own.
        let script = "while [ $SECONDS -lt 60 ]; do exec 9< /dev/null; exec 9< \"$0\"; done";
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
