//! The supervisor's private folder with short paths, for sockets, and the link to it in the store.

use std::ffi::OsStr;
use std::fs::{self, DirBuilder};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};

use tempfile::TempDir;

/// Folder of CRIU's logs in the store.
pub(crate) const LOGS: &str = "logs";
/// Parent of the work folders: it is short, because a socket's path has at most 107 bytes.
const WORK_PARENT: &str = "/tmp";
/// Prefix of their names.
const WORK_PREFIX: &str = "ckpt-run.";
/// Their mode: other users see neither sockets nor logs in them.
const MODE: u32 = 0o700;
/// Link in a store to its supervisor's work folder.
const WORK_LINK: &str = "work";

/// A private folder with short paths, for sockets. The store has a link to it, by which the next supervisor finds the
/// folder of a killed one.
#[derive(Debug)]
pub(crate) struct WorkFolder {
    folder: TempDir,
    link: PathBuf,
}

impl WorkFolder {
    /// Removes the folder of a killed supervisor and creates a new one. The caller holds the store's lock.
    pub fn new(store: &Path) -> io::Result<Self> {
        let link = store.join(WORK_LINK);
        if let Ok(previous) = fs::read_link(&link) {
            if is_work_folder(&previous) {
                keep_logs(&previous, &store.join(LOGS));
                if let Err(error) = fs::remove_dir_all(&previous) {
                    tracing::warn!(folder = %previous.display(), %error, "cannot remove an old work folder");
                }
            }
            fs::remove_file(&link)?;
        }
        let folder = tempfile::Builder::new()
            .prefix(WORK_PREFIX)
            .permissions(fs::Permissions::from_mode(MODE))
            .tempdir_in(WORK_PARENT)?;
        symlink(folder.path(), &link)?;
        Ok(Self { folder, link })
    }

    pub fn path(&self) -> &Path {
        self.folder.path()
    }

    /// Recreates the folder if it was cleaned up; in [`WORK_PARENT`] old files are removed from time to time.
    pub fn make_again(&self) -> io::Result<()> {
        match DirBuilder::new().mode(MODE).create(self.path()) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => Err(error),
            // Every user may create folders there, and CRIU loads the plugin by a link in this one.
            Err(_) if !is_work_folder(self.path()) => {
                let reason = format!("{} belongs to another user now", self.path().display());
                Err(io::Error::other(reason))
            }
            Ok(()) | Err(_) => Ok(()),
        }
    }
}

impl Drop for WorkFolder {
    fn drop(&mut self) {
        // The folder first: as long as the link exists, the folder can be found. At worst a link without a target
        // remains.
        let _ = fs::remove_dir_all(self.folder.path());
        let _ = fs::remove_file(&self.link);
    }
}

/// Removes the work folder that a killed supervisor has left; also for a caller that removes the store.
pub fn remove_work_folder(store: &Path) {
    if let Ok(folder) = fs::read_link(store.join(WORK_LINK))
        && is_work_folder(&folder)
    {
        // The remaining files are small, and in a folder that the system cleans up.
        let _ = fs::remove_dir_all(folder);
    }
}

/// Returns true if the path is a folder created by a supervisor of this user, and nothing else.
fn is_work_folder(path: &Path) -> bool {
    let named = path.parent() == Some(Path::new(WORK_PARENT))
        && path
            .file_name()
            .is_some_and(|name| name.as_bytes().starts_with(WORK_PREFIX.as_bytes()));
    let user = nix::unistd::geteuid().as_raw();
    named
        && fs::symlink_metadata(path)
            .is_ok_and(|metadata| metadata.is_dir() && metadata.uid() == user)
}

/// Keeps the logs of dumps that a killed supervisor has left in its work folder.
pub(crate) fn keep_logs(work: &Path, logs: &Path) {
    let within = |folder: &Path| {
        let entries = fs::read_dir(folder).into_iter().flatten().flatten();
        entries.map(|entry| entry.path())
    };
    for log in within(work).flat_map(|images| within(&images)) {
        let name = log.file_name().and_then(OsStr::to_str).unwrap_or_default();
        if name.starts_with("dump-") && log.is_file() {
            keep_log(&log, &logs.join(name));
        }
    }
}

/// Copies one log into the store.
pub(crate) fn keep_log(log: &Path, kept: &Path) {
    if let Err(error) = fs::copy(log, kept) {
        tracing::warn!(log = %kept.display(), %error, "CRIU's log is lost");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_work_folder_of_a_killed_supervisor_is_removed() {
        let store = tempfile::tempdir().unwrap();
        let killed = WorkFolder::new(store.path()).unwrap();
        let left = killed.path().to_owned();
        assert_eq!(left.metadata().unwrap().mode() & 0o777, MODE);
        fs::create_dir(left.join("plugins")).unwrap();
        std::mem::forget(killed);
        let next = WorkFolder::new(store.path()).unwrap();
        assert!(!left.exists());
        assert_eq!(
            fs::read_link(store.path().join("work")).unwrap(),
            next.path()
        );
        drop(next);
        assert_eq!(store.path().read_dir().unwrap().count(), 0);
    }

    #[test]
    fn a_link_to_anything_else_loses_nothing_but_itself() {
        let place = tempfile::Builder::new()
            .prefix("other.")
            .tempdir_in(WORK_PARENT)
            .unwrap();
        let inner = place.path().join("ckpt-run.inner");
        fs::create_dir(&inner).unwrap();
        let file = tempfile::Builder::new()
            .prefix(WORK_PREFIX)
            .tempfile_in(WORK_PARENT)
            .unwrap();
        let link = tempfile::Builder::new()
            .prefix(WORK_PREFIX)
            .make_in(WORK_PARENT, |path| symlink(&inner, path))
            .unwrap();
        let gone = Path::new("/tmp/ckpt-run.none");
        let dots = Path::new("/tmp/ckpt-run.x/..");
        for target in [place.path(), &inner, file.path(), link.path(), gone, dots] {
            let store = tempfile::tempdir().unwrap();
            symlink(target, store.path().join("work")).unwrap();
            WorkFolder::new(store.path()).unwrap();
            assert!(!is_work_folder(target), "{target:?}");
        }
        assert!(inner.is_dir() && file.path().exists());
        assert!(fs::symlink_metadata(link.path()).is_ok());
    }
}
