//! The supervisor's connection to a watcher: the record file, and requests for marks.

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

/// Time limit for a watcher to write all changes to the record. The job is frozen meanwhile.
const MARK_LIMIT: Duration = Duration::from_secs(5);
/// Time limit for an earlier sandbox to exit.
const ENDING_LIMIT: Duration = Duration::from_secs(30);
/// Interval between two checks of a sandbox that is exiting.
const ENDING_POLL: Duration = Duration::from_millis(5);
/// Bytes of the request for a mark: reason and image.
pub(super) const MARK_BYTES: usize = 9;
/// Answer of a watcher to a mark.
pub(super) const DONE: u8 = b'.';

/// The reason for a mark.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Mark {
    /// The image is being prepared while the job is running.
    Prepared = 0,
    /// The job is frozen for the image.
    Frozen = 1,
}

/// The watcher has not written a mark.
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
        // From here on, the watcher and pid 1 hold the lock.
        let log = OwnedFd::from(log.into_file());
        let (ours, theirs) = UnixStream::pair()?;
        ours.set_read_timeout(Some(MARK_LIMIT))?;
        Ok((Self { socket: ours }, [log, theirs.into()]))
    }

    /// Waits until the watcher is running.
    ///
    /// # Errors
    /// The watcher has exited or does not answer.
    pub fn wait(&self) -> Result<(), MarkerError> {
        let mut answer = [0];
        (&self.socket).read_exact(&mut answer).map_err(MarkerError)
    }

    /// Has the watcher write all changes up to now and a mark for this image. Returns when they are written.
    ///
    /// # Errors
    /// The watcher has exited or does not answer.
    pub fn mark(&self, image: u64, mark: Mark) -> Result<(), MarkerError> {
        let mut request = [mark as u8; MARK_BYTES];
        request[1..].copy_from_slice(&image.to_le_bytes());
        let sent = (&self.socket).write_all(&request);
        sent.map_err(MarkerError)?;
        self.wait()
    }
}

/// A lock on a record, held while any copy of its descriptor is open.
#[derive(Debug)]
pub(super) struct LockedRecord(File);

impl LockedRecord {
    fn into_file(self) -> File {
        self.0
    }
}

/// Opens a record once no watcher writes to it any more.
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

/// Truncates a record to zero length.
pub(super) fn empty(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        Ok(()) | Err(_) => Ok(()),
    }
}
