//! A large stream out of a pipe, copied by several threads at once.
//!
//! Reading a pipe copies its pages, at the speed of one core, and whoever fills the
//! pipe waits for that while the job is frozen. Moving pages from pipe to pipe copies
//! nothing. So the pages of each chunk move into a lane, a pipe of our own, and a thread
//! of the lane copies them from there:
//!
//! ```text
//!                ┌─ splice ─▶ lane 0 ─ read ─▶ chunk 0, 3, …
//! source pipe ───┼─ splice ─▶ lane 1 ─ read ─▶ chunk 1, 4, …   (to whichever lane is idle)
//!                └─ splice ─▶ lane 2 ─ read ─▶ chunk 2, 5, …
//! ```
//! Pages in a lane still belong to the frozen job: the stream has them only once
//! [`Lanes::finish`] has returned.

use std::fs::File;
use std::io::{self, Read};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::{Scope, ScopedJoinHandle};

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, OFlag, SpliceFFlags, fcntl, splice};

use super::buffer::Buffer;
use super::chunk::CHUNK_BYTES;

/// Room in a lane: a chunk in pages, and as much again for pages that are not full.
const LANE_BYTES: i32 = 1 << 20;

/// What a lane's thread is told. Channels hold at most the parts of one chunk.
#[derive(Debug)]
enum Order {
    /// A new chunk goes into this buffer.
    Begin(Buffer),
    /// So many more bytes of it are in the lane.
    Copy(usize),
    /// The chunk is complete; its position in the stream.
    Complete(u32),
    /// The stream ended inside the chunk: hand it back.
    HandBack,
}

/// A lane as its feeder sees it.
#[derive(Debug)]
struct Lane<'scope> {
    entry: File,
    orders: Sender<Order>,
    thread: ScopedJoinHandle<'scope, io::Result<Option<(Buffer, usize)>>>,
}

/// The lanes of one stream.
#[derive(Debug)]
pub(super) struct Lanes<'scope> {
    lanes: Vec<Lane<'scope>>,
    idle: Receiver<usize>,
}

/// A chunk on its way into a lane.
#[derive(Debug)]
pub(super) struct Passage {
    lane: usize,
    len: usize,
}

impl<'scope> Lanes<'scope> {
    /// Opens `count` lanes. `complete` takes each full chunk, with its position, on the lane's thread.
    pub(super) fn open<'env>(
        scope: &'scope Scope<'scope, 'env>,
        count: usize,
        complete: impl Fn(Buffer, u32) + Clone + Send + 'scope,
    ) -> io::Result<Self> {
        let (when_idle, idle) = channel();
        let lanes = (0..count).map(|number| {
            let (exit, entry) = nix::unistd::pipe2(OFlag::O_CLOEXEC)?;
            fcntl(&entry, FcntlArg::F_SETPIPE_SZ(LANE_BYTES))?;
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

    /// Begins a chunk on the next idle lane.
    pub(super) fn begin(&self, buffer: Buffer) -> io::Result<Passage> {
        let lane = self.idle.recv().map_err(|_| broken())?;
        self.order(lane, Order::Begin(buffer))?;
        Ok(Passage { lane, len: 0 })
    }

    /// Moves what `source` has, up to the end of the chunk; the bytes, 0 at the end of the stream.
    pub(super) fn feed(&self, passage: &mut Passage, source: &File) -> io::Result<usize> {
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

    /// Whether the chunk has all its bytes.
    pub(super) fn is_full(passage: &Passage) -> bool {
        passage.len == CHUNK_BYTES
    }

    /// Ends a full chunk.
    pub(super) fn complete(&self, passage: &Passage, position: u32) -> io::Result<()> {
        self.order(passage.lane, Order::Complete(position))
    }

    /// Waits for all threads. Returns the unfinished chunk and its length.
    pub(super) fn finish(self, unfinished: &Passage) -> io::Result<(Buffer, usize)> {
        self.order(unfinished.lane, Order::HandBack)?;
        let mut handed_back = None;
        for lane in self.lanes {
            drop((lane.entry, lane.orders));
            let result = lane.thread.join().map_err(|_| broken())?;
            handed_back = result?.or(handed_back);
        }
        handed_back.ok_or_else(broken)
    }

    fn order(&self, lane: usize, order: Order) -> io::Result<()> {
        self.lanes[lane].orders.send(order).map_err(|_| broken())
    }
}

/// A lane's thread ended early: its own error says why, when the lanes are joined.
fn broken() -> io::Error {
    io::Error::new(io::ErrorKind::BrokenPipe, "a copying thread ended early")
}

/// The thread of a lane. Ends with the orders; returns a chunk that was handed back.
fn work(
    mut exit: File,
    orders: &Receiver<Order>,
    complete: impl Fn(Buffer, u32),
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
            (Order::Complete(position), Some((buffer, _))) => {
                complete(buffer, position);
                idle();
            }
            (Order::HandBack, handed_back) => return Ok(handed_back),
            (Order::Copy(_) | Order::Complete(_), None) => return Err(broken()),
        }
    }
    Ok(None)
}
