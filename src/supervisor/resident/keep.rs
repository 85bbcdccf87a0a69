//! Memory of halted processes: the agents let go of it, descriptors keep it, the agents map it again.

use std::thread;
use std::time::Duration;

use super::carrier::Taking;
use super::choice::Cover;
use super::error::ResidentError;
use super::facts::{ResidentFacts, ResidentProcess, ResidentSegment};
use super::refill::Memory;
use crate::cuda::{self, Driver, GpuMap, GpuUuid, SuspendOptions};
use crate::job::{self, HaltError, Halted, Process};
use crate::resident::{AgentError, Channel, Held, Token};

use super::super::image::Stopwatch;

/// For an agent to say what it holds. It answers from memory; more means that there is none.
pub(super) const HELLO_LIMIT: Duration = Duration::from_secs(1);
/// For an agent to try whether the driver answers it. Those few calls take less than a millisecond; more means that a
/// thread stands still within the driver.
const PROBE_LIMIT: Duration = Duration::from_millis(250);
/// For an agent to unmap all it has: 50 segments take 2 ms, and it may have 16,384. The job stands still meanwhile.
const RELEASE_LIMIT: Duration = Duration::from_secs(5);
/// For an agent to map all it has: 50 segments take 10 ms. Without an answer the job is lost.
const MAP_LIMIT: Duration = Duration::from_secs(30);
/// How often the job is stopped anew until no thread stands still within the driver.
const TRIES_MAX: u32 = 5;
/// Between two such tries: long enough for a call to CUDA to end.
const TRY_PAUSE: Duration = Duration::from_millis(5);
/// How often an agent is asked to map its memory.
const MAP_TRIES_MAX: u32 = 3;

/// Device memory that its processes have let go of.
#[derive(Debug)]
pub(in crate::supervisor) struct Kept {
    channel: Channel,
    token: Token,
    processes: Vec<KeptProcess>,
    /// What it held is in an image only.
    evicted: bool,
}

#[derive(Debug)]
pub(super) struct KeptProcess {
    pub host_pid: i32,
    pub pid: i32,
    /// Its agent has memory; the others are halted along with it, so that none waits on the GPU for one that is.
    covered: bool,
    /// Threads that are never halted: the agent's and the driver's, as the host sees them.
    spared: Vec<i32>,
    pub held: Vec<Held>,
}

/// Halts the processes, has the agents let go, and suspends the GPU state of all `users`; `take` is called with the
/// memory before that. Their threads go on when this returns, into calls to CUDA that wait.
///
/// # Errors
/// Everything is as it was, unless the error says that the job is lost.
pub(in crate::supervisor) fn suspend(
    driver: &Driver,
    users: &[i32],
    (token, covers): (&Token, &[Cover]),
    options: &SuspendOptions,
    watch: &mut Stopwatch,
    take: impl FnOnce(&Kept) -> Result<Taking, ResidentError>,
) -> Result<(cuda::Suspended, Kept, Taking), ResidentError> {
    let mut kept = Kept::of(driver, token, covers)?;
    let lock = || cuda::lock_all(driver, users, options);
    let mut tries = 0;
    let halted = loop {
        tries += 1;
        let locked = lock()?;
        watch.lap("lock");
        let halted = kept.halt()?;
        locked.unlock()?;
        match kept.let_go() {
            Ok(()) => break halted,
            Err(error) if !error.passes() => return Err(error),
            Err(_) if tries == TRIES_MAX => return Err(ResidentError::Busy { tries }),
            Err(error) => tracing::debug!(tries, %error, "the job is stopped anew"),
        }
        drop(halted);
        thread::sleep(TRY_PAUSE);
    };
    let taking = take(&kept);
    watch.lap("release");
    // They stay halted until their state is suspended: none of them may run while it has no memory.
    let suspend = || -> Result<_, ResidentError> { Ok(lock()?.suspend()?) };
    let failed = match taking.map(|taking| (suspend(), taking)) {
        Ok((Ok(suspended), taking)) => {
            watch.lap("suspend");
            return Ok((suspended, kept, taking));
        }
        Ok((Err(error), taking)) => (error, Some(taking)),
        Err(error) => (error, None),
    };
    let (error, taking) = failed;
    // One that is stuck would not answer.
    let given_back = if error.job_is_lost() {
        Ok(())
    } else {
        kept.give_back()
    };
    drop(halted);
    // The copier is done with the memory before anybody tries again, and the job does not wait for it.
    drop(taking.map(Taking::join));
    given_back?;
    Err(error)
}

/// Resumes processes that were restored, onto the memory that `kept` has for them.
///
/// # Errors
/// The job cannot compute.
pub(in crate::supervisor) fn resume_restored(
    driver: &Driver,
    pids: &[i32],
    map: &GpuMap,
    mut kept: Kept,
) -> Result<(), ResidentError> {
    // On every error the caller ends the job.
    let halted = kept.halt()?;
    cuda::resume_restored(driver, pids, map)?;
    kept.give_back()?;
    drop(halted);
    Ok(())
}

impl Kept {
    /// Of processes that still hold their memory, or none: nothing is kept yet.
    pub(in crate::supervisor) fn of(
        driver: &Driver,
        token: &Token,
        covers: &[Cover],
    ) -> Result<Self, ResidentError> {
        let process = |cover: &Cover| {
            let pid = cover.host_pid;
            // The driver numbers it as we do, and the agent as the process does.
            let resumes = driver.process(pid).restore_thread();
            let mut spared = vec![resumes.map_err(cuda::TreeError::from)?];
            if let Some(hello) = &cover.hello {
                let agent = job::thread_of(pid, hello.thread);
                spared.push(agent.ok_or(HaltError::Threads { pid })?);
            }
            Ok(KeptProcess {
                host_pid: pid,
                pid: cover.pid,
                covered: cover.bytes() > 0,
                spared,
                held: Vec::new(),
            })
        };
        let processes: Result<_, ResidentError> = covers.iter().map(process).collect();
        Ok(Self {
            channel: Channel::bind()?,
            token: *token,
            processes: processes?,
            evicted: false,
        })
    }

    /// Of restored processes, and the memory that was made for them.
    ///
    /// # Errors
    /// One of them is not there, or has no agent any more.
    pub(in crate::supervisor) fn restored(
        driver: &Driver,
        token: &Token,
        there: &[Process],
        memory: Memory,
    ) -> Result<Self, ResidentError> {
        let mut channel = Channel::bind()?;
        let mut cover = |pid: &i32| {
            let process = there.iter().find(|process| process.pid == *pid);
            let hello = channel.agent(token, *pid).hello(HELLO_LIMIT);
            let failed = |source| ResidentError::Agent { pid: *pid, source };
            Ok(Cover {
                host_pid: process
                    .ok_or(ResidentError::Missing { pid: *pid })?
                    .host_pid,
                pid: *pid,
                hello: Some(
                    hello
                        .map_err(failed)?
                        .ok_or(ResidentError::Missing { pid: *pid })?,
                ),
            })
        };
        let covers: Result<Vec<Cover>, ResidentError> = memory.keys().map(&mut cover).collect();
        let mut kept = Self::of(driver, token, &covers?)?;
        for (pid, memory) in memory {
            kept.put(pid, memory)?;
        }
        Ok(kept)
    }

    pub(super) fn processes(&self) -> &[KeptProcess] {
        &self.processes
    }

    /// Gives a process memory that was made for it.
    pub(in crate::supervisor) fn put(
        &mut self,
        pid: i32,
        memory: Vec<Held>,
    ) -> Result<(), ResidentError> {
        let mut processes = self.processes.iter_mut();
        let process = processes.find(|process| process.pid == pid);
        process.ok_or(ResidentError::Facts)?.held = memory;
        self.evicted = false;
        Ok(())
    }

    /// Lets go of the memory: it is in an image.
    pub(in crate::supervisor) fn evict(&mut self) {
        for process in &mut self.processes {
            process.held.clear();
        }
        self.evicted = true;
    }

    /// Whether there is memory to give back.
    pub(super) fn is_evicted(&self) -> bool {
        self.evicted
    }

    /// What an image will say of it.
    pub(in crate::supervisor) fn facts(&self) -> ResidentFacts {
        let segment = |held: &Held| ResidentSegment {
            address: held.segment.address,
            len: held.segment.len,
            gpu: GpuUuid::from_bytes(held.segment.device).to_string(),
        };
        let process = |process: &KeptProcess| ResidentProcess {
            pid: process.pid,
            segments: process.held.iter().map(segment).collect(),
        };
        ResidentFacts {
            processes: self.covered().map(process).collect(),
        }
    }

    fn covered(&self) -> impl Iterator<Item = &KeptProcess> {
        self.processes.iter().filter(|process| process.covered)
    }

    /// Halts every process but for those threads that handle its memory.
    pub(super) fn halt(&self) -> Result<Vec<Halted>, HaltError> {
        let halt = |process: &KeptProcess| job::halt(process.host_pid, &process.spared);
        self.processes.iter().map(halt).collect()
    }

    /// Takes the memory of every process, or of none.
    fn let_go(&mut self) -> Result<(), ResidentError> {
        let Self {
            channel, processes, ..
        } = self;
        let covered = || processes.iter().filter(|process| process.covered);
        // What is taken and given back can be suspended in this way only from then on: not before all are ready.
        for pid in covered().map(|process| process.pid) {
            let probed = channel.agent(&self.token, pid).probe(PROBE_LIMIT);
            probed.map_err(|source| ResidentError::Agent { pid, source })?;
        }
        for place in 0..self.processes.len() {
            if !self.processes[place].covered {
                continue;
            }
            match self.release(self.processes[place].pid) {
                Ok(held) => self.processes[place].held = held,
                Err(error) if error.job_is_lost() => return Err(error),
                Err(error) => return self.give_back().and(Err(error)),
            }
        }
        Ok(())
    }

    /// # Errors
    /// It has its memory and keeps it, unless it is lost.
    fn release(&mut self, pid: i32) -> Result<Vec<Held>, ResidentError> {
        let mut agent = self.channel.agent(&self.token, pid);
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
            AgentError::TimedOut { .. } | AgentError::Io { .. } => {
                let called_off = agent.call_off();
                self.channel = Channel::bind().map_err(|error| lost(error.into()))?;
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

    /// Has the agents map everything where it was. Their processes are halted, and their calls to CUDA do not wait.
    pub(super) fn give_back(&mut self) -> Result<(), ResidentError> {
        for process in &mut self.processes {
            let mut agent = self.channel.agent(&self.token, process.pid);
            let mut tries = 1;
            while let Err(source) = agent.map(&process.held, MAP_LIMIT) {
                let pid = process.pid;
                if tries == MAP_TRIES_MAX {
                    let source = Box::new(ResidentError::Agent { pid, source });
                    return Err(ResidentError::Lost { pid, source });
                }
                tracing::warn!(pid, "GPU memory is mapped again: {source}");
                tries += 1;
            }
            process.held.clear();
        }
        Ok(())
    }
}

impl ResidentError {
    /// Whether the driver may do what failed in this way, as long as it never was done in this way.
    pub(in crate::supervisor) fn driver_may(&self) -> bool {
        match self {
            Self::Agent { .. } | Self::Busy { .. } | Self::Halt(_) => !self.job_is_lost(),
            Self::Cuda(_)
            | Self::Missing { .. }
            | Self::Shares { .. }
            | Self::Lost { .. }
            | Self::Copier(_)
            | Self::Socket(_)
            | Self::Read(_)
            | Self::Evicted
            | Self::Facts
            | Self::Panicked => false,
        }
    }

    /// Whether it may succeed when the job is stopped at another moment.
    fn passes(&self) -> bool {
        let Self::Agent { source, .. } = self else {
            return false;
        };
        matches!(
            source,
            AgentError::Busy { .. } | AgentError::TimedOut { .. }
        )
    }
}
