//! Copies of the working folder, one for each run, all at the same path.
//!
//! The copy is created beside the folder, so that `..` leads to the same place. It is mounted over the folder in a
//! mount namespace of the rehearsal, so that a path into the folder on the job's command line leads into the copy. The
//! job's working folder is the copy under its own path, because the watcher reports the job's files by that path.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sched::{CloneFlags, unshare};
use nix::sys::statvfs::statvfs;
use tempfile::TempDir;

use super::RehearsalError;
use super::folder_content::FolderContent;
use super::folder_copy::{COPY_BYTES_MAX, COPY_FILES_MAX, copy_folder, measure};
use super::run_rehearsal::End;
use super::trial::{FOLDER_PREFIX, file_error};
use crate::history::counted;
use crate::mount_table::Mount;
use crate::run::size;
use crate::sandbox;
use crate::store::check_new;
use crate::trust::{self, Variable};

/// Disk space that a copy must leave free, for the files that the job writes.
const FREE_BYTES_MIN: u64 = 1 << 30;

/// Working folder and its present copy. On drop, the copy is removed.
pub(super) struct Copies {
    original: PathBuf,
    store: PathBuf,
    /// The store and ckpt-run's own output, which are not copied.
    excluded: Vec<PathBuf>,
    copy: TempDir,
    /// Content of the first copy. If a later copy differs, the runs would differ, too.
    first: Option<FolderContent>,
    is_mounted: bool,
    /// Variable for programs in the user namespace that was entered, if one was.
    variable: Option<Variable>,
}

impl Copies {
    /// Prepares copies of the working folder; the error text is the reason why this is impossible. Must be called from
    /// the main thread, which enters a new mount namespace.
    pub(super) fn of_working_folder(store: &Path) -> Result<Self, String> {
        let original =
            std::env::current_dir().map_err(|error| format!("it cannot be found: {error}"))?;
        let parent = original
            .parent()
            .ok_or_else(|| "it is the root folder".to_owned())?;
        if let Some(mount) = mount_in(&original) {
            return Err(format!("{} is a mount point", mount.display()));
        }
        let unreadable = |error: io::Error| format!("it cannot be read: {error}");
        let store = absolute(store).map_err(unreadable)?;
        let mut excluded = vec![store.clone()];
        excluded.extend(own_output());
        let found = measure(&original, &|path| is_ours(path, &excluded)).map_err(unreadable)?;
        if !found.is_small() {
            return Err(too_large());
        }
        let no_copy =
            |error: io::Error| format!("no copy can be made in {}: {error}", parent.display());
        let disk = statvfs(parent).map_err(|errno| no_copy(errno.into()))?;
        let free = disk.blocks_available().saturating_mul(disk.fragment_size());
        if free < found.bytes.saturating_add(FREE_BYTES_MIN) {
            return Err(format!("the disk has only {} free", size(free)));
        }
        let copy = tempfile::Builder::new()
            .prefix(FOLDER_PREFIX)
            .tempdir_in(parent);
        let copy = copy.map_err(no_copy)?;
        // In a user namespace, the owners of the folders above can no longer be checked.
        for place in [&*store, copy.path()] {
            check_new(place).map_err(|error| error.to_string())?;
        }
        let variable = enter_namespace()
            .map_err(|error| format!("a separate mount namespace is not permitted: {error}"))?;
        Ok(Self {
            variable,
            original,
            store,
            excluded,
            copy,
            first: None,
            is_mounted: false,
        })
    }

    /// Returns the original folder.
    pub(super) fn original(&self) -> &Path {
        &self.original
    }

    /// Returns the working folder of the job.
    pub(super) fn path(&self) -> &Path {
        self.copy.path()
    }

    /// Returns the variable of programs that run in this process's namespaces.
    pub(super) fn variable(&self) -> Option<Variable> {
        self.variable.clone()
    }

    /// Returns a folder outside the mount for the trial's own folder: beside the store, or beside the working folder if
    /// the store is in that.
    pub(super) fn place_for_trial(&self) -> &Path {
        let beside = self.store.parent().unwrap_or(Path::new("/"));
        if beside.starts_with(&self.original) {
            self.original.parent().unwrap_or(beside)
        } else {
            beside
        }
    }

    /// Replaces the present copy by a new one. No process of the job may be left. The result is unclear if the folder
    /// has changed since the first copy.
    pub(super) fn renew(&mut self) -> Result<(), End> {
        self.unmount();
        let path = self.copy.path();
        fs::remove_dir_all(path).map_err(file_error(path))?;
        copy_folder(&self.original, path, &|entry| {
            is_ours(entry, &self.excluded)
        })
        .map_err(file_error(path))?;
        let content = self.content()?;
        let first = self.first.get_or_insert_with(|| content.clone());
        if let Some(change) = first.difference(&content, "at first", "later") {
            return Err(End::unclear(
                format!("the working folder changed during the rehearsal: {change}"),
                "rehearse again while nothing else writes to it",
            ));
        }
        let none = None::<&str>;
        mount(Some(path), &self.original, none, MsFlags::MS_BIND, none)
            .map_err(|errno| file_error(&self.original)(errno.into()))?;
        self.is_mounted = true;
        Ok(())
    }

    /// Reads the copy in its state after the run.
    pub(super) fn content(&self) -> Result<FolderContent, RehearsalError> {
        FolderContent::of(self.path()).map_err(file_error(self.path()))
    }

    fn unmount(&mut self) {
        if std::mem::take(&mut self.is_mounted) {
            // After an error, the mount ends with the namespace.
            let _ = umount2(&self.original, MntFlags::MNT_DETACH);
        }
    }
}

impl Drop for Copies {
    fn drop(&mut self) {
        self.unmount();
    }
}

/// Returns the files to which stdout and stderr of ckpt-run lead.
fn own_output() -> impl Iterator<Item = PathBuf> {
    let paths = [1, 2].map(|number| format!("/proc/self/fd/{number}"));
    paths
        .into_iter()
        .filter_map(|path| fs::read_link(path).ok())
}

/// Returns true for paths that a rehearsal does not copy: `excluded`, and folders of rehearsals.
fn is_ours(path: &Path, excluded: &[PathBuf]) -> bool {
    let name = path.file_name().unwrap_or_default().as_encoded_bytes();
    excluded.iter().any(|one| one == path) || name.starts_with(FOLDER_PREFIX.as_bytes())
}

fn too_large() -> String {
    format!(
        "it has more than {} or {}",
        size(COPY_BYTES_MAX),
        counted(COPY_FILES_MAX as u64, "file")
    )
}

/// Resolves symbolic links in the existing part of a path.
fn absolute(path: &Path) -> io::Result<PathBuf> {
    let path = std::path::absolute(path)?;
    for folder in path.ancestors() {
        if let Ok(real) = folder.canonicalize() {
            let rest = path.strip_prefix(folder).map_err(io::Error::other)?;
            return Ok(if rest.as_os_str().is_empty() {
                real
            } else {
                real.join(rest)
            });
        }
    }
    Ok(path)
}

/// Returns a mount point at or below the folder: a copy would lack the content of the mount.
fn mount_in(folder: &Path) -> Option<PathBuf> {
    let mounts = Mount::all_of("self").ok()?;
    let mut points = mounts.into_iter().map(|mount| mount.point);
    points.find(|point| point.starts_with(folder))
}

/// Enters a mount namespace that still receives the machine's mounts. Returns the variable for programs in a user
/// namespace, if this process may only enter both.
fn enter_namespace() -> io::Result<Option<Variable>> {
    let variable = match unshare(CloneFlags::CLONE_NEWNS) {
        Err(Errno::EPERM) => {
            sandbox::enter_user_namespace(CloneFlags::CLONE_NEWNS)?;
            Some(trust::owners_checked()?)
        }
        other => {
            other?;
            None
        }
    };
    let none = None::<&str>;
    mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_SLAVE, none)?;
    Ok(variable)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_is_resolved_as_far_as_it_exists() {
        let place = tempfile::tempdir().unwrap();
        let real = place.path().canonicalize().unwrap();
        fs::create_dir(real.join("a")).unwrap();
        std::os::unix::fs::symlink(real.join("a"), real.join("link")).unwrap();
        let found = |name: &str| absolute(&real.join(name)).unwrap();
        assert_eq!(found("link/not/yet"), real.join("a/not/yet"));
        assert_eq!(found("link"), real.join("a"));
    }

    #[test]
    fn the_store_and_other_rehearsals_are_not_copied() {
        let excluded = [PathBuf::from("/w/runs/store")];
        let ours = |path: &str| is_ours(Path::new(path), &excluded);
        assert!(ours("/w/runs/store"));
        assert!(ours("/w/.ckpt-run-rehearsal-x1"));
        assert!(!ours("/w/runs") && !ours("/w/store"));
    }

    #[test]
    fn a_folder_that_is_a_mount_point_is_found() {
        assert_eq!(
            mount_in(Path::new("/proc")).as_deref(),
            Some(Path::new("/proc"))
        );
        let place = tempfile::tempdir().unwrap();
        assert_eq!(mount_in(place.path()), None);
    }
}
