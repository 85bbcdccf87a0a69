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
/// For an agent to unmap or map all it has: 50 segments take 2 and 10 ms, and it may have 16,384.
const HANDLE_LIMIT: Duration = Duration::from_secs(30);
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
}

#[derive(Debug)]
pub(super) struct KeptProcess {
    pub host_pid: i32,
    pub pid: i32,
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
    let rest = || {
        let taking = take(&kept)?;
        watch.lap("release");
        // They stay halted until their state is suspended: none of them may run while it has no memory.
        let suspended = lock()?.suspend()?;
        watch.lap("suspend");
        Ok((suspended, taking))
    };
    let result: Result<_, ResidentError> = rest();
    let undone = result.is_err().then(|| kept.give_back()).transpose();
    drop(halted);
    undone?;
    result.map(|(suspended, taking)| (suspended, kept, taking))
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
            let agent = cover.hello.as_ref().map(|hello| hello.thread);
            let resumes = driver.process(cover.host_pid).restore_thread();
            let resumes = resumes.map_err(cuda::TreeError::from)?;
            let spared = agent.into_iter().chain([resumes]);
            let spared = spared.map(|thread| {
                let pid = cover.host_pid;
                job::thread_of(pid, thread).ok_or(HaltError::Threads { pid })
            });
            Ok(KeptProcess {
                host_pid: cover.host_pid,
                pid: cover.pid,
                spared: spared.collect::<Result<_, _>>()?,
                held: Vec::new(),
            })
        };
        let processes: Result<_, ResidentError> = covers.iter().map(process).collect();
        Ok(Self {
            channel: Channel::bind()?,
            token: token.clone(),
            processes: processes?,
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
        Ok(())
    }

    /// Lets go of the memory: it is in an image.
    pub(in crate::supervisor) fn evict(&mut self) {
        for process in &mut self.processes {
            process.held.clear();
        }
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
            processes: self.processes.iter().map(process).collect(),
        }
    }

    /// Halts every process but for those that handle its memory.
    pub(super) fn halt(&self) -> Result<Vec<Halted>, HaltError> {
        let halt = |process: &KeptProcess| job::halt(process.host_pid, &process.spared);
        self.processes.iter().map(halt).collect()
    }

    /// Takes the memory of every process, or of none.
    fn let_go(&mut self) -> Result<(), ResidentError> {
        for index in 0..self.processes.len() {
            let process = &mut self.processes[index];
            let mut agent = self.channel.agent(&self.token, process.pid);
            let pid = process.pid;
            let released = agent.probe(PROBE_LIMIT).and_then(|()| {
                let first = agent.release(HANDLE_LIMIT);
                // What came before the time was over is with this agent, and it alone: asked again, it has all.
                match first {
                    Err(AgentError::TimedOut { .. }) => agent.release(HANDLE_LIMIT),
                    done => done,
                }
            });
            match released {
                Ok(held) => process.held = held,
                Err(source) => {
                    self.give_back()?;
                    return Err(ResidentError::Agent { pid, source });
                }
            }
        }
        Ok(())
    }

    /// Has the agents map everything where it was. Their processes are halted, and their calls to CUDA do not wait.
    pub(super) fn give_back(&mut self) -> Result<(), ResidentError> {
        for process in &mut self.processes {
            let mut agent = self.channel.agent(&self.token, process.pid);
            let mut tries = 1;
            while let Err(source) = agent.map(&process.held, HANDLE_LIMIT) {
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
