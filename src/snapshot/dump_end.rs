//! How a dump has ended, by what both ends of its stream say.

use std::fs::File;
use std::io;

use super::criu_log::DumpLog;
use super::error::SnapshotError;
use crate::criu::{CaptureError, Captured};
use crate::run::format::why;
use crate::sandbox::{Ended, SandboxError};

/// What the dump has come to, from both ends of the stream.
pub(crate) fn outcome(
    (log, printed): (&DumpLog, &File),
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
        (Ok(ended), _) => Err(SnapshotError::Criu {
            reason: why(&log.path(), log.kept(), ended, Some(printed)),
        }),
        (Err(SandboxError::Slow(limit)), _) => Err(SnapshotError::Slow(limit)),
        (Err(error), _) => Err(error.into()),
    }
}
