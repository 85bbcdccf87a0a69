//! Durability of what an image needs outside of it: the job's files, its output, and the record of its changes.
//!
//! After a power failure, a file that was written seconds before can be empty, and one that was removed or renamed can
//! be back. An image must not count as durable before that is excluded.

use std::collections::HashSet;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::Duration;

use nix::sys::stat::fstat;
use rustix::fs::syncfs;

use crate::files::KeptFiles;
use crate::run::format::chain;
use crate::safe_path::Spot;

/// Time for the file systems.
pub(super) const LIMIT: Duration = Duration::from_secs(120);
/// Time for the file systems while the job waits for its end: the machine may be about to stop, and others may have written
/// much to them.
pub(super) const LIMIT_AT_STOP: Duration = Duration::from_secs(10);

/// The file systems of the job's files, of its output and of the store, on their way to their disks.
pub(super) struct Writing(Receiver<io::Result<()>>);

impl Writing {
    /// Begins on a thread of its own, because a disk or server may never answer.
    pub fn begin(store: &Path, set: &Arc<KeptFiles>) -> Self {
        let (done, is_done) = channel();
        let (store, set) = (store.to_owned(), Arc::clone(set));
        // Nobody receives the result after the limit.
        thread::spawn(move || done.send(write(&store, &set)));
        Self(is_done)
    }

    /// Waits until all is on the disks, at most until the limit. The image is then durable without them, with a warning.
    pub fn end(self, limit: Duration) {
        let failure = match self.0.recv_timeout(limit) {
            Ok(Ok(())) => return,
            Ok(Err(error)) => chain(&error),
            Err(_) => format!("their file systems were not written to the disk within {limit:?}"),
        };
        tracing::warn!("the job's files may not survive a power failure: {failure}");
    }
}

fn write(store: &Path, set: &KeptFiles) -> io::Result<()> {
    let mut written = HashSet::new();
    let mut failure = Ok(());
    let mut write = |file: BorrowedFd<'_>, written: &mut HashSet<u64>| {
        let is_new = fstat(file).is_ok_and(|found| written.insert(found.st_dev));
        if let Err(error) = is_new.then(|| syncfs(file)).transpose() {
            failure = Err(error.into());
        }
    };
    for output in [io::stdout().as_fd(), io::stderr().as_fd()] {
        write(output, &mut written);
    }
    write(File::open(store)?.as_fd(), &mut written);
    for (path, file) in &set.files {
        // The job may have removed the folder since. A folder of the set can be a mount point in another file system.
        if !written.contains(&file.identity.0)
            && let Ok(folder) = open_folder(path)
        {
            write(folder.as_fd(), &mut written);
        }
    }
    failure
}

/// Opens the folder of a file.
fn open_folder(path: &Path) -> io::Result<File> {
    let through = Spot::of(path)?.path();
    File::open(through.parent().unwrap_or(&through))
}
