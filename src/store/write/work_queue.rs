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
//! While Holding, workers take pieces only as far as there are cores to spare, or when a
//! stream waits for a buffer: the others belong to the freeze until memory runs out. Each open stream may have one buffer
//! even when all are taken and nothing is on its way back, because its source may be
//! waiting for another stream to be read. A full chunk that a lane still copies is on
//! its way back (see [`Passing`]), so a stream has only one such buffer however many
//! lanes it has. The last pieces of an open stream, whose next cut is not known, are not.
//! So memory is at most the buffer, three pieces for each open stream, and
//! `SMALL_BYTES_MAX`. Where a job stands still while Holding, a stream does not wait longer than it may for a buffer
//! when none comes back: the image fails. Knows nothing of hashes or packs.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard};
use std::thread::Builder;
use std::time::Duration;

use super::buffer_pool::{Buffer, Populate, SLAB_BUFFERS, map_slab};
use crate::store::byte_counter::ByteCounter;
use crate::store::error::WriteError;
use crate::store::format::chunk::CHUNK_BYTES;
use crate::sync::{locked, wait};

mod piece;
mod stall;

use piece::Bytes;
pub(crate) use piece::{Piece, Work};
use stall::Stall;

/// The end of a stream up to this length is copied, so that a stream of 200 bytes does
/// not keep a whole buffer.
const SMALL_BYTES: usize = 64 * 1024;
/// Copies waiting at a time: the ends of ten thousand of CRIU's files at 1.5 KiB.
const SMALL_BYTES_MAX: usize = 16 << 20;

/// Threads that populate memory: beyond these the kernel's own locks are the limit.
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
    /// Workers that may be at work while Holding.
    spare_workers: usize,
    stopped: Option<Arc<WriteError>>,
    free: Vec<Buffer>,
    /// Buffers of slabs, free or not.
    mapped: usize,
    queue: VecDeque<Work<Bytes>>,
    small_bytes: usize,
    /// Workers that are at work.
    busy: usize,
    /// Full chunks that lanes have.
    passing: usize,
    /// Streams that wait for a buffer.
    waiting: usize,
    /// Number of times that a worker finished something.
    rests: u64,
    /// Limit on the time in which the store may take nothing while Holding.
    stall_limit: Option<Duration>,
}

impl State {
    /// Returns true if a buffer will come back without any stream's doing.
    fn is_moving(&self) -> bool {
        !self.queue.is_empty() || self.busy > 0 || self.passing > 0
    }
}

/// Shared by the streams and the workers of an image.
#[derive(Debug)]
pub(crate) struct WorkQueue {
    buffers_max: usize,
    /// Bytes that came from the streams.
    pub(crate) taken: ByteCounter,
    /// Bytes that the workers have finished.
    pub(crate) stored: ByteCounter,
    state: Mutex<State>,
    /// Something for workers changed.
    work: Condvar,
    /// Something for waiting streams changed.
    space: Condvar,
}

impl WorkQueue {
    /// `buffer`: bytes that pieces may take together.
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

    /// Maps and populates buffers until `bytes` are there, within the limit. Where the
    /// kernel has no memory to give, later calls try again.
    pub(crate) fn reserve(&self, bytes: u64) {
        let wanted = usize::try_from(bytes.div_ceil(CHUNK_BYTES as u64)).unwrap_or(usize::MAX);
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        std::thread::scope(|scope| {
            for _ in 1..cores.min(POPULATE_THREADS_MAX) {
                // One thread less is only slower.
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

    /// Takes the right to map up to `wanted` buffers in one slab; returns how many.
    fn claim_slab(&self, state: &mut State, wanted: usize) -> usize {
        let room = self.buffers_max - state.mapped;
        let count = wanted.min(room).min(SLAB_BUFFERS);
        state.mapped += count;
        count
    }

    /// A buffer for a stream that has none; waits while all are on their way to workers, where
    /// those get on or nobody stands still meanwhile.
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

    /// Gives a filled buffer to the workers.
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

    /// Pushes the last piece of a stream, which may be short.
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

    /// Says that a stream has no more pieces than these.
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

    /// Takes back a buffer that carries nothing.
    pub(crate) fn release(&self, buffer: Buffer) {
        self.put_back(&mut locked(&self.state), buffer);
    }

    fn put_back(&self, state: &mut State, buffer: Buffer) {
        if buffer.is_pooled() {
            state.free.push(buffer);
        }
        self.space.notify_one();
    }

    /// Returns a worker's next work, until it calls `rest`; `None` when it must leave.
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

    /// A worker is done with what it took.
    pub(crate) fn rest(&self) {
        let mut state = locked(&self.state);
        state.busy -= 1;
        state.rests += 1;
        self.wake_if_still(&state);
    }

    /// Counts a full chunk that a lane has, until it is pushed or released.
    pub(crate) fn passing(&self) -> Passing<'_> {
        locked(&self.state).passing += 1;
        Passing { work_queue: self }
    }

    /// Buffers of slabs that are not free.
    #[cfg(test)]
    pub(crate) fn buffers_lost(&self) -> usize {
        let state = locked(&self.state);
        state.mapped - state.free.len()
    }

    /// Whoever waits when nothing moves any more may have a buffer of its own.
    fn wake_if_still(&self, state: &State) {
        if !state.is_moving() {
            self.space.notify_all();
        }
    }

    /// Lets so many workers take pieces while Holding.
    pub(crate) fn spare(&self, workers: usize) {
        locked(&self.state).spare_workers = workers;
        self.work.notify_all();
    }

    /// Lets workers take pieces as they come.
    pub(crate) fn start(&self) {
        self.advance(Phase::Running);
    }

    /// Lets workers leave once the queue is empty.
    pub(crate) fn close(&self) {
        self.advance(Phase::Closing);
    }

    fn advance(&self, phase: Phase) {
        locked(&self.state).phase = phase;
        self.work.notify_all();
    }

    /// Ends everything; the first reason stays.
    pub(crate) fn stop(&self, error: WriteError) {
        let mut state = locked(&self.state);
        state.stopped.get_or_insert_with(|| Arc::new(error));
        state.queue.clear();
        drop(state);
        self.work.notify_all();
        self.space.notify_all();
    }

    /// Fails once `stop` was called.
    pub(crate) fn check(&self) -> Result<(), WriteError> {
        match &locked(&self.state).stopped {
            Some(error) => Err(WriteError::Stopped(Arc::clone(error))),
            None => Ok(()),
        }
    }
}

/// A full chunk on its way through a lane. Dropped after the chunk was pushed or released, or with
/// a lane that failed.
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
