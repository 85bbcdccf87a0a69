//! The supervisor's side of a watcher: the file of the record, and the marks that it has the watcher write.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::thread;
use std::time::Duration;

use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;

use crate::clock;

/// Limit on the time that a watcher takes to write down what has happened: the job is frozen meanwhile.
const MARK_LIMIT: Duration = Duration::from_secs(5);
/// Limit on the time that an earlier sandbox takes to end.
const ENDING_LIMIT: Duration = Duration::from_secs(30);
/// Time between two looks at a sandbox that ends.
const ENDING_POLL: Duration = Duration::from_millis(5);
/// Bytes of the request for a mark: its reason, and the image.
pub(super) const MARK_BYTES: usize = 9;
/// What a watcher answers to a mark.
pub(super) const DONE: u8 = b'.';

/// The reason for a mark.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Mark {
    /// The image is being prepared, and the job computes.
    Prepared = 0,
    /// The job is frozen for the image.
    Frozen = 1,
}

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
        let log = locked_record(record)?;
        // The lock is the watcher's and pid 1's from here on.
        let log = OwnedFd::from(log.into_file());
        let (ours, theirs) = UnixStream::pair()?;
        ours.set_read_timeout(Some(MARK_LIMIT))?;
        Ok((Self { socket: ours }, [log, theirs.into()]))
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
    pub fn mark(&self, image: u64, mark: Mark) -> Result<(), MarkerError> {
        let mut request = [mark as u8; MARK_BYTES];
        request[1..].copy_from_slice(&image.to_le_bytes());
        let told = (&self.socket).write_all(&request);
        told.map_err(MarkerError)?;
        self.wait()
    }
}

/// A lock on a record, for as long as any copy of its descriptor is open.
#[derive(Debug)]
pub(super) struct LockedRecord(File);

impl LockedRecord {
    fn into_file(self) -> File {
        self.0
    }
}

/// Opens a record when no watcher writes it any more.
pub(super) fn locked_record(path: &Path) -> io::Result<LockedRecord> {
    let file = File::options()
        .append(true)
        .create(true)
        .mode(0o600)
        .custom_flags(nix::libc::O_NOFOLLOW)
        .open(path)?;
    let begun = clock::now();
    loop {
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => return Ok(LockedRecord(file)),
            Err(Errno::WOULDBLOCK) if begun.elapsed() < ENDING_LIMIT => {
                thread::sleep(ENDING_POLL);
            }
            Err(Errno::WOULDBLOCK) => return Err(io::ErrorKind::TimedOut.into()),
            Err(errno) => return Err(errno.into()),
        }
    }
}

/// Empties a record.
pub(super) fn empty(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        Ok(()) | Err(_) => Ok(()),
    }
}
