//! CRIU's log of a dump, which must not be what the job stands still for.

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};

use tempfile::TempDir;

/// In CRIU's images directory while the job stands still: the store's disk may hang, and CRIU with it. Dropped, when the
/// job computes again, it is kept in the store.
pub(super) struct DumpLog {
    /// CRIU's images directory.
    folder: TempDir,
    kept: PathBuf,
}

impl DumpLog {
    pub fn new(folder: TempDir, kept: PathBuf) -> Self {
        Self { folder, kept }
    }

    /// CRIU's images directory.
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// Where CRIU writes it.
    pub fn path(&self) -> PathBuf {
        self.folder()
            .join(self.kept.file_name().unwrap_or_default())
    }

    /// Where people find it.
    pub fn kept(&self) -> &Path {
        &self.kept
    }
}

impl Drop for DumpLog {
    fn drop(&mut self) {
        // CRIU that ended at once has opened none.
        if self.path().exists() {
            keep(&self.path(), &self.kept);
        }
    }
}

/// Keeps the logs of dumps that a killed supervisor has left in its work folder.
pub(super) fn keep_all(work: &Path, logs: &Path) {
    let within = |folder: &Path| {
        let entries = fs::read_dir(folder).into_iter().flatten().flatten();
        entries.map(|entry| entry.path())
    };
    for log in within(work).flat_map(|images| within(&images)) {
        let name = log.file_name().and_then(OsStr::to_str).unwrap_or_default();
        if name.starts_with("dump-") && log.is_file() {
            keep(&log, &logs.join(name));
        }
    }
}

fn keep(log: &Path, kept: &Path) {
    if let Err(error) = fs::copy(log, kept) {
        tracing::warn!(log = %kept.display(), %error, "CRIU's log is lost");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn logs_are_kept_where_they_are_named_also_those_of_a_killed_supervisor() {
        let folder = tempfile::tempdir().unwrap();
        let [work, logs] = ["work", "logs"].map(|name| folder.path().join(name));
        fs::create_dir_all(&work).unwrap();
        fs::create_dir_all(&logs).unwrap();
        let log = |name: &str| {
            let images = tempfile::tempdir_in(&work).unwrap();
            DumpLog::new(images, logs.join(name))
        };
        let (ended, killed, silent) = (log("dump-1.log"), log("dump-2.log"), log("dump-3.log"));
        fs::write(ended.path(), "one").unwrap();
        fs::write(killed.path(), "two").unwrap();
        drop((ended, silent));
        let kept = |name| fs::read_to_string(logs.join(name)).ok();
        assert_eq!(kept("dump-1.log").as_deref(), Some("one"));
        assert_eq!(kept("dump-2.log"), None);
        keep_all(&work, &logs);
        assert_eq!(kept("dump-2.log").as_deref(), Some("two"));
        assert_eq!(kept("dump-3.log"), None);
    }
}
