//! The supervisor's side of a watcher: the file of the record, and the marks that it has the watcher write.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

/// Limit on the time that a watcher takes to write down what has happened: the job is frozen meanwhile.
const MARK_LIMIT: Duration = Duration::from_secs(5);
/// What a watcher answers to a mark.
pub(super) const DONE: u8 = b'.';

/// Why a watcher has not written a mark.
#[derive(Debug, thiserror::Error)]
#[error("cannot reach the process that watches the job's files")]
pub struct MarkerError(#[source] io::Error);

/// The connection to a watcher.
#[derive(Debug)]
pub struct Marker {
    socket: UnixStream,
}

impl Marker {
    /// Creates the connection and opens the record; the descriptors are for the watcher, in this order.
    ///
    /// # Errors
    /// The record cannot be opened.
    pub fn new(record: &Path) -> io::Result<(Self, [OwnedFd; 2])> {
        let log = File::options()
            .append(true)
            .create(true)
            .mode(0o600)
            .custom_flags(nix::libc::O_NOFOLLOW)
            .open(record)?;
        let (ours, theirs) = UnixStream::pair()?;
        ours.set_read_timeout(Some(MARK_LIMIT))?;
        Ok((Self { socket: ours }, [log.into(), theirs.into()]))
    }

    /// Waits until the watcher watches.
    ///
    /// # Errors
    /// The watcher has ended or does not answer.
    pub fn wait(&self) -> Result<(), MarkerError> {
        let mut answer = [0];
        (&self.socket).read_exact(&mut answer).map_err(MarkerError)
    }

    /// Has the watcher write down everything that has happened, and that it belongs to this image. Returns when it is
    /// written.
    ///
    /// # Errors
    /// The watcher is gone or does not answer.
    pub fn mark(&self, image: u64) -> Result<(), MarkerError> {
        let told = (&self.socket).write_all(&image.to_le_bytes());
        told.map_err(MarkerError)?;
        self.wait()
    }
}

/// Empties a record.
pub(super) fn empty(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        Ok(()) | Err(_) => Ok(()),
    }
}
