//! Queue of pieces between streams and workers, in bounded memory.
//!
//! ```text
//!            acquire                    push                 take
//! free ───────────────▶ held by stream ───────▶ queue ──────────▶ worker ──▶ cutter
//!  ▲                                                                            │
//!  └──────────────────── give_back, when its last chunk is stored ◀─────────────┘
//!
//! Holding ── start ──▶ Running ── close ──▶ Closing ── queue empty ──▶ workers leave
//!    └──────────────────── stop (abort, failure) ───────────────────▶ workers leave
//! ```
//! While Holding, the cores belong to the freeze: only the spare workers take pieces, and others do only if a stream
//! waits for a buffer.
//!
//! An open stream may get one buffer beyond the limit if all are taken and none will be returned, because its source
//! may be waiting until another stream is read. A full chunk that a lane still copies counts as being returned (see
//! [`Passing`]), so a stream gets only one such buffer, whatever its number of lanes. The last pieces of an open
//! stream, whose next cut is unknown, do not count. So memory is limited to the buffer, three pieces for each open
//! stream, and `SMALL_BYTES_MAX`.
//!
//! If the job is frozen while Holding and no buffer is returned within the stall limit, the image fails. This module is
//! independent of hashes and packs.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::Builder;
use std::time::Duration;

use super::buffer_pool::{Buffer, Populate, SLAB_BUFFERS, map_slab};
use super::chunker::Known;
use crate::store::byte_counter::ByteCounter;
use crate::store::error::WriteError;
use crate::store::format::chunk::CHUNK_BYTES;
use crate::sync::{locked, wait};

mod piece;
mod stall;

use piece::Bytes;
pub(crate) use piece::{Piece, Work};
use stall::Stall;

/// Maximum length at which the end of a stream is copied out of its buffer, so that a stream of 200 bytes does not
/// occupy one.
const SMALL_BYTES: usize = 64 * 1024;
/// Limit on waiting copies: the ends of ten thousand of CRIU's files at 1.5 KiB.
const SMALL_BYTES_MAX: usize = 16 << 20;

/// Maximum number of threads that populate memory; more would wait for the kernel's locks.
const POPULATE_THREADS_MAX: usize = 8;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Holding,
    Running,
    Closing,
}

#[derive(Debug)]
struct State {
    phase: Phase,
    /// Number of workers that may run while Holding.
    spare_workers: usize,
    stopped: Option<Arc<WriteError>>,
    free: Vec<Buffer>,
    /// Number of buffers in slabs, free or not.
    mapped: usize,
    queue: VecDeque<Work<Bytes>>,
    small_bytes: usize,
    /// Number of busy workers.
    busy: usize,
    /// Number of full chunks in lanes.
    passing: usize,
    /// Number of streams that wait for a buffer.
    waiting: usize,
    /// Number of times that a worker became idle.
    rests: u64,
    /// Limit on the time without a finished piece while Holding.
    stall_limit: Option<Duration>,
}

impl State {
    /// Returns true if a buffer will be returned without any stream's action.
    fn is_moving(&self) -> bool {
        !self.queue.is_empty() || self.busy > 0 || self.passing > 0
    }
}

/// Queue shared by the streams and the workers of an image.
#[derive(Debug)]
pub(crate) struct WorkQueue {
    buffers_max: usize,
    /// Counter of bytes received from the streams.
    pub(crate) taken: ByteCounter,
    /// Counter of bytes that the workers have finished.
    pub(crate) stored: ByteCounter,
    state: Mutex<State>,
    /// Signals a change to workers.
    work: Condvar,
    /// Signals a change to waiting streams.
    space: Condvar,
}

impl WorkQueue {
    /// Creates a queue; `buffer` limits the bytes in pieces.
    pub(crate) fn new(buffer: u64) -> Self {
        let buffers = usize::try_from(buffer).unwrap_or(usize::MAX) / CHUNK_BYTES;
        Self {
            buffers_max: buffers.max(1),
            taken: ByteCounter::default(),
            stored: ByteCounter::default(),
            state: Mutex::new(State {
                phase: Phase::Holding,
                spare_workers: 0,
                stopped: None,
                free: Vec::new(),
                mapped: 0,
                queue: VecDeque::new(),
                small_bytes: 0,
                busy: 0,
                passing: 0,
                waiting: 0,
                rests: 0,
                stall_limit: None,
            }),
            work: Condvar::new(),
            space: Condvar::new(),
        }
    }

    /// Maps and populates buffers until `bytes` are available, within the limit. If the kernel has no memory, later
    /// calls try again.
    pub(crate) fn reserve(&self, bytes: u64) {
        let wanted = usize::try_from(bytes.div_ceil(CHUNK_BYTES as u64)).unwrap_or(usize::MAX);
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        std::thread::scope(|scope| {
            for _ in 1..cores.min(POPULATE_THREADS_MAX) {
                // A missing thread only reduces the speed.
                let _ = Builder::new().spawn_scoped(scope, || self.populate(wanted));
            }
            self.populate(wanted);
        });
    }

    fn populate(&self, wanted: usize) {
        loop {
            let count = {
                let mut state = locked(&self.state);
                let lacking = wanted.saturating_sub(state.mapped);
                self.claim_slab(&mut state, lacking)
            };
            if count == 0 {
                return;
            }
            let slab = map_slab(count, Populate::Now);
            let mut state = locked(&self.state);
            match slab {
                Ok(buffers) => state.free.extend(buffers),
                Err(error) => {
                    state.mapped -= count;
                    tracing::warn!(%error, "cannot reserve the snapshot buffer");
                    return;
                }
            }
            self.space.notify_all();
        }
    }

    /// Reserves up to `wanted` buffers for mapping in one slab; returns their number.
    fn claim_slab(&self, state: &mut State, wanted: usize) -> usize {
        let room = self.buffers_max - state.mapped;
        let count = wanted.min(room).min(SLAB_BUFFERS);
        state.mapped += count;
        count
    }

    /// Returns a buffer for a stream that has none. Waits while all buffers will be returned by workers; while the job
    /// is frozen, the wait has the stall limit.
    pub(crate) fn acquire(&self) -> Result<Buffer, WriteError> {
        let mut state = locked(&self.state);
        let mut stall = Stall::begun(&state);
        loop {
            if let Some(error) = &state.stopped {
                return Err(WriteError::Stopped(Arc::clone(error)));
            }
            if let Some(buffer) = state.free.pop() {
                return Ok(buffer);
            }
            let count = self.claim_slab(&mut state, SLAB_BUFFERS);
            if count > 0 {
                let buffers = map_slab(count, Populate::Later).map_err(WriteError::Memory)?;
                state.free.extend(buffers);
                continue;
            }
            if !state.is_moving() {
                return Ok(Buffer::on_heap());
            }
            state.waiting += 1;
            self.work.notify_all();
            state = self.wait_for_space(state, &mut stall);
            state.waiting -= 1;
        }
    }

    /// Passes a filled buffer to the workers.
    pub(crate) fn push(&self, stream: u32, position: u32, buffer: Buffer, len: usize) {
        let piece = Bytes::Whole { buffer, len };
        self.enqueue(
            locked(&self.state),
            Work::Piece {
                stream,
                position,
                piece,
            },
        );
    }

    /// Pushes a full piece of zeros.
    pub(crate) fn push_zeros(&self, stream: u32, position: u32) {
        self.enqueue(locked(&self.state), Work::Zeros { stream, position });
    }

    /// Pushes a piece that may be short: the last of a stream, or one before known chunks.
    pub(crate) fn push_last(&self, stream: u32, position: u32, buffer: Buffer, len: usize) {
        let mut state = locked(&self.state);
        if len > SMALL_BYTES || state.small_bytes + len > SMALL_BYTES_MAX {
            drop(state);
            return self.push(stream, position, buffer, len);
        }
        state.small_bytes += len;
        let piece = Bytes::Small(buffer[..len].into());
        self.put_back(&mut state, buffer);
        self.enqueue(
            state,
            Work::Piece {
                stream,
                position,
                piece,
            },
        );
    }

    /// Pushes chunks of an earlier image.
    pub(crate) fn push_known(&self, stream: u32, position: u32, chunks: Vec<Known>) {
        let work = Work::Known {
            stream,
            position,
            chunks,
        };
        self.enqueue(locked(&self.state), work);
    }

    /// Sets the number of pieces of a stream.
    pub(crate) fn push_end(&self, stream: u32, pieces: u32) {
        self.enqueue(locked(&self.state), Work::End { stream, pieces });
    }

    fn enqueue(&self, mut state: MutexGuard<'_, State>, work: Work<Bytes>) {
        self.taken.add(work.bytes());
        state.queue.push_back(work);
        if may_work(&state) {
            self.work.notify_one();
        }
    }

    /// Takes back a buffer without data.
    pub(crate) fn release(&self, buffer: Buffer) {
        self.put_back(&mut locked(&self.state), buffer);
    }

    fn put_back(&self, state: &mut State, buffer: Buffer) {
        if buffer.is_pooled() {
            state.free.push(buffer);
        }
        self.space.notify_one();
    }

    /// Returns a worker's next work, which is in progress until the call of `rest`; `None` if the worker must exit.
    pub(crate) fn take(self: &Arc<Self>) -> Option<Work<Piece>> {
        let mut state = locked(&self.state);
        loop {
            if state.stopped.is_some() {
                return None;
            }
            if may_work(&state)
                && let Some(work) = state.queue.pop_front()
            {
                state.busy += 1;
                return Some(self.lend(work));
            }
            if state.phase == Phase::Closing && state.queue.is_empty() {
                return None;
            }
            state = wait(&self.work, state);
        }
    }

    fn lend(self: &Arc<Self>, work: Work<Bytes>) -> Work<Piece> {
        match work {
            Work::Piece {
                stream,
                position,
                piece: bytes,
            } => {
                let work_queue = Arc::clone(self);
                let piece = Piece { work_queue, bytes };
                Work::Piece {
                    stream,
                    position,
                    piece,
                }
            }
            Work::Zeros { stream, position } => Work::Zeros { stream, position },
            Work::Known {
                stream,
                position,
                chunks,
            } => Work::Known {
                stream,
                position,
                chunks,
            },
            Work::End { stream, pieces } => Work::End { stream, pieces },
        }
    }

    fn give_back(&self, bytes: Bytes) {
        let mut state = locked(&self.state);
        match bytes {
            Bytes::Whole { buffer, .. } => self.put_back(&mut state, buffer),
            Bytes::Small(bytes) => state.small_bytes -= bytes.len(),
        }
    }

    /// Marks a worker as idle again.
    pub(crate) fn rest(&self) {
        let mut state = locked(&self.state);
        state.busy -= 1;
        state.rests += 1;
        self.wake_if_still(&state);
    }

    /// Counts a full chunk in a lane, until it is pushed or released.
    pub(crate) fn passing(&self) -> Passing<'_> {
        locked(&self.state).passing += 1;
        Passing { work_queue: self }
    }

    /// Returns the number of slabs' buffers that are not free.
    #[cfg(test)]
    pub(crate) fn buffers_lost(&self) -> usize {
        let state = locked(&self.state);
        state.mapped - state.free.len()
    }

    /// Wakes waiting streams if no buffer will be returned, so that each gets a buffer of its own.
    fn wake_if_still(&self, state: &State) {
        if !state.is_moving() {
            self.space.notify_all();
        }
    }

    /// Allows this many workers to take pieces while Holding.
    pub(crate) fn spare(&self, workers: usize) {
        locked(&self.state).spare_workers = workers;
        self.work.notify_all();
    }

    /// Allows all workers to take pieces.
    pub(crate) fn start(&self) {
        self.advance(Phase::Running);
    }

    /// Lets workers exit when the queue is empty.
    pub(crate) fn close(&self) {
        self.advance(Phase::Closing);
    }

    fn advance(&self, phase: Phase) {
        locked(&self.state).phase = phase;
        self.work.notify_all();
    }

    /// Stops all streams and workers; the first reason is kept.
    pub(crate) fn stop(&self, error: WriteError) {
        let mut state = locked(&self.state);
        state.stopped.get_or_insert_with(|| Arc::new(error));
        state.queue.clear();
        drop(state);
        self.work.notify_all();
        self.space.notify_all();
    }

    /// Returns an error after `stop`.
    pub(crate) fn check(&self) -> Result<(), WriteError> {
        match &locked(&self.state).stopped {
            Some(error) => Err(WriteError::Stopped(Arc::clone(error))),
            None => Ok(()),
        }
    }
}

/// Full chunk passing through a lane. Dropped after the chunk was pushed or released, or if the lane failed.
#[derive(Debug)]
pub(crate) struct Passing<'work_queue> {
    work_queue: &'work_queue WorkQueue,
}

impl Drop for Passing<'_> {
    fn drop(&mut self) {
        let mut state = locked(&self.work_queue.state);
        state.passing -= 1;
        self.work_queue.wake_if_still(&state);
    }
}

fn may_work(state: &State) -> bool {
    match state.phase {
        Phase::Holding => state.waiting > 0 || state.busy < state.spare_workers,
        Phase::Running | Phase::Closing => true,
    }
}

#[cfg(test)]
mod tests;
