//! A lane: GPU memory through a pipe, one piece after the other. Several lanes copy at the same time.

use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd};

use super::client::{SegmentId, ask};
use super::error::CopierError;
use super::wire::{LaneRequest, Part, Reply, Socket};

/// A connection of its own to a copier, which serves it with a thread. An error of one request, or of one lane, harms
/// no other. Dropped, its thread ends.
#[derive(Debug)]
pub struct Lane {
    socket: Socket,
    /// An answer did not come: the next would be taken for it.
    broken: bool,
}

impl Lane {
    pub(super) fn new(socket: Socket) -> Self {
        Self {
            socket,
            broken: false,
        }
    }

    /// Writes a part of a segment into a pipe; returns when all of it is in the pipe.
    ///
    /// Blocks as long as nobody reads the pipe. To give up, close its reading end. The copier keeps no end of it. A
    /// pipe of 1 MiB (`F_SETPIPE_SZ`) is several times as fast as one of the usual size.
    ///
    /// # Errors
    /// [`CopierError::Pipe`] when the reader is gone; [`CopierError::Refused`] for a range that is not there.
    pub fn drain(
        &mut self,
        segment: SegmentId,
        range: Range<u64>,
        pipe: impl AsFd,
    ) -> Result<(), CopierError> {
        let request = LaneRequest::Drain(part(segment, &range));
        self.ask("drain GPU memory", &request, pipe)
    }

    /// Reads a part of a segment from a pipe: as many bytes as the range has, no more. Returns when they are on the
    /// GPU.
    ///
    /// # Errors
    /// [`CopierError::Short`] when the pipe ends before; [`CopierError::Refused`] for a range that is not there, or a
    /// segment with a shadow.
    pub fn fill(
        &mut self,
        segment: SegmentId,
        range: Range<u64>,
        pipe: impl AsFd,
    ) -> Result<(), CopierError> {
        let request = LaneRequest::Fill(part(segment, &range));
        self.ask("fill GPU memory", &request, pipe)
    }

    fn ask(
        &mut self,
        operation: &'static str,
        request: &LaneRequest,
        pipe: impl AsFd,
    ) -> Result<(), CopierError> {
        if self.broken {
            return Err(CopierError::Gone { operation });
        }
        let descriptors = [pipe.as_fd().as_raw_fd()];
        match ask(&self.socket, operation, request, &descriptors, None) {
            Ok((Reply::Done, _)) => Ok(()),
            Ok((Reply::Failed(refusal), _)) => Err(CopierError::refused(operation, refusal)),
            Ok(_) => {
                self.broken = true;
                Err(CopierError::unexpected(operation))
            }
            Err(error) => {
                self.broken = true;
                Err(error)
            }
        }
    }
}

fn part(segment: SegmentId, range: &Range<u64>) -> Part {
    Part {
        segment: segment.0,
        start: range.start,
        end: range.end,
    }
}
