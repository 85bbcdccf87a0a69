//! Lane: transfer of GPU memory through memory shared with the copier. Several lanes may copy at the same time.
//!
//! ```text
//! drain   GPU ─▶ [half] [half] ─▶ caller        fill   caller ─▶ [half] [half] ─▶ GPU
//! ```
//! While the GPU copies one half, the caller uses the other. There is no further copy.
#![allow(
    unsafe_code,
    reason = "lends memory; the protocol with the copier coordinates its use"
)]

use std::ops::Range;
use std::os::fd::OwnedFd;

use super::copier_client::{SegmentId, answer, send_request};
use super::error::CopierError;
use super::wire::{Direction, LANE_BYTES, LaneRequest, Part, Reply, Socket};
use crate::cuda::device::{BLOCK_BYTES, FINGERPRINT_BYTES};
use crate::shared_memory::SharedMemory;

/// Fingerprint of a block of GPU memory.
pub type Fingerprint = [u8; FINGERPRINT_BYTES];

/// Maximum number of bytes per copy.
const HALF_BYTES: usize = LANE_BYTES.get() / 2;

/// Separate connection to a copier, served by a thread of its own. An error of a copy or a lane does not affect others.
/// On drop the thread ends.
#[derive(Debug)]
pub struct Lane {
    socket: Socket,
    memory: SharedMemory,
    /// Number of the next request; its lowest bit selects the half.
    next: usize,
    /// Number of requests without a reply, up to two.
    open: usize,
    /// True if a reply is missing: the next reply would be mistaken for it, and a half may be written to at any time.
    broken: bool,
}

impl Lane {
    /// Maximum size of the buffer given to a filling source; smaller at the end of the range.
    pub const ROOM: usize = HALF_BYTES;

    /// Creates a lane over this connection, and its memory's descriptor for the copier.
    pub(super) fn new(socket: Socket) -> std::io::Result<(Self, OwnedFd)> {
        let (memory, descriptor) = SharedMemory::create(LANE_BYTES)?;
        let lane = Self {
            socket,
            memory,
            next: 0,
            open: 0,
            broken: false,
        };
        Ok((lane, descriptor))
    }

    /// Passes a part of a segment to `take`, in order and in pieces.
    ///
    /// # Errors
    /// [`CopierError::Refused`] for a range that does not exist; errors of `take`. The lane remains usable.
    pub fn drain<E: From<CopierError>>(
        &mut self,
        segment: SegmentId,
        range: Range<u64>,
        take: impl FnMut(&[u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        let drained = self.drain_pieces(segment, range, take);
        self.settle(Direction::Drain, drained)
    }

    /// Returns the fingerprints of a part's blocks, in order.
    ///
    /// # Errors
    /// [`CopierError::Refused`] for a range that does not exist or is not of whole blocks, or if the GPU computes no
    /// fingerprints. The lane remains usable.
    pub fn fingerprints(
        &mut self,
        segment: SegmentId,
        range: Range<u64>,
    ) -> Result<Vec<Fingerprint>, CopierError> {
        let direction = Direction::Fingerprint;
        let blocks = range.end.saturating_sub(range.start) / BLOCK_BYTES;
        let blocks = usize::try_from(blocks).unwrap_or(usize::MAX);
        let len = blocks.saturating_mul(FINGERPRINT_BYTES);
        if len > HALF_BYTES {
            return Err(CopierError::unexpected(name(direction)));
        }
        let whole = usize::try_from(range.end.saturating_sub(range.start)).unwrap_or(0);
        let asked = self.ask(direction, segment, range, whole);
        let answered = asked.and_then(|half| self.await_but(0, direction).map(|()| half));
        let half = self
            .settle::<CopierError>(direction, Ok(()))
            .and(answered)?;
        // SAFETY: the request of this half was answered, and no other is made before the borrow ends.
        let bytes = unsafe { self.memory.part(part_of(half, len)) };
        let (fingerprints, _) = bytes.as_chunks();
        Ok(fingerprints.to_vec())
    }

    /// Writes a part of a segment, in order and in pieces, with content from `put`, which fills the beginning of a
    /// buffer and returns the number of bytes, at least one. Returns after all bytes are on the GPU.
    ///
    /// # Errors
    /// [`CopierError::Refused`] for a range that does not exist, or a segment with a shadow; errors of `put`. The lane
    /// remains usable.
    ///
    /// # Panics
    /// If `put` returns zero or more than the buffer's size.
    pub fn fill<E: From<CopierError>>(
        &mut self,
        segment: SegmentId,
        range: Range<u64>,
        put: impl FnMut(&mut [u8]) -> Result<usize, E>,
    ) -> Result<(), E> {
        let filled = self.fill_pieces(segment, range, put);
        self.settle(Direction::Fill, filled)
    }

    fn drain_pieces<E: From<CopierError>>(
        &mut self,
        segment: SegmentId,
        range: Range<u64>,
        mut take: impl FnMut(&[u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        let mut at = range.start;
        let mut before = None;
        loop {
            // An empty range is checked, too.
            let len = half_of(at..range.end);
            let asked = (len > 0 || before.is_none())
                .then(|| self.ask(Direction::Drain, segment, at..range.end, len))
                .transpose()?;
            if let Some((half, len)) = before {
                // The previous request was answered when this one was sent, or is the last.
                self.await_but(usize::from(asked.is_some()), Direction::Drain)?;
                // SAFETY: the copy of this half was answered, and no other is requested before the borrow ends.
                take(unsafe { self.memory.part(part_of(half, len)) })?;
            }
            let Some(half) = asked else { return Ok(()) };
            at += len as u64;
            before = Some((half, len));
        }
    }

    fn fill_pieces<E: From<CopierError>>(
        &mut self,
        segment: SegmentId,
        range: Range<u64>,
        mut put: impl FnMut(&mut [u8]) -> Result<usize, E>,
    ) -> Result<(), E> {
        let mut at = range.start;
        while at < range.end {
            // The other half may still be copied.
            self.await_but(1, Direction::Fill)?;
            let room = half_of(at..range.end);
            // SAFETY: the last copy of this half was answered; the next is requested after the borrow ends.
            let len = put(unsafe { self.memory.part_mut(part_of(self.next % 2, room)) })?;
            assert!(
                (1..=room).contains(&len),
                "{len} bytes were put into {room}"
            );
            self.ask(Direction::Fill, segment, at..range.end, len)?;
            at += len as u64;
        }
        if range.start >= range.end {
            self.ask(Direction::Fill, segment, range, 0)?;
        }
        Ok(())
    }

    /// Requests the copy of the first `len` bytes of the range; returns the half.
    fn ask(
        &mut self,
        direction: Direction,
        segment: SegmentId,
        range: Range<u64>,
        len: usize,
    ) -> Result<usize, CopierError> {
        let operation = name(direction);
        if self.broken {
            return Err(CopierError::Gone { operation });
        }
        let half = self.next % 2;
        // An invalid range is passed on, and the copier refuses it.
        let end = if range.end > range.start {
            range.start + len as u64
        } else {
            range.end
        };
        let request = LaneRequest {
            direction,
            part: Part {
                segment: segment.0,
                start: range.start,
                end,
            },
            at: (half * HALF_BYTES) as u64,
        };
        send_request(&self.socket, operation, &request, &[]).inspect_err(|_| self.broken = true)?;
        self.next += 1;
        self.open += 1;
        Ok(half)
    }

    /// Waits until at most `open` requests are unanswered.
    fn await_but(&mut self, open: usize, direction: Direction) -> Result<(), CopierError> {
        let operation = name(direction);
        while self.open > open {
            if self.broken {
                return Err(CopierError::Gone { operation });
            }
            match answer(&self.socket, operation, None) {
                Ok((Reply::Done, _)) => self.open -= 1,
                Ok((Reply::Failed(refusal), _)) => {
                    self.open -= 1;
                    return Err(CopierError::refused(operation, refusal));
                }
                Ok(_) => {
                    self.broken = true;
                    return Err(CopierError::unexpected(operation));
                }
                Err(error) => {
                    self.broken = true;
                    return Err(error);
                }
            }
        }
        Ok(())
    }

    /// Waits for all copies, so that no later call receives their replies.
    fn settle<E: From<CopierError>>(
        &mut self,
        direction: Direction,
        result: Result<(), E>,
    ) -> Result<(), E> {
        let mut settled = Ok(());
        while self.open > 0 && !self.broken {
            settled = settled.and(self.await_but(0, direction));
        }
        // The first error is returned.
        result?;
        Ok(settled?)
    }
}

/// Returns the length of the range's first piece.
fn half_of(range: Range<u64>) -> usize {
    let left = range.end.saturating_sub(range.start);
    usize::try_from(left).map_or(HALF_BYTES, |left| left.min(HALF_BYTES))
}

/// Returns the position of the first bytes of a half.
fn part_of(half: usize, len: usize) -> Range<usize> {
    half * HALF_BYTES..half * HALF_BYTES + len
}

fn name(direction: Direction) -> &'static str {
    match direction {
        Direction::Drain => "read GPU memory",
        Direction::Fill => "write GPU memory",
        Direction::Fingerprint => "find changes of GPU memory",
    }
}
