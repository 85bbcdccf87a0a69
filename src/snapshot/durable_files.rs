//! Durability of what an image needs outside of it: the job's files, its output, and the record of its changes.
//!
//! After a power failure, a file that was written seconds before can be empty, and one that was removed or renamed can
//! be back. An image must not count as durable before that is excluded.

use std::collections::HashSet;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;

use nix::sys::stat::fstat;
use rustix::fs::syncfs;

use crate::files::KeptFiles;
use crate::run::run_context::RunContext;
use crate::safe_path::Spot;

/// Writes the file systems of the job's files, of its output and of the store to their disks. Blocks until that is done.
pub(super) fn write(context: &RunContext, set: &KeptFiles) {
    let mut written = HashSet::new();
    let mut write = |file: BorrowedFd<'_>| {
        let is_new = fstat(file).is_ok_and(|found| written.insert(found.st_dev));
        if let Err(error) = is_new.then(|| syncfs(file)).transpose() {
            let error = io::Error::from(error);
            tracing::warn!("the job's files may not survive a power failure: {error}");
        }
    };
    for output in [io::stdout().as_fd(), io::stderr().as_fd()] {
        write(output);
    }
    if let Ok(store) = File::open(context.store.path()) {
        write(store.as_fd());
    }
    let mut seen = HashSet::new();
    for (path, file) in &set.files {
        // The job may have removed the folder since.
        if !seen.contains(&file.identity.0)
            && let Ok(folder) = open_folder(path)
        {
            write(folder.as_fd());
            seen.insert(file.identity.0);
        }
    }
}

/// Opens the folder of a file.
fn open_folder(path: &Path) -> io::Result<File> {
    let through = Spot::of(path)?.path();
    File::open(through.parent().unwrap_or(&through))
}
