//! Parallel copy of a large stream from a pipe, by several threads.
//!
//! Reading a pipe copies its pages at the speed of one core, and the writer of the pipe waits meanwhile, with the job
//! frozen. Moving pages from pipe to pipe copies nothing. So the pages of each chunk are moved into a lane, which is
//! another pipe with its own thread, and that thread copies them:
//!
//! ```text
//!                ┌─ splice ─▶ lane 0 ─ read ─▶ chunk 0, 3, …
//! source pipe ───┼─ splice ─▶ lane 1 ─ read ─▶ chunk 1, 4, …   (to whichever lane is idle)
//!                └─ splice ─▶ lane 2 ─ read ─▶ chunk 2, 5, …
//! ```
//! Pages in a lane still belong to the frozen job. The stream has all of them after [`Lanes::finish`] has returned.

use std::fs::File;
use std::io::{self, Read};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::{Scope, ScopedJoinHandle};

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, OFlag, SpliceFFlags, fcntl, splice};

use super::buffer_pool::Buffer;
use crate::store::format::chunk::CHUNK_BYTES;

/// Capacity of a lane: the pages of a chunk, and the same again for pages that are not full.
const LANE_BYTES: i32 = 1 << 20;

/// Order to a lane's thread. A channel holds at most the orders of one chunk.
#[derive(Debug)]
enum Order<T> {
    /// A new chunk goes into this buffer.
    Begin(Buffer),
    /// Copy this many more bytes of it from the lane.
    Copy(usize),
    /// The chunk is complete; the value is passed to the callback.
    Complete(T),
    /// The stream ended inside the chunk: return it.
    HandBack,
}

/// Feeder's side of a lane.
#[derive(Debug)]
struct Lane<'scope, T> {
    entry: File,
    orders: Sender<Order<T>>,
    thread: ScopedJoinHandle<'scope, io::Result<Option<(Buffer, usize)>>>,
}

/// Lanes of one stream; each chunk is accompanied by a `T`. After a failed call only [`Lanes::finish`] may be called.
#[derive(Debug)]
pub(crate) struct Lanes<'scope, T> {
    lanes: Vec<Lane<'scope, T>>,
    idle: Receiver<usize>,
}

/// Chunk being moved into a lane.
#[derive(Debug)]
pub(crate) struct Passage {
    lane: usize,
    len: usize,
}

impl Passage {
    /// Returns true if the chunk is complete.
    pub(crate) fn is_full(&self) -> bool {
        self.len == CHUNK_BYTES
    }
}

impl<'scope, T: Send + 'scope> Lanes<'scope, T> {
    /// Opens `count` lanes. `complete` is called with each full chunk on the lane's thread.
    pub(crate) fn open<'env>(
        scope: &'scope Scope<'scope, 'env>,
        count: usize,
        complete: impl Fn(Buffer, T) + Clone + Send + 'scope,
    ) -> io::Result<Self> {
        let (when_idle, idle) = channel();
        let lanes = (0..count).map(|number| {
            let (exit, entry) = nix::unistd::pipe2(OFlag::O_CLOEXEC)?;
            // A smaller pipe, as for a user with many pipes, is only slower.
            let _ = fcntl(&entry, FcntlArg::F_SETPIPE_SZ(LANE_BYTES));
            let (orders, received) = channel();
            let (complete, when_idle) = (complete.clone(), when_idle.clone());
            let work = move || {
                work(File::from(exit), &received, complete, || {
                    when_idle.send(number).is_ok()
                })
            };
            let thread = std::thread::Builder::new()
                .name("lane".to_owned())
                .spawn_scoped(scope, work)?;
            Ok(Lane {
                entry: File::from(entry),
                orders,
                thread,
            })
        });
        Ok(Self {
            lanes: lanes.collect::<io::Result<_>>()?,
            idle,
        })
    }

    /// Moves a chunk out of `source` into the next idle lane. It is full unless the stream ends.
    pub(crate) fn fill(&self, buffer: Buffer, source: &File) -> io::Result<Passage> {
        let mut passage = self.begin(buffer)?;
        while !passage.is_full() && self.feed(&mut passage, source)? > 0 {}
        Ok(passage)
    }

    fn begin(&self, buffer: Buffer) -> io::Result<Passage> {
        let lane = self.idle.recv().map_err(|_| broken())?;
        self.order(lane, Order::Begin(buffer))?;
        Ok(Passage { lane, len: 0 })
    }

    /// Moves the available bytes of `source`, up to the end of the chunk. Returns their number, 0 at the end of the
    /// stream.
    fn feed(&self, passage: &mut Passage, source: &File) -> io::Result<usize> {
        let lane = &self.lanes[passage.lane];
        let lacking = CHUNK_BYTES - passage.len;
        let moved = loop {
            match splice(
                source,
                None,
                &lane.entry,
                None,
                lacking,
                SpliceFFlags::SPLICE_F_MOVE,
            ) {
                Err(Errno::EINTR) => {}
                other => break other?,
            }
        };
        passage.len += moved;
        self.order(passage.lane, Order::Copy(moved))?;
        Ok(moved)
    }

    /// Completes a full chunk.
    pub(crate) fn complete(&self, passage: &Passage, with: T) -> io::Result<()> {
        self.order(passage.lane, Order::Complete(with))
    }

    /// Waits for all threads. Returns the unfinished chunk and its length.
    pub(crate) fn finish(self, unfinished: io::Result<Passage>) -> io::Result<(Buffer, usize)> {
        let ordered = unfinished.and_then(|passage| self.order(passage.lane, Order::HandBack));
        // All results are collected first: the error of a failed lane is more specific than the error of an undelivered
        // order.
        let lanes = self.lanes.into_iter().map(|lane| {
            drop((lane.entry, lane.orders));
            lane.thread.join().unwrap_or_else(|_| Err(broken()))
        });
        let ended: Vec<io::Result<_>> = lanes.collect();
        let handed_back = ended.into_iter().collect::<io::Result<Vec<_>>>()?;
        ordered?;
        handed_back.into_iter().flatten().next().ok_or_else(broken)
    }

    fn order(&self, lane: usize, order: Order<T>) -> io::Result<()> {
        self.lanes[lane].orders.send(order).map_err(|_| broken())
    }
}

/// Returns the error for an order to a thread that has ended. The thread's own error is reported when the lanes are
/// joined.
fn broken() -> io::Error {
    io::Error::new(io::ErrorKind::BrokenPipe, "a copying thread ended early")
}

/// Body of a lane's thread. Ends with the last order; returns an unfinished chunk.
fn work<T>(
    mut exit: File,
    orders: &Receiver<Order<T>>,
    complete: impl Fn(Buffer, T),
    idle: impl Fn() -> bool,
) -> io::Result<Option<(Buffer, usize)>> {
    let mut filling: Option<(Buffer, usize)> = None;
    idle();
    for order in orders {
        match (order, filling.take()) {
            (Order::Begin(buffer), _) => filling = Some((buffer, 0)),
            (Order::Copy(bytes), Some((mut buffer, len))) => {
                exit.read_exact(&mut buffer[len..len + bytes])?;
                filling = Some((buffer, len + bytes));
            }
            (Order::Complete(with), Some((buffer, _))) => {
                complete(buffer, with);
                idle();
            }
            (Order::HandBack, handed_back) => return Ok(handed_back),
            (Order::Copy(_) | Order::Complete(_), None) => {
                let message = "a copying thread received data without a chunk";
                return Err(io::Error::new(io::ErrorKind::InvalidInput, message));
            }
        }
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failed_lane_reports_its_own_error() {
        let error = std::thread::scope(|scope| {
            let lanes = Lanes::open(scope, 2, |_, ()| ()).unwrap();
            // The first order ends the lane, so one of the following cannot be delivered.
            let undelivered = loop {
                if let Err(error) = lanes.order(1, Order::Complete(())) {
                    break error;
                }
            };
            assert_eq!(undelivered.kind(), io::ErrorKind::BrokenPipe);
            lanes.finish(Err(undelivered)).unwrap_err()
        });
        assert_eq!(error.kind(), io::ErrorKind::InvalidInput);
    }

    #[test]
    fn a_source_that_fails_is_the_reason_where_no_lane_has_one() {
        let folder = File::open("/").unwrap();
        let error = std::thread::scope(|scope| {
            let lanes = Lanes::open(scope, 2, |_, ()| ()).unwrap();
            let ended = lanes.fill(Buffer::on_heap(), &folder);
            lanes.finish(ended).unwrap_err()
        });
        let errno = error.raw_os_error().map(Errno::from_raw);
        assert!(errno.is_some(), "{error}");
    }
}
