//! CRIU's log of a dump, which must not be what the job stands still for.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use tempfile::TempDir;

/// Its name in CRIU's images directory.
const NAME: &str = "dump.log";

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
        self.folder().join(NAME)
    }

    /// Where people find it.
    pub fn kept(&self) -> &Path {
        &self.kept
    }
}

impl Drop for DumpLog {
    fn drop(&mut self) {
        match fs::copy(self.path(), &self.kept) {
            // CRIU that ended at once has opened none.
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                tracing::warn!(log = %self.kept.display(), %error, "CRIU's log is lost");
            }
            Ok(_) | Err(_) => {}
        }
    }
}
