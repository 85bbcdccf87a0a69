//! The supervisor's connection to a watcher: the record file, and requests for marks.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::thread;
use std::time::Duration;

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use rustix::fs::{FlockOperation, flock};
use rustix::io::Errno;

use crate::clock;

/// Time limit for a watcher to write all changes to the record. The job is frozen meanwhile.
const MARK_LIMIT: Duration = Duration::from_secs(5);
/// Time limit for a watcher to begin, before the job runs: it lists folders, on a disk that may be slow.
const START_LIMIT: Duration = Duration::from_secs(30);
/// Time limit for a late answer while the job is frozen.
const LATE_LIMIT: Duration = Duration::from_millis(1);
/// Time limit for an earlier sandbox to exit.
const ENDING_LIMIT: Duration = Duration::from_secs(30);
const STILL_THERE: &str = "processes of the previous run in this store have not ended for 30 s (one may wait for a disk \
     or a GPU, state D in `ps`); wait until they end, or kill them, and repeat the command";
/// Interval between two checks of a sandbox that is exiting.
const ENDING_POLL: Duration = Duration::from_millis(5);
/// Bytes of a [`Request`].
pub(super) const REQUEST_BYTES: usize = 24;
/// Answer of a watcher to a mark.
pub(super) const DONE: u8 = b'.';

/// The reason for a mark.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Mark {
    /// The image is being prepared while the job is running.
    Prepared,
    /// The job is frozen for the image.
    Frozen,
}

/// A request for a mark.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Request {
    /// The image of the mark. It may still fail.
    pub image: u64,
    /// Time of the newest image, in nanoseconds since 1970.
    pub newest_ns: i64,
    /// Number of the mark, higher than that of all earlier ones.
    pub mark: u64,
}

impl Request {
    fn to_bytes(self) -> [u8; REQUEST_BYTES] {
        let numbers = [self.image, self.newest_ns.cast_unsigned(), self.mark];
        let mut bytes = [0; REQUEST_BYTES];
        for (part, number) in bytes.chunks_exact_mut(8).zip(numbers) {
            part.copy_from_slice(&number.to_le_bytes());
        }
        bytes
    }

    pub fn from_bytes(bytes: [u8; REQUEST_BYTES]) -> Self {
        let mut numbers = [0; 3];
        for (number, part) in numbers.iter_mut().zip(bytes.as_chunks().0) {
            *number = u64::from_le_bytes(*part);
        }
        let [image, newest_ns, mark] = numbers;
        Self {
            image,
            newest_ns: newest_ns.cast_signed(),
            mark,
        }
    }
}

/// The watcher has not written a mark.
#[derive(Debug, thiserror::Error)]
pub enum MarkerError {
    /// The watcher is delayed, for example by a disk that does not respond.
    #[error("the process that watches the job's files did not answer in time")]
    Late,
    /// The watcher has exited.
    #[error("cannot reach the process that watches the job's files")]
    Gone(#[source] io::Error),
}

/// The connection to a watcher.
#[derive(Debug)]
pub struct Marker {
    socket: UnixStream,
    /// Answers that did not arrive in time.
    late: usize,
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
        let (socket, theirs) = UnixStream::pair()?;
        Ok((Self { socket, late: 0 }, [log, theirs.into()]))
    }

    /// Waits until the watcher is running.
    ///
    /// # Errors
    /// The watcher has exited or does not answer.
    pub fn wait(&self) -> Result<(), MarkerError> {
        self.answer(START_LIMIT)
    }

    /// Returns true if the watcher has exited.
    pub(super) fn is_gone(&self) -> bool {
        let mut socket = [PollFd::new(self.socket.as_fd(), PollFlags::empty())];
        let _ = poll(&mut socket, PollTimeout::ZERO);
        let events = socket[0].revents();
        events.is_some_and(|events| events.contains(PollFlags::POLLHUP))
    }

    /// Waits for answers that did not arrive in time. Returns true if there were any: the watcher has written these
    /// marks later than the supervisor counted on.
    ///
    /// # Errors
    /// The watcher has exited or still does not answer.
    pub fn catch_up(&mut self, mark: Mark) -> Result<bool, MarkerError> {
        let was_late = self.late > 0;
        let limit = match mark {
            Mark::Prepared => MARK_LIMIT,
            Mark::Frozen => LATE_LIMIT,
        };
        while self.late > 0 {
            self.answer(limit)?;
            self.late -= 1;
        }
        Ok(was_late)
    }

    /// Has the watcher write all changes up to now and a mark. Returns when they are written. Must not be called before
    /// [`Marker::catch_up`] has succeeded.
    ///
    /// # Errors
    /// The watcher has exited or does not answer.
    pub(super) fn mark(&mut self, request: Request) -> Result<(), MarkerError> {
        let sent = (&self.socket).write_all(&request.to_bytes());
        sent.map_err(MarkerError::Gone)?;
        let answered = self.answer(MARK_LIMIT);
        if matches!(answered, Err(MarkerError::Late)) {
            self.late += 1;
        }
        answered
    }

    fn answer(&self, limit: Duration) -> Result<(), MarkerError> {
        let limited = self.socket.set_read_timeout(Some(limit));
        let answered = limited.and_then(|()| (&self.socket).read_exact(&mut [0]));
        answered.map_err(|error| match error.kind() {
            io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => MarkerError::Late,
            _ => MarkerError::Gone(error),
        })
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
            Err(Errno::WOULDBLOCK) => {
                return Err(io::Error::new(io::ErrorKind::TimedOut, STILL_THERE));
            }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_late_watcher_is_used_again_once_it_has_answered() {
        let (socket, mut watcher) = UnixStream::pair().unwrap();
        let mut marker = Marker { socket, late: 1 };
        assert!(matches!(
            marker.catch_up(Mark::Frozen),
            Err(MarkerError::Late)
        ));
        watcher.write_all(&[DONE, DONE]).unwrap();
        assert!(marker.catch_up(Mark::Frozen).unwrap());
        assert!(!marker.catch_up(Mark::Prepared).unwrap());
        let request = Request {
            image: 1 << 40,
            newest_ns: -3,
            mark: 1 << 50,
        };
        marker.mark(request).unwrap();
        let mut read = [0; REQUEST_BYTES];
        watcher.read_exact(&mut read).unwrap();
        assert_eq!(Request::from_bytes(read), request);
        assert!(!marker.is_gone());
        drop(watcher);
        assert!(marker.is_gone());
        let failed = marker.mark(request);
        assert!(matches!(failed, Err(MarkerError::Gone(_))), "{failed:?}");
    }
}
