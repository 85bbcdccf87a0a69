//! Open and mapped files and folders of file systems that the machine has unmounted since the job began. A restore would
//! find other files there or none.
//!
//! A file system that nothing of the job is on may go: where mounts are shared, it is gone for the job, too.

use std::path::PathBuf;

use procfs::process::MMapPath;

use super::mount_tree::MountTree;
use super::{Finding, Obstacle};
use crate::job::descriptors::Descriptors;
use crate::job::tree;

/// Searches for the first file or folder on one of these mounts.
#[must_use]
pub fn find_unmounted(open: &[Descriptors], unmounted: &[u64]) -> Option<Obstacle> {
    let root = open.first().filter(|_| !unmounted.is_empty())?;
    let mounts = MountTree::of(root.process.host_pid);
    let is_on_it = |path: &PathBuf| {
        let mount = path.is_absolute().then(|| mounts.reached(path)).flatten();
        mount.is_some_and(|mount| unmounted.contains(&mount))
    };
    open.iter().find_map(|one| {
        let folders_and_files = one.with_folders().into_iter().map(|(_, path)| path);
        // A process that has exited has none.
        let mapped = tree::maps(one.process.host_pid).into_iter().flatten();
        let mapped = mapped.filter_map(|map| match map.pathname {
            MMapPath::Path(path) => Some(path),
            _ => None,
        });
        let path = folders_and_files.chain(mapped).find(is_on_it)?;
        Some(Obstacle::of(&one.process, Finding::Unmounted(path)))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn open_and_mapped_files_on_a_mount_are_found() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let me = i32::try_from(std::process::id()).unwrap();
        let mounts = MountTree::of(me);
        let of_file = mounts.reached(file.path()).unwrap();
        let mut open = [Descriptors::of(me).unwrap()];
        open[0].all.retain(|one| one.target == file.path());
        let on_it = |mount| find_unmounted(&open, &[0, mount]);
        assert_eq!(
            on_it(of_file).map(|obstacle| obstacle.finding),
            Some(Finding::Unmounted(file.path().to_owned()))
        );
        assert_eq!(find_unmounted(&open, &[]), None);
        assert_eq!(on_it(u64::MAX), None);
        // The program is mapped.
        open[0].all.clear();
        let program = mounts.reached(&std::env::current_exe().unwrap()).unwrap();
        assert!(find_unmounted(&open, &[program]).is_some());
    }
}
