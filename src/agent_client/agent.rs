//! Client of a process's agent: sends requests and checks the replies.
//!
//! A reply is accepted if it comes from the agent's address and from root or the process's user. Replies to abandoned
//! requests are ignored, except those to a release, which carry memory and are kept for the next attempt.

use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::sys::socket::UnixAddr;
use procfs::ProcError;
use procfs::process::{Process as ProcessEntry, Task};

use super::channel::{Channel, Datagram};
use super::datagram::{decode, encode};
use super::embed::Token;
use super::error::AgentError;
use super::receipt::{Held, Receipt};
use super::request::Kind;
use super::wire::{self, BATCH_MAX, MAGIC, NAME_PREFIX, Reply, Request, VERSION};
use crate::clock;

/// Maximum number of times that a part of a mapping is sent to an agent without room for its descriptors; the agent
/// makes room at the first.
const TRIES_MAX: u32 = 3;
/// Interval between checks whether a process that does not reply has exited.
const LOOK_INTERVAL: Duration = Duration::from_millis(100);
/// Maximum number of pieces, more than an agent's table has.
const SEGMENTS_MAX: usize = 1 << 16;

/// The agent's description of itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(clippy::struct_excessive_bools, reason = "the agent's flags")]
pub struct Hello {
    /// Id of the agent's thread in the process's own namespace.
    pub thread: i32,
    /// Number of pieces of device memory that the agent manages.
    pub segments: u32,
    /// Total length of the pieces.
    pub bytes: u64,
    /// True if memory is released and waits for [`Agent::map`].
    pub released: bool,
    /// True if some memory was provided by the supervisor before, so that the driver cannot restore it.
    pub imported: bool,
    /// True if the process has shared the driver's own memory with others, or uses theirs, which cannot be restored.
    pub shares: bool,
    /// True if the process shares pieces with others, or uses theirs ([`Agent::origins`]): the driver cannot restore
    /// that.
    pub lends: bool,
    /// True if the process was restored onto another GPU: its driver cannot import memory there, so only the driver can
    /// save its memory.
    pub moved: bool,
    /// True if the process maps memory in a way that the agent does not follow, which cannot be restored.
    pub opaque: bool,
}

/// Owner of a piece of memory that several processes have mapped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Origin {
    /// Address of the mapping in the process.
    pub address: u64,
    /// Pid of the process that allocated the piece, in its own namespace. The process may have exited.
    pub owner: i32,
    /// Number of the piece in that process.
    pub id: u64,
}

/// Memory of one GPU that a process has allocated or received. Memory of other processes does not count.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Holding {
    /// UUID of the GPU.
    pub device: [u8; 16],
    /// Number of bytes.
    pub bytes: u64,
    /// Part provided by the supervisor. NVML does not count it.
    pub imported: u64,
}

/// Pieces of memory that go with a request.
#[derive(Clone, Copy)]
struct Pieces<'a> {
    /// The number of the first one among all pieces of the process.
    first: u32,
    held: &'a [Held],
}

impl Pieces<'_> {
    const NONE: Self = Self {
        first: 0,
        held: &[],
    };
}

/// Agent of a process. If a [`release`](Agent::release) times out, its descriptors are kept for the next attempt.
#[derive(Debug)]
pub struct Agent<'a> {
    channel: &'a mut Channel,
    pid: i32,
    name: Vec<u8>,
    uid: u32,
    /// Pid of the process on the host, if known.
    host_pid: Option<i32>,
    receipt: Receipt,
    /// Unfinished request whose replies carry memory, and the first of its serial numbers that may still be answered.
    awaited: Option<(Kind, u64)>,
    /// Segments received so far for a request without descriptors.
    described: Vec<wire::Segment>,
}

impl<'a> Agent<'a> {
    pub(super) fn new(channel: &'a mut Channel, token: &Token, pid: i32) -> Self {
        Self {
            channel,
            pid,
            name: format!("{NAME_PREFIX}{token}/{pid}").into_bytes(),
            uid: nix::unistd::geteuid().as_raw(),
            host_pid: None,
            receipt: Receipt::default(),
            awaited: None,
            described: Vec::new(),
        }
    }

    /// Sets the user of the process, if it is not this process's.
    #[must_use]
    pub fn owned_by(mut self, uid: u32) -> Self {
        self.uid = uid;
        self
    }

    /// Makes requests fail with [`AgentError::Gone`] after the process (a host pid) has exited. Its children may keep
    /// its socket open, so that requests are accepted and never answered.
    #[must_use]
    pub fn while_alive(mut self, host_pid: i32) -> Self {
        self.host_pid = Some(host_pid);
        self
    }

    /// Returns the agent's description of itself; `None` if no process has its name.
    ///
    /// # Errors
    /// There is no valid reply in time.
    pub fn hello(&mut self, limit: Duration) -> Result<Option<Hello>, AgentError> {
        match self.ask(Kind::Hello, Pieces::NONE, clock::now() + limit) {
            Ok(reply) => Ok(Some(Hello {
                thread: reply.thread,
                segments: reply.total,
                bytes: reply.bytes,
                released: reply.flags & wire::RELEASED != 0,
                imported: reply.flags & wire::IMPORTED != 0,
                shares: reply.flags & wire::SHARES != 0,
                // The agent sets the flag for good. Without memory it shares none.
                lends: reply.flags & wire::LENDS != 0 && reply.bytes > 0,
                moved: reply.flags & wire::MOVED != 0,
                opaque: reply.flags & wire::OPAQUE != 0,
            })),
            Err(AgentError::Gone { .. }) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Checks that the agent can call the driver, while all other threads are stopped and CUDA is not locked.
    ///
    /// # Errors
    /// [`AgentError::Busy`] or [`AgentError::TimedOut`] if a stopped thread is inside the driver. After a time-out the
    /// agent's call completes when that thread continues, without effect.
    pub fn probe(&mut self, limit: Duration) -> Result<(), AgentError> {
        self.ask(Kind::Probe, Pieces::NONE, clock::now() + limit)
            .map(drop)
    }

    /// Makes the job's next CUDA calls wait until [`Agent::pass`], for less than a second.
    ///
    /// # Errors
    /// There is no valid reply in time, or [`AgentError::Refused`] from an older agent without this request.
    pub fn hold(&mut self, limit: Duration) -> Result<(), AgentError> {
        self.ask(Kind::Hold, Pieces::NONE, clock::now() + limit)
            .map(drop)
    }

    /// Ends [`Agent::hold`].
    ///
    /// # Errors
    /// The same as [`Agent::hold`].
    pub fn pass(&mut self, limit: Duration) -> Result<(), AgentError> {
        self.ask(Kind::Pass, Pieces::NONE, clock::now() + limit)
            .map(drop)
    }

    /// Makes the process release all its device memory, which is kept alive by the returned descriptors.
    ///
    /// # Errors
    /// After [`AgentError::TimedOut`] memory may be released now or later: received descriptors are kept here, and the
    /// next call continues, unless [`Agent::call_off`] ends it. After [`AgentError::Malformed`] and
    /// [`AgentError::Lost`] the process must not be continued. After any other error it has its memory.
    pub fn release(&mut self, limit: Duration) -> Result<Vec<Held>, AgentError> {
        let reply = self.ask(Kind::Release, Pieces::NONE, clock::now() + limit)?;
        self.awaited = None;
        match self.receipt.take() {
            Some(held) => Ok(held),
            None if reply.total == 0 => Ok(Vec::new()),
            None => Err(AgentError::AlreadyReleased {
                request: Kind::Release.name(),
                pid: self.pid,
            }),
        }
    }

    /// Cancels a release that failed without a reply. The channel cannot be used afterwards.
    ///
    /// An agent that cannot send all its segments releases none. So `None` means that the process has its memory and
    /// keeps it; otherwise it has just released the returned memory.
    ///
    /// # Errors
    /// [`AgentError::TimedOut`]: all segments were sent, and the process may release its memory at any time. It must
    /// not be continued.
    pub fn call_off(&mut self) -> Result<Option<Vec<Held>>, AgentError> {
        self.channel.close();
        let kind = Kind::Release;
        loop {
            let received = self.channel.receive(Duration::ZERO);
            match received.map_err(|errno| self.io(kind, errno))? {
                // A late datagram after the end.
                Some(datagram) if datagram.bytes.is_empty() => break,
                Some(datagram) => match self.take_in(kind, self.channel.serial, datagram)? {
                    Some(reply) if reply.status == wire::LOST => {
                        return self.judge(kind, reply).map(|_| None);
                    }
                    Some(_) | None => {}
                },
                None => break,
            }
        }
        match self.receipt.take() {
            Some(held) => Ok(Some(held)),
            None if self.receipt.is_short() => Ok(None),
            None => Err(self.timed_out(kind)),
        }
    }

    /// Returns all memory to a process, in the order of its release. The descriptors may refer to other memory with the
    /// same content. The caller keeps them, and so does the process's agent.
    ///
    /// # Errors
    /// Memory mapped before the error stays mapped; the call can be repeated.
    pub fn map(&mut self, held: &[Held], limit: Duration) -> Result<(), AgentError> {
        let deadline = clock::now() + limit;
        let mut first = 0;
        for batch in held.chunks(BATCH_MAX) {
            let pieces = Pieces { first, held: batch };
            let mut tries = 1;
            while let Err(error) = self.ask(Kind::Map, pieces, deadline) {
                if tries == TRIES_MAX || !matches!(error, AgentError::Busy { .. }) {
                    return Err(error);
                }
                tries += 1;
            }
            first = first.saturating_add(u32::try_from(batch.len()).unwrap_or(u32::MAX));
        }
        Ok(())
    }

    /// Makes a process that was restored onto another GPU, and has no memory yet, create new memory of unspecified
    /// content at its addresses. The returned descriptors allow others to fill it. From then on the process never
    /// releases memory (`moved`).
    ///
    /// # Errors
    /// After [`AgentError::TimedOut`] the memory may be created now or later; the call can be repeated. After
    /// [`AgentError::Malformed`] and [`AgentError::Lost`] the process must not be continued. After any other error it
    /// has no memory.
    pub fn remake(&mut self, limit: Duration) -> Result<Vec<Held>, AgentError> {
        let kind = Kind::Remake;
        let reply = self.ask(kind, Pieces::NONE, clock::now() + limit)?;
        self.awaited = None;
        match self.receipt.take() {
            Some(held) => Ok(held),
            None if reply.total == 0 => Ok(Vec::new()),
            None => Err(self.malformed(kind, "memory was created, but no segment arrived")),
        }
    }

    /// Returns the pieces that the process shares with others. The process must be halted, or the result may be
    /// outdated.
    ///
    /// # Errors
    /// There is no valid reply in time, or [`AgentError::Refused`] from an older agent without this request.
    pub fn origins(&mut self, limit: Duration) -> Result<Vec<Origin>, AgentError> {
        let described = self.described_memory(Kind::Origins, limit)?;
        Ok(described.iter().map(origin).collect())
    }

    /// Returns the amount of the process's memory on each GPU.
    ///
    /// # Errors
    /// The same as [`Agent::origins`], or [`AgentError::Busy`] while the process is allocating.
    pub fn holdings(&mut self, limit: Duration) -> Result<Vec<Holding>, AgentError> {
        let kind = Kind::Holdings;
        let described = self.described_memory(kind, limit)?;
        let holding = |one: &wire::Segment| {
            let holding = Holding {
                device: one.device,
                bytes: one.len,
                imported: one.address,
            };
            (holding.imported <= holding.bytes).then_some(holding)
        };
        let holdings: Option<Vec<Holding>> = described.iter().map(holding).collect();
        holdings.ok_or_else(|| self.malformed(kind, "more memory was provided than exists"))
    }

    fn described_memory(
        &mut self,
        kind: Kind,
        limit: Duration,
    ) -> Result<Vec<wire::Segment>, AgentError> {
        self.described.clear();
        self.ask(kind, Pieces::NONE, clock::now() + limit)?;
        Ok(std::mem::take(&mut self.described))
    }

    /// Sends a request and waits for its last reply.
    fn ask(
        &mut self,
        kind: Kind,
        pieces: Pieces<'_>,
        deadline: Instant,
    ) -> Result<Reply, AgentError> {
        self.channel.serial += 1;
        let serial = self.channel.serial;
        let request = Request {
            magic: MAGIC,
            version: VERSION,
            kind: kind.number(),
            first: pieces.first,
            count: u32::try_from(pieces.held.len()).unwrap_or(u32::MAX),
            reserved: 0,
            serial,
        };
        if kind.brings_memory() && self.awaited.is_none_or(|(before, _)| before != kind) {
            self.awaited = Some((kind, serial));
        }
        let descriptors: Vec<_> = pieces
            .held
            .iter()
            .map(|held| held.descriptor.as_fd())
            .collect();
        let address = UnixAddr::new_abstract(&self.name).map_err(|errno| self.io(kind, errno))?;
        match self.channel.send(&address, &encode(&request), &descriptors) {
            Ok(()) => {}
            Err(Errno::ECONNREFUSED) => return Err(self.gone(kind)),
            // The agent's queue is full: it has not replied for a long time.
            Err(Errno::EAGAIN) => return Err(self.timed_out(kind)),
            Err(errno) => return Err(self.io(kind, errno)),
        }
        loop {
            // Checked before receiving, so that the last reply of an exited process is not missed.
            let is_gone = self.host_pid.is_some_and(has_exited);
            let left = deadline.saturating_duration_since(clock::now());
            let limit = match self.host_pid {
                Some(_) if is_gone => Duration::ZERO,
                Some(_) => left.min(LOOK_INTERVAL),
                None => left,
            };
            let received = self.channel.receive(limit);
            match received.map_err(|errno| self.io(kind, errno))? {
                Some(datagram) => {
                    if let Some(reply) = self.take_in(kind, serial, datagram)? {
                        return self.judge(kind, reply);
                    }
                }
                None if is_gone => return Err(self.gone(kind)),
                None if clock::now() >= deadline => return Err(self.timed_out(kind)),
                None => {}
            }
        }
    }

    /// Processes a reply; returns the one that ends the wait.
    fn take_in(
        &mut self,
        kind: Kind,
        serial: u64,
        datagram: Datagram,
    ) -> Result<Option<Reply>, AgentError> {
        let is_agent =
            datagram.from == self.name && (datagram.uid == 0 || datagram.uid == self.uid);
        if !is_agent {
            return Ok(None);
        }
        if datagram.is_cut {
            let what = "a truncated datagram, or too few free descriptors here";
            return Err(self.malformed(kind, what));
        }
        let Some((reply, segments)) = decode(&datagram.bytes) else {
            return Err(self.malformed(kind, "a reply of another version"));
        };
        let brings_memory = self.awaited.is_some_and(|(kind, since)| {
            reply.kind == kind.number() && (since..=serial).contains(&reply.serial)
        });
        if brings_memory {
            let absorbed = self.receipt.absorb(&reply, &segments, datagram.descriptors);
            absorbed.map_err(|what| self.malformed(kind, what))?;
        }
        if reply.serial != serial || brings_memory && reply.status == wire::MORE {
            return Ok(None);
        }
        if reply.kind != kind.number() {
            return Err(self.malformed(kind, "a reply to another request"));
        }
        if kind.describes_memory() && reply.status == wire::MORE {
            self.described.extend(&segments);
            if segments.is_empty() || self.described.len() > SEGMENTS_MAX {
                return Err(self.malformed(kind, "an invalid number of segments"));
            }
            return Ok(None);
        }
        if !brings_memory && !segments.is_empty() {
            return Err(self.malformed(kind, "segments that were not requested"));
        }
        Ok(Some(reply))
    }

    fn judge(&mut self, kind: Kind, reply: Reply) -> Result<Reply, AgentError> {
        let (request, pid, code) = (kind.name(), self.pid, reply.code);
        if reply.status != wire::OK && kind.brings_memory() {
            self.awaited = None;
        }
        match reply.status {
            wire::OK => Ok(reply),
            wire::BUSY => Err(AgentError::Busy { request, pid }),
            wire::REFUSED => Err(AgentError::Refused { request, pid }),
            wire::DRIVER => Err(AgentError::Driver { request, pid, code }),
            wire::LOST => Err(AgentError::Lost { request, pid, code }),
            _ => Err(self.malformed(kind, "an unknown status")),
        }
    }

    fn malformed(&self, kind: Kind, what: &'static str) -> AgentError {
        AgentError::Malformed {
            request: kind.name(),
            pid: self.pid,
            what,
        }
    }

    fn io(&self, kind: Kind, errno: Errno) -> AgentError {
        AgentError::Io {
            request: kind.name(),
            pid: self.pid,
            source: errno.into(),
        }
    }

    fn timed_out(&self, kind: Kind) -> AgentError {
        AgentError::TimedOut {
            request: kind.name(),
            pid: self.pid,
        }
    }

    fn gone(&self, kind: Kind) -> AgentError {
        AgentError::Gone {
            request: kind.name(),
            pid: self.pid,
        }
    }
}

/// Returns true if every thread of a process (a host pid) has exited. Dead threads remain until their tracer or parent
/// has waited for them.
fn has_exited(pid: i32) -> bool {
    let Ok(tasks) = ProcessEntry::new(pid).and_then(|entry| entry.tasks()) else {
        return !std::path::Path::new(&format!("/proc/{pid}")).exists();
    };
    let is_dead = |task: Result<Task, ProcError>| match task.and_then(|task| task.stat()) {
        Ok(stat) => matches!(stat.state, 'Z' | 'X'),
        Err(ProcError::NotFound(_)) => true,
        Err(_) => false,
    };
    tasks.into_iter().all(is_dead)
}

fn origin(segment: &wire::Segment) -> Origin {
    let (owner, id) = segment.origin();
    Origin {
        address: segment.address,
        owner,
        id,
    }
}
