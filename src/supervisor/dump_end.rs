//! How a dump has ended: what both ends of its stream say of it, and what a failed one has left in the job's folders.

use std::fs::File;
use std::io;
use std::path::Path;

use super::describe::why;
use super::snapshot_error::SnapshotError;
use crate::criu::{CaptureError, Captured};
use crate::job::{self, Process};
use crate::sandbox::{Ended, SandboxError};

/// CRIU links a file that has lost the name it was opened by as `link_remap.N` in the same folder, for as long as the
/// dump takes. N counts from the same number in each job, and several may use the folder (`/dev/shm`).
const NAME_TAKEN: [&str; 2] = ["Can't link remap", "File exists"];

/// What the dump has come to, from both ends of the stream.
pub(super) fn outcome(
    (log, printed): (&Path, &File),
    ended: Result<Ended, SandboxError>,
    captured: Result<Captured, CaptureError<SnapshotError>>,
) -> Result<Captured, SnapshotError> {
    match (ended, captured) {
        (Ok(Ended::Exited(0)), Ok(captured)) => Ok(captured),
        // Our own failure is the cause of CRIU's.
        (_, Err(CaptureError::Receiver(error))) => Err(error),
        (Ok(Ended::Exited(0)), Err(error)) => {
            Err(SnapshotError::Stream(io::Error::other(error.to_string())))
        }
        (Ok(ended), _) => Err(failed(why(log, ended, Some(printed)))),
        (Err(SandboxError::Slow(limit)), _) => Err(SnapshotError::Slow(limit)),
        (Err(error), _) => Err(error.into()),
    }
}

fn failed(reason: String) -> SnapshotError {
    if NAME_TAKEN.iter().all(|part| reason.contains(part)) {
        SnapshotError::NameTaken { reason }
    } else {
        SnapshotError::Criu { reason }
    }
}

/// Takes away the links by which a CRIU that was killed, now or long ago, has named these processes' files: they would
/// be in the way of the next one.
pub(super) fn remove_links(processes: &[Process]) {
    let pids: Vec<i32> = processes.iter().map(|process| process.host_pid).collect();
    // What cannot be listed stays: the next dump tells.
    if let Ok(files) = job::collect(&pids) {
        job::remove_links(&files);
    }
}
