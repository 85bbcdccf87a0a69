//! A lane: GPU memory through memory that is shared with the copier. Several lanes copy at the same time.
//!
//! ```text
//! drain   GPU ─▶ [half] [half] ─▶ caller        fill   caller ─▶ [half] [half] ─▶ GPU
//! ```
//! While the GPU copies one half, the caller has the other. Nothing else copies the bytes.
#![allow(
    unsafe_code,
    reason = "lends memory whose use is agreed upon with the copier"
)]

use std::ops::Range;
use std::os::fd::OwnedFd;

use super::copier_client::{SegmentId, answer, say};
use super::error::CopierError;
use super::wire::{Direction, LANE_BYTES, LaneRequest, Part, Reply, Socket};
use crate::shared_memory::SharedMemory;

/// Most bytes at a time.
const HALF_BYTES: usize = LANE_BYTES.get() / 2;

/// A connection of its own to a copier, which serves it with a thread. An error of one copy, or of one lane, harms no
/// other. Dropped, its thread ends.
#[derive(Debug)]
pub struct Lane {
    socket: Socket,
    memory: SharedMemory,
    /// Number of the next request; its lowest bit is the half that it is about.
    next: usize,
    /// Requests without an answer, up to two.
    open: usize,
    /// An answer did not come: the next would be taken for it, and a half may be written to at any time.
    broken: bool,
}

impl Lane {
    /// Largest room for a filling source, bytes; less if less is missing.
    pub const ROOM: usize = HALF_BYTES;

    /// A lane over this connection, and its memory's descriptor for the copier.
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

    /// Hands a part of a segment to `take`, front to back, in pieces.
    ///
    /// # Errors
    /// [`CopierError::Refused`] for a range that is not there; those of `take`. The lane can be used again.
    pub fn drain<E: From<CopierError>>(
        &mut self,
        segment: SegmentId,
        range: Range<u64>,
        take: impl FnMut(&[u8]) -> Result<(), E>,
    ) -> Result<(), E> {
        let drained = self.drain_pieces(segment, range, take);
        self.settle(Direction::Drain, drained)
    }

    /// Has `put` write a part of a segment, front to back, in pieces: it says how many bytes it has put at the
    /// beginning of the room that it is given, at least one. Returns when they are on the GPU.
    ///
    /// # Errors
    /// [`CopierError::Refused`] for a range that is not there, or a segment with a shadow; those of `put`. The lane can
    /// be used again.
    ///
    /// # Panics
    /// If `put` says that it has put nothing, or more than there is room for.
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
            // An empty range is checked as well.
            let len = half_of(at..range.end);
            let asked = (len > 0 || before.is_none())
                .then(|| self.ask(Direction::Drain, segment, at..range.end, len))
                .transpose()?;
            if let Some((half, len)) = before {
                // The one before was answered when this one was asked for, or is the last.
                self.await_but(usize::from(asked.is_some()), Direction::Drain)?;
                // SAFETY: its copy was answered, and no other is asked for before the borrow ends.
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
            // SAFETY: the last copy of this half was answered; the next is asked for after the borrow.
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

    /// Asks for the copy of the first `len` bytes of the range; which half it is about.
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
        // What is no range stays as it is: the copier refuses it.
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
        say(&self.socket, operation, &request, &[]).inspect_err(|_| self.broken = true)?;
        self.next += 1;
        self.open += 1;
        Ok(half)
    }

    /// Waits until no more than so many requests are open.
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

    /// Waits for all copies: nobody is to find an answer that is not theirs.
    fn settle<E: From<CopierError>>(
        &mut self,
        direction: Direction,
        result: Result<(), E>,
    ) -> Result<(), E> {
        let mut settled = Ok(());
        while self.open > 0 && !self.broken {
            settled = settled.and(self.await_but(0, direction));
        }
        // The first failure counts.
        result?;
        Ok(settled?)
    }
}

/// The length of the range's first piece.
fn half_of(range: Range<u64>) -> usize {
    let left = range.end.saturating_sub(range.start);
    usize::try_from(left).map_or(HALF_BYTES, |left| left.min(HALF_BYTES))
}

/// The first bytes of a half.
fn part_of(half: usize, len: usize) -> Range<usize> {
    half * HALF_BYTES..half * HALF_BYTES + len
}

fn name(direction: Direction) -> &'static str {
    match direction {
        Direction::Drain => "drain GPU memory",
        Direction::Fill => "fill GPU memory",
    }
}
