//! Memory of halted processes: the agents release it, descriptors keep it alive, the agents map it again.

use std::collections::HashMap;
use std::time::Duration;

use super::error::ResidentError;
use super::policy::{Cover, expect_no_newcomer};
use super::refill::Memory;
use crate::agent_client::{Agent, AgentError, Channel, Held, Origin, Token};
use crate::cuda::{self, Driver, GpuUuid, Locked, State, SuspendOptions, TreeError};
use crate::job::{self, Process};
use crate::run::format::chain;
use crate::run::resident_facts::{ResidentFacts, ResidentProcess, ResidentSegment};
use crate::run::running_job::Agents;

/// Time limit for an agent's description of itself. Agents reply from memory; a longer time means that there is no
/// agent.
pub(super) const HELLO_LIMIT: Duration = Duration::from_secs(1);
/// Time limit for an agent's test of the driver. The few calls take less than a millisecond; a longer time means that a
/// thread is halted within the driver.
const PROBE_LIMIT: Duration = Duration::from_millis(250);
/// Limit on unmapping all memory of an agent: 50 segments take 2 ms, and it may have 16,384. The job is frozen
/// meanwhile.
const RELEASE_LIMIT: Duration = Duration::from_secs(5);
/// Limit on mapping all memory of an agent: 50 segments take 10 ms. Without an answer the job is lost.
const MAP_LIMIT: Duration = Duration::from_secs(30);
/// Limit on allocating all memory of an agent on another GPU. The driver clears it, at hundreds of GB/s.
const REMAKE_LIMIT: Duration = Duration::from_secs(60);
/// Options for the lock of processes whose threads are all halted: the driver takes milliseconds, unless it waits for
/// one.
const LOCK_AGAIN: SuspendOptions = SuspendOptions {
    attempt: Duration::from_millis(400),
    total: Duration::from_millis(400),
};
/// Maximum number of requests to an agent to map its memory.
const MAP_TRIES_MAX: u32 = 3;

/// Device memory that its processes have released.
#[derive(Debug)]
pub(crate) struct KeptMemory {
    channel: Channel,
    agents: Agents,
    processes: Vec<KeptProcess>,
    /// True if only an image contains the memory.
    evicted: bool,
}

#[derive(Debug)]
pub(super) struct KeptProcess {
    /// Pid on the host.
    host_pid: i32,
    /// Pid in the job's namespace.
    pub pid: i32,
    pub held: Vec<Held>,
    /// Owners of the pieces that other processes have as well, by address.
    origins: HashMap<u64, Origin>,
}

/// Queries the agents of processes, which are given by their pids on the host and in the job. A suspended process stays
/// suspended, and its agent waits for the driver.
pub(super) fn ask(
    channel: &mut Channel,
    token: &Token,
    driver: &Driver,
    pids: impl Iterator<Item = (i32, i32)>,
) -> Result<Vec<Cover>, ResidentError> {
    let cover = |(host_pid, pid)| {
        let hello = match driver.process(host_pid).state() {
            Ok(State::Checkpointed) => Ok(None),
            Ok(_) | Err(_) => agent(channel, token, host_pid, pid).hello(HELLO_LIMIT),
        };
        Ok(Cover {
            host_pid,
            pid,
            hello: hello.map_err(|source| ResidentError::Agent { pid, source })?,
        })
    };
    pids.map(cover).collect()
}

/// Returns the agent of a process, regardless of the process's present user.
pub(super) fn agent<'a>(
    channel: &'a mut Channel,
    token: &Token,
    host_pid: i32,
    pid: i32,
) -> Agent<'a> {
    let agent = channel.agent(token, pid).while_alive(host_pid);
    match job::user(host_pid) {
        Some(uid) => agent.owned_by(uid),
        // The process has exited and will not reply.
        None => agent,
    }
}

impl KeptProcess {
    fn of(host_pid: i32, pid: i32, held: Vec<Held>) -> Self {
        Self {
            host_pid,
            pid,
            held,
            origins: HashMap::new(),
        }
    }

    fn agent<'a>(&self, channel: &'a mut Channel, token: &Token) -> Agent<'a> {
        agent(channel, token, self.host_pid, self.pid)
    }
}

impl KeptMemory {
    /// Prepares for processes that still have their memory; no memory is kept yet.
    pub(super) fn of(agents: &Agents, covers: &[Cover]) -> Result<Self, ResidentError> {
        let covered = covers.iter().filter(|cover| cover.bytes() > 0);
        let process = |cover: &Cover| KeptProcess::of(cover.host_pid, cover.pid, Vec::new());
        Ok(Self {
            channel: agents.channel()?,
            agents: agents.clone(),
            processes: covered.map(process).collect(),
            evicted: false,
        })
    }

    /// Checks that all memory that the driver would lose is planned for. The processes are locked.
    pub(super) fn is_whole(
        &mut self,
        driver: &Driver,
        covers: &[Cover],
    ) -> Result<(), ResidentError> {
        let pids = covers.iter().map(|cover| (cover.host_pid, cover.pid));
        let now = ask(&mut self.channel, &self.agents.token, driver, pids)?;
        let is_prepared = |cover: &Cover| self.processes.iter().any(|one| one.pid == cover.pid);
        expect_no_newcomer(&now, is_prepared)
    }

    /// Prepares for those of the recorded processes that exist after a restore, with the memory allocated for them.
    pub(crate) fn restored(
        agents: &Agents,
        there: &[Process],
        memory: Memory,
    ) -> Result<Self, ResidentError> {
        let process = |(pid, held)| {
            let found = there.iter().find(|process| process.pid == pid);
            let host_pid = found.ok_or(ResidentError::Facts)?.host_pid;
            Ok(KeptProcess::of(host_pid, pid, held))
        };
        let processes: Result<_, ResidentError> = memory.into_iter().map(process).collect();
        Ok(Self {
            channel: agents.channel()?,
            agents: agents.clone(),
            processes: processes?,
            evicted: false,
        })
    }

    pub(super) fn processes(&self) -> &[KeptProcess] {
        &self.processes
    }

    /// Assigns the memory allocated for a process.
    pub(crate) fn put(&mut self, pid: i32, memory: Vec<Held>) -> Result<(), ResidentError> {
        let mut processes = self.processes.iter_mut();
        let process = processes.find(|process| process.pid == pid);
        process.ok_or(ResidentError::Facts)?.held = memory;
        self.evicted = false;
        Ok(())
    }

    /// Releases the memory, which an image contains.
    pub(crate) fn evict(&mut self) {
        for process in &mut self.processes {
            process.held.clear();
        }
        self.evicted = true;
    }

    /// Returns true if only an image contains the memory.
    pub(crate) fn is_evicted(&self) -> bool {
        self.evicted
    }

    /// Returns the facts for the image.
    pub(crate) fn facts(&self) -> ResidentFacts {
        let mut firsts = HashMap::new();
        let mut number = 0;
        let mut segment = |process: &KeptProcess, held: &Held| {
            let gpu = GpuUuid::from_bytes(held.segment.device).to_string();
            let address = held.segment.address;
            let first = process.origins.get(&address).map(|one| {
                let first = || (number, gpu.clone());
                firsts.entry((one.owner, one.id)).or_insert_with(first)
            });
            let segment = ResidentSegment {
                address,
                len: held.segment.len,
                // A process that cannot see the GPU of others' memory reports that memory on one of its own GPUs.
                gpu: first.as_ref().map_or(gpu, |first| first.1.clone()),
                same_as: first.map(|first| first.0).filter(|first| *first != number),
            };
            number += 1;
            segment
        };
        let process = |process: &KeptProcess| ResidentProcess {
            pid: process.pid,
            segments: process
                .held
                .iter()
                .map(|held| segment(process, held))
                .collect(),
        };
        ResidentFacts::new(self.processes.iter().map(process).collect())
    }

    /// Makes the next CUDA calls of the processes wait outside the driver, or ends that. Where an agent cannot, for example
    /// an older one, the calls wait inside.
    pub(super) fn hold_calls(&mut self, covers: &[Cover], hold: bool) {
        let with_agent = covers.iter().filter(|cover| cover.hello.is_some());
        for process in with_agent {
            let (host_pid, pid) = (process.host_pid, process.pid);
            let mut agent = agent(&mut self.channel, &self.agents.token, host_pid, pid);
            let told = if hold {
                agent.hold(HELLO_LIMIT)
            } else {
                agent.pass(HELLO_LIMIT)
            };
            if let Err(error) = told {
                tracing::debug!(pid, hold, "{}", chain(&error));
            }
        }
    }

    /// Takes the memory of all processes, or of none.
    pub(super) fn let_go(&mut self) -> Result<(), ResidentError> {
        // Memory that was released and returned can only be suspended by agents from then on, so all processes must be
        // ready first.
        for process in &self.processes {
            let pid = process.pid;
            let mut agent = process.agent(&mut self.channel, &self.agents.token);
            let probed = agent.probe(PROBE_LIMIT);
            probed.map_err(|source| ResidentError::Agent { pid, source })?;
        }
        for place in 0..self.processes.len() {
            match self.release(place) {
                Ok(held) => self.processes[place].held = held,
                Err(error) if error.job_is_lost() => return Err(error),
                Err(error) => return self.give_back().and(Err(error)),
            }
        }
        for place in 0..self.processes.len() {
            match self.ask_origins(place) {
                Ok(origins) => {
                    let by_address = origins.into_iter().map(|one| (one.address, one));
                    self.processes[place].origins = by_address.collect();
                }
                Err(error) => return self.give_back().and(Err(error)),
            }
        }
        Ok(())
    }

    /// Returns the pieces that a process, which has released its memory, shares with others.
    fn ask_origins(&mut self, place: usize) -> Result<Vec<Origin>, ResidentError> {
        let process = &self.processes[place];
        let pid = process.pid;
        let mut agent = process.agent(&mut self.channel, &self.agents.token);
        match agent.origins(HELLO_LIMIT) {
            // Older agents have no sharing.
            Err(AgentError::Refused { .. }) => Ok(Vec::new()),
            origins => origins.map_err(|source| ResidentError::Agent { pid, source }),
        }
    }

    /// Locks the processes after they have released their memory. This takes no time, because none of their threads
    /// runs and no GPU work is pending. But a thread may have been halted at a point that the driver waits for (in 2 of
    /// 26 snapshots of a program that allocates all the time), and then waiting does not help.
    ///
    /// # Errors
    /// The processes have their memory again, unless it is lost.
    pub(super) fn lock_again(
        &mut self,
        driver: &Driver,
        users: &[i32],
    ) -> Result<Locked, ResidentError> {
        let failed = match cuda::lock_all(driver, users, &LOCK_AGAIN) {
            Ok(locked) => return Ok(locked),
            Err(error) => ResidentError::from(error),
        };
        self.give_back_unless_lost(&failed).and(Err(failed))
    }

    /// Returns the memory, unless the process is stuck and its agent cannot reply.
    pub(super) fn give_back_unless_lost(
        &mut self,
        error: &ResidentError,
    ) -> Result<(), ResidentError> {
        if error.job_is_lost() {
            return Ok(());
        }
        self.give_back()
    }

    /// Releases the memory of a process.
    ///
    /// # Errors
    /// The process keeps its memory, unless it is lost.
    fn release(&mut self, place: usize) -> Result<Vec<Held>, ResidentError> {
        let process = &self.processes[place];
        let pid = process.pid;
        let mut agent = process.agent(&mut self.channel, &self.agents.token);
        let error = match agent.release(RELEASE_LIMIT) {
            Ok(held) => return Ok(held),
            Err(error) => error,
        };
        let failed = |source| ResidentError::Agent { pid, source };
        let lost = |source| ResidentError::Lost {
            pid,
            source: Box::new(source),
        };
        match error {
            error if error.has_shut_down() => Err(failed(error)),
            AgentError::TimedOut { .. } | AgentError::Io { .. } => {
                let called_off = agent.call_off();
                self.channel = self.agents.channel().map_err(|error| lost(error.into()))?;
                match called_off {
                    Ok(None) => Err(failed(error)),
                    Ok(Some(held)) => Ok(held),
                    Err(error) => Err(lost(failed(error))),
                }
            }
            AgentError::AlreadyReleased { .. }
            | AgentError::Malformed { .. }
            | AgentError::Lost { .. } => Err(lost(failed(error))),
            AgentError::Busy { .. }
            | AgentError::Gone { .. }
            | AgentError::Refused { .. }
            | AgentError::Driver { .. } => Err(failed(error)),
        }
    }

    /// Makes the agents create new memory at the old addresses; returns it by pids in the job's namespace. The
    /// processes must be halted and their CUDA calls not blocked.
    pub(super) fn remake(&mut self) -> Result<Memory, ResidentError> {
        let mut remake = |process: &KeptProcess| {
            let pid = process.pid;
            let mut agent = process.agent(&mut self.channel, &self.agents.token);
            let made = agent.remake(REMAKE_LIMIT);
            let made = made.map_err(|source| ResidentError::Agent { pid, source })?;
            Ok((pid, made))
        };
        self.processes.iter().map(&mut remake).collect()
    }

    /// Makes the agents map all memory at the old addresses. The processes must be halted and their CUDA calls not
    /// blocked. Processes that have exited, or are about to, are skipped.
    ///
    /// # Errors
    /// A process did not get its memory; all others have it if possible.
    pub(crate) fn give_back(&mut self) -> Result<(), ResidentError> {
        let mut result = Ok(());
        let needs_none =
            |error: &_| matches!(error, AgentError::Gone { .. }) || error.has_shut_down();
        for process in &mut self.processes {
            let pid = process.pid;
            let mut agent = process.agent(&mut self.channel, &self.agents.token);
            let mut mapped = agent.map(&process.held, MAP_LIMIT);
            for _ in 1..MAP_TRIES_MAX {
                let Err(source) = &mapped else { break };
                if needs_none(source) {
                    break;
                }
                tracing::warn!(pid, "cannot map GPU memory, trying again: {source}");
                mapped = agent.map(&process.held, MAP_LIMIT);
            }
            match mapped {
                Ok(()) => process.held.clear(),
                Err(source) if needs_none(&source) => process.held.clear(),
                Err(source) => {
                    let source = Box::new(ResidentError::Agent { pid, source });
                    result = result.and(Err(ResidentError::Lost { pid, source }));
                }
            }
        }
        result
    }
}

impl ResidentError {
    /// Returns true if the driver alone may suspend the processes: no resident suspend of them was ever completed.
    pub(super) fn driver_may(&self) -> bool {
        match self {
            Self::Agent { .. } | Self::Busy { .. } | Self::Halt(_) => !self.job_is_lost(),
            Self::Cuda(_)
            | Self::Shares { .. }
            | Self::Opaque { .. }
            | Self::Descriptors { .. }
            | Self::Newcomer { .. }
            | Self::Lost { .. }
            | Self::Stuck { .. }
            | Self::Copier(_)
            | Self::Socket(_)
            | Self::Read(_)
            | Self::Evicted
            | Self::Altered
            | Self::Facts
            | Self::Panicked => false,
        }
    }

    /// Returns true if another attempt may succeed when the job is halted at another moment.
    pub(super) fn passes(&self) -> bool {
        match self {
            Self::Agent { source, .. } => matches!(
                source,
                AgentError::Busy { .. } | AgentError::TimedOut { .. }
            ),
            Self::Cuda(error) => {
                matches!(**error, TreeError::TimedOut { .. }) && error.is_computing()
            }
            _ => false,
        }
    }
}
