//! CUDA processes that stand still, all of them and all the time, from the suspend of their GPU state to its resume.
//!
//! ```text
//! running ─ halt ─▶ halted ─(driver suspends)─ stop ─▶ stopped ─(CRIU)─▶ stopped ─ halt ─▶ halted ─(driver resumes)─▶ running
//! ```
//! While they are halted or stopped, no thread of theirs runs but the few that the driver and the agent need for that
//! work. It must be so. The driver's own mappings are inaccessible while it is suspended, and some of its calls read
//! them, or look at an address, before they wait for it (580.159.04): a thread that asks whether an event has happened
//! dies of SIGSEGV, a copy fails with "invalid argument", and a graph or a kernel of NCCL's with a launch failure.
//! Halted is by ptrace, which CRIU needs for itself; in between SIGSTOP keeps them, and an image has them stopped.

use serde::{Deserialize, Serialize};

use crate::cuda::{self, Driver};
use crate::job::{self, HaltError, Halted, Process};

/// Threads of a process that work while the others stand still, as the job sees them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StandingFacts {
    /// The process.
    pub pid: i32,
    /// Its threads: the driver's, and the agent's if it has one.
    pub threads: Vec<i32>,
}

/// Processes that are to stand still together, so that none waits on the GPU for one that does.
#[derive(Clone, Debug, Default)]
pub(super) struct Standing {
    processes: Vec<Stander>,
}

#[derive(Clone, Debug)]
struct Stander {
    /// As the host sees it.
    host_pid: i32,
    pid: i32,
    /// Threads that go on, as the host sees them.
    spared: Vec<i32>,
}

/// Processes that stand still. Dropped, they go on.
#[must_use = "dropped, the processes go on"]
pub(super) struct Still {
    halted: Vec<Halted>,
}

/// Why it cannot be told who is to stand still.
#[derive(Debug, thiserror::Error)]
pub(super) enum StandingError {
    #[error(transparent)]
    Driver(#[from] cuda::CallError),
    #[error(transparent)]
    Threads(#[from] HaltError),
}

impl Standing {
    /// Of processes that run; `agent` tells the number of a process's agent as the process itself sees it.
    pub fn of(
        driver: &Driver,
        processes: &[Process],
        agent: impl Fn(&Process) -> Option<i32>,
    ) -> Result<Self, StandingError> {
        let stander = |process: &Process| {
            let pid = process.host_pid;
            // The driver numbers it as we do, and the agent as the process does.
            let mut spared = vec![driver.process(pid).restore_thread()?];
            if let Some(agent) = agent(process) {
                let agent = job::thread_of(pid, agent);
                spared.push(agent.ok_or(HaltError::Threads { pid })?);
            }
            Ok(Stander {
                host_pid: pid,
                pid: process.pid,
                spared,
            })
        };
        let processes: Result<_, StandingError> = processes.iter().map(stander).collect();
        Ok(Self {
            processes: processes?,
        })
    }

    /// Of processes that an image has, among those that are there. One that is not is somebody else's concern.
    pub fn restored(facts: &[StandingFacts], there: &[Process]) -> Result<Self, HaltError> {
        let stander = |facts: &StandingFacts| {
            let process = there.iter().find(|process| process.pid == facts.pid)?;
            let pid = process.host_pid;
            let threads = facts.threads.iter();
            let spared = threads.map(|id| job::thread_of(pid, *id));
            let spared: Option<Vec<i32>> = spared.collect();
            let found = spared.map(|spared| Stander {
                host_pid: pid,
                pid: facts.pid,
                spared,
            });
            Some(found.ok_or(HaltError::Threads { pid }))
        };
        let processes: Result<_, HaltError> = facts.iter().filter_map(stander).collect();
        Ok(Self {
            processes: processes?,
        })
    }

    /// What an image will say of them.
    pub fn facts(&self) -> Vec<StandingFacts> {
        let facts = |stander: &Stander| {
            let inside = |id: &i32| job::number_inside(stander.host_pid, *id);
            Some(StandingFacts {
                pid: stander.pid,
                threads: stander.spared.iter().map(inside).collect::<Option<_>>()?,
            })
        };
        // One that has ended meanwhile needs none.
        self.processes.iter().filter_map(facts).collect()
    }

    /// Whether one of them has ended: its memory is nobody's concern any more.
    pub fn has_ended(&self) -> bool {
        let mut processes = self.processes.iter();
        processes.any(|stander| !job::is_alive(stander.host_pid))
    }

    /// Halts all that live, stopped or running; their spared threads run then.
    pub fn halt(&self) -> Result<Still, HaltError> {
        let living = self
            .processes
            .iter()
            .filter(|stander| job::is_alive(stander.host_pid));
        let halted: Vec<Halted> = living
            .map(|stander| job::halt(stander.host_pid, &stander.spared))
            .collect::<Result<_, _>>()?;
        halted.iter().for_each(Halted::wake_spared);
        Ok(Still { halted })
    }
}

impl Still {
    /// Leaves them stopped, to be halted again later: none runs before.
    pub fn stop(self) {
        for halted in self.halted {
            halted.stop();
        }
    }
}
