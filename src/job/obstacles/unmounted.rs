//! Open and mapped files and folders of file systems that the machine has unmounted since the job began. A restore would
//! find other files there or none.
//!
//! A file system that nothing of the job is on may go: where mounts are shared, it is gone for the job, too.

use std::path::{Path, PathBuf};

use procfs::process::MMapPath;

use super::{Finding, Obstacle};
use crate::job::descriptors::Descriptors;
use crate::job::tree;

/// Searches for the first file or folder below these mount points.
#[must_use]
pub fn find_unmounted(open: &[Descriptors], unmounted: &[PathBuf]) -> Option<Obstacle> {
    if unmounted.is_empty() {
        return None;
    }
    let is_below = |path: &Path| unmounted.iter().any(|mount| path.starts_with(mount));
    open.iter().find_map(|one| {
        let folders_and_files = one.with_folders().into_iter().map(|(_, path)| path);
        let mapped = tree::maps(one.process.host_pid).into_iter().flatten();
        let mapped = mapped.filter_map(|map| match map.pathname {
            MMapPath::Path(path) => Some(path),
            _ => None,
        });
        let path = folders_and_files
            .chain(mapped)
            .find(|path| is_below(path))?;
        Some(Obstacle::of(&one.process, Finding::Unmounted(path)))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn open_and_mapped_files_below_a_mount_are_found() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let program = std::env::current_exe().unwrap();
        let open = [Descriptors::of(i32::try_from(std::process::id()).unwrap()).unwrap()];
        let found = |mount: &Path| {
            let found = find_unmounted(&open, &[PathBuf::from("/other"), mount.to_owned()]);
            found.map(|obstacle| obstacle.finding)
        };
        for (path, is_mount) in [(file.path(), false), (&program, false), (&program, true)] {
            let mount = if is_mount {
                path
            } else {
                path.parent().unwrap()
            };
            let finding = found(mount);
            assert!(
                matches!(&finding, Some(Finding::Unmounted(path)) if path.starts_with(mount)),
                "{finding:?}"
            );
        }
        assert_eq!(found(&file.path().join("below")), None);
        assert_eq!(find_unmounted(&open, &[]), None);
    }
}
