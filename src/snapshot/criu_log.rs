//! CRIU's log of a dump. Writing the log must not prolong the freeze.

use std::path::{Path, PathBuf};

use tempfile::TempDir;

use crate::run::work_folder::keep_log;

/// A log in CRIU's images directory while the job is frozen: the store's disk may hang, and CRIU would hang with it.
/// When the value is dropped, after the job computes again, the log is copied to the store.
pub(crate) struct CriuLog {
    /// CRIU's images directory.
    folder: TempDir,
    kept: PathBuf,
}

impl CriuLog {
    pub fn new(folder: TempDir, kept: PathBuf) -> Self {
        Self { folder, kept }
    }

    /// CRIU's images directory.
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// Returns the path to which CRIU writes the log.
    pub fn path(&self) -> PathBuf {
        self.folder()
            .join(self.kept.file_name().unwrap_or_default())
    }

    /// Returns the path at which the user finds the log.
    pub fn kept(&self) -> &Path {
        &self.kept
    }
}

impl Drop for CriuLog {
    fn drop(&mut self) {
        // A CRIU that exited at once has not opened a log.
        if self.path().exists() {
            keep_log(&self.path(), &self.kept);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::run::work_folder::keep_logs;

    #[test]
    fn logs_are_kept_at_their_reported_paths() {
        let folder = tempfile::tempdir().unwrap();
        let [work, logs] = ["work", "logs"].map(|name| folder.path().join(name));
        fs::create_dir_all(&work).unwrap();
        fs::create_dir_all(&logs).unwrap();
        let log = |name: &str| {
            let images = tempfile::tempdir_in(&work).unwrap();
            CriuLog::new(images, logs.join(name))
        };
        let (ended, killed, silent) = (log("dump-1.log"), log("dump-2.log"), log("dump-3.log"));
        fs::write(ended.path(), "one").unwrap();
        fs::write(killed.path(), "two").unwrap();
        drop((ended, silent));
        let kept = |name| fs::read_to_string(logs.join(name)).ok();
        assert_eq!(kept("dump-1.log").as_deref(), Some("one"));
        assert_eq!(kept("dump-2.log"), None);
        keep_logs(&work, &logs);
        assert_eq!(kept("dump-2.log").as_deref(), Some("two"));
        assert_eq!(kept("dump-3.log"), None);
    }
}
