//! Client of one process's agent: sends a request and checks every answer.
//!
//! An answer counts when it comes from the agent's address and from root or the process's user. Answers to requests that
//! were given up are passed over, but those to a release, which carry memory, are kept for whoever asks again.

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

/// Times that a part of a mapping is sent to an agent that had no room for its descriptors: it makes room at the first.
const TRIES_MAX: u32 = 3;
/// Interval between two checks that a process from which no answer comes has not exited.
const LOOK_INTERVAL: Duration = Duration::from_millis(100);
/// More pieces than an agent has in its table.
const SEGMENTS_MAX: usize = 1 << 16;

/// The agent's description of itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(clippy::struct_excessive_bools, reason = "the agent's flags")]
pub struct Hello {
    /// Its thread, as the process sees it.
    pub thread: i32,
    /// Pieces of device memory it answers for.
    pub segments: u32,
    /// Their length in all.
    pub bytes: u64,
    /// Memory is released and waits for [`Agent::map`].
    pub released: bool,
    /// Some memory was given by the supervisor once, so the driver cannot bring it back.
    pub imported: bool,
    /// The process has shared memory of the driver's own with others, or uses theirs: nobody can bring that back.
    pub shares: bool,
    /// True if the process shares pieces with others, or uses theirs ([`Agent::origins`]): the driver cannot restore
    /// that.
    pub lends: bool,
    /// True if the process was restored onto another GPU: its driver imports no memory there, so the driver alone can
    /// keep it.
    pub moved: bool,
}

/// The owner of a piece of memory that several processes have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Origin {
    /// Address of the mapping in the process.
    pub address: u64,
    /// The process that allocated it, as that sees itself. It may have ended.
    pub owner: i32,
    /// Number of the piece in that process.
    pub id: u64,
}

/// Memory of one GPU that a process has allocated or was given. Memory of other processes does not count.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Holding {
    /// UUID of the GPU.
    pub device: [u8; 16],
    /// Bytes.
    pub bytes: u64,
    /// The part that the supervisor has given. NVML does not count it.
    pub imported: u64,
}

/// A process's agent. It keeps descriptors between a [`release`](Agent::release) that took too long and the next.
#[derive(Debug)]
pub struct Agent<'a> {
    channel: &'a mut Channel,
    pid: i32,
    name: Vec<u8>,
    uid: u32,
    /// Pid of the process as the host sees it, if that is known.
    host_pid: Option<i32>,
    receipt: Receipt,
    /// A request whose answers carry memory, and the serial of the first of its kind that may still be answered.
    awaited: Option<(Kind, u64)>,
    /// Segments received so far by a request that brings no descriptors.
    told: Vec<wire::Segment>,
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
            told: Vec::new(),
        }
    }

    /// The user that the process runs as, should that not be ours.
    #[must_use]
    pub fn owned_by(mut self, uid: u32) -> Self {
        self.uid = uid;
        self
    }

    /// Lets requests fail with [`AgentError::Gone`] when the process, of which this is the host's pid, has exited. Its
    /// children may still have its socket, which then takes requests that nobody answers.
    #[must_use]
    pub fn while_alive(mut self, host_pid: i32) -> Self {
        self.host_pid = Some(host_pid);
        self
    }

    /// Returns the agent's description of itself; `None` if no process has its name.
    ///
    /// # Errors
    /// No sensible answer in time.
    pub fn hello(&mut self, limit: Duration) -> Result<Option<Hello>, AgentError> {
        match self.ask(Kind::Hello, (0, &[]), clock::now() + limit) {
            Ok(reply) => Ok(Some(Hello {
                thread: reply.thread,
                segments: reply.total,
                bytes: reply.bytes,
                released: reply.flags & wire::RELEASED != 0,
                imported: reply.flags & wire::IMPORTED != 0,
                shares: reply.flags & wire::SHARES != 0,
                lends: reply.flags & wire::LENDS != 0,
                moved: reply.flags & wire::MOVED != 0,
            })),
            Err(AgentError::Gone { .. }) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Checks that the agent can use the driver, while all other threads are stopped and CUDA is not locked.
    ///
    /// # Errors
    /// It cannot: [`AgentError::Busy`] or [`AgentError::TimedOut`] when a stopped thread is inside. After a time-out the
    /// agent goes on as soon as the thread does, which changes nothing.
    pub fn probe(&mut self, limit: Duration) -> Result<(), AgentError> {
        self.ask(Kind::Probe, (0, &[]), clock::now() + limit)
            .map(drop)
    }

    /// Has the process let go of all its device memory; what is returned keeps it.
    ///
    /// # Errors
    /// After [`AgentError::TimedOut`] memory may be released, now or later: what came is kept here, and the next call
    /// goes on from it, unless [`Agent::call_off`] ends it. After [`AgentError::Malformed`] and [`AgentError::Lost`] the process is not to be let go.
    /// Otherwise it has its memory.
    pub fn release(&mut self, limit: Duration) -> Result<Vec<Held>, AgentError> {
        let reply = self.ask(Kind::Release, (0, &[]), clock::now() + limit)?;
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

    /// Calls off a release that failed without an answer. The channel is of no use afterwards.
    ///
    /// An agent that cannot send all its segments lets go of none. So `None` says that the process has its memory, and
    /// keeps it; else it has let go of it just now.
    ///
    /// # Errors
    /// [`AgentError::TimedOut`]: all was sent, and it may let go of it at any time. The process is not to be let go.
    pub fn call_off(&mut self) -> Result<Option<Vec<Held>>, AgentError> {
        self.channel.close();
        let kind = Kind::Release;
        loop {
            let received = self.channel.receive(Duration::ZERO);
            match received.map_err(|errno| self.io(kind, errno))? {
                // What came later than the end.
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

    /// Gives a process back all its memory, in the order of the release. The descriptors may be of other memory with
    /// the same content; whoever has them keeps them, as the process's agent does.
    ///
    /// # Errors
    /// What was mapped stays so; the call can be repeated.
    pub fn map(&mut self, held: &[Held], limit: Duration) -> Result<(), AgentError> {
        let deadline = clock::now() + limit;
        let mut first = 0;
        for batch in held.chunks(BATCH_MAX) {
            let mut tries = 1;
            while let Err(error) = self.ask(Kind::Map, (first, batch), deadline) {
                if tries == TRIES_MAX || !matches!(error, AgentError::Busy { .. }) {
                    return Err(error);
                }
                tries += 1;
            }
            first = first.saturating_add(u32::try_from(batch.len()).unwrap_or(u32::MAX));
        }
        Ok(())
    }

    /// Has a process that was restored onto another GPU, and has no memory yet, make memory of its own where it was, of
    /// any content; what is returned lets others fill it. From then on it lets go of none (`moved`).
    ///
    /// # Errors
    /// After [`AgentError::TimedOut`] it may be made, now or later; the call can be repeated. After
    /// [`AgentError::Malformed`] and [`AgentError::Lost`] the process is not to be let go. Otherwise it has none.
    pub fn remake(&mut self, limit: Duration) -> Result<Vec<Held>, AgentError> {
        let kind = Kind::Remake;
        let reply = self.ask(kind, (0, &[]), clock::now() + limit)?;
        self.awaited = None;
        match self.receipt.take() {
            Some(held) => Ok(held),
            None if reply.total == 0 => Ok(Vec::new()),
            None => Err(self.malformed(kind, "made, but nothing came")),
        }
    }

    /// Returns the pieces that the process has in common with others. The process must be halted, or the answer may be
    /// outdated.
    ///
    /// # Errors
    /// No sensible answer in time, or [`AgentError::Refused`] by an agent of a time when there was no such request.
    pub fn origins(&mut self, limit: Duration) -> Result<Vec<Origin>, AgentError> {
        let told = self.told(Kind::Origins, limit)?;
        Ok(told.iter().map(origin).collect())
    }

    /// Returns the process's memory on each GPU.
    ///
    /// # Errors
    /// As [`Agent::origins`], or [`AgentError::Busy`] while it is allocating.
    pub fn holdings(&mut self, limit: Duration) -> Result<Vec<Holding>, AgentError> {
        let kind = Kind::Holdings;
        let told = self.told(kind, limit)?;
        let holding = |one: &wire::Segment| {
            let holding = Holding {
                device: one.device,
                bytes: one.len,
                imported: one.address,
            };
            (holding.imported <= holding.bytes).then_some(holding)
        };
        let holdings: Option<Vec<Holding>> = told.iter().map(holding).collect();
        holdings.ok_or_else(|| self.malformed(kind, "more was given than there is"))
    }

    fn told(&mut self, kind: Kind, limit: Duration) -> Result<Vec<wire::Segment>, AgentError> {
        self.told.clear();
        self.ask(kind, (0, &[]), clock::now() + limit)?;
        Ok(std::mem::take(&mut self.told))
    }

    /// Sends a request and waits for its last answer.
    fn ask(
        &mut self,
        kind: Kind,
        (first, batch): (u32, &[Held]),
        deadline: Instant,
    ) -> Result<Reply, AgentError> {
        self.channel.serial += 1;
        let serial = self.channel.serial;
        let request = Request {
            magic: MAGIC,
            version: VERSION,
            kind: kind.number(),
            first,
            count: u32::try_from(batch.len()).unwrap_or(u32::MAX),
            reserved: 0,
            serial,
        };
        if kind.brings_memory() && self.awaited.is_none_or(|(before, _)| before != kind) {
            self.awaited = Some((kind, serial));
        }
        let descriptors: Vec<_> = batch.iter().map(|held| held.descriptor.as_fd()).collect();
        let address = UnixAddr::new_abstract(&self.name).map_err(|errno| self.io(kind, errno))?;
        match self.channel.send(&address, &encode(&request), &descriptors) {
            Ok(()) => {}
            Err(Errno::ECONNREFUSED) => return Err(self.gone(kind)),
            // Its queue is full: it has not answered for long.
            Err(Errno::EAGAIN) => return Err(self.timed_out(kind)),
            Err(errno) => return Err(self.io(kind, errno)),
        }
        loop {
            // Before the look for an answer: the last one came while the process was alive.
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

    /// The answer that ends the wait, if this is it.
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
            let what = "a datagram that was cut, or too few free descriptors here";
            return Err(self.malformed(kind, what));
        }
        let Some((reply, segments)) = decode(&datagram.bytes) else {
            return Err(self.malformed(kind, "no answer of this version"));
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
            return Err(self.malformed(kind, "an answer to another question"));
        }
        if kind.tells() && reply.status == wire::MORE {
            self.told.extend(&segments);
            if segments.is_empty() || self.told.len() > SEGMENTS_MAX {
                return Err(self.malformed(kind, "no sensible number of segments"));
            }
            return Ok(None);
        }
        if !brings_memory && !segments.is_empty() {
            return Err(self.malformed(kind, "segments nobody asked for"));
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

/// Returns true if every thread of a process (a host pid) has exited. Dead threads stay until whoever traces them, or the
/// parent, has waited for them.
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
