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

use std::sync::Mutex;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::clock;
use crate::cuda::{self, Driver};
use crate::job::{self, HaltError, Halted, Process};
use crate::run::gpu_facts::SparedThreads;
use crate::sync::locked;

/// Pause between two checks whether halted threads block the working ones: it hardly lengthens a freeze.
const LOOK: Duration = Duration::from_millis(2);
/// Time before a halted thread may run for a moment although it might use the GPU while its memory is absent.
pub(crate) const LAST_RESORT: Duration = Duration::from_secs(2);
/// Processes that are to stand still together, so that none waits on the GPU for one that does.
#[derive(Clone, Debug, Default)]
pub(crate) struct HaltGroup {
    processes: Vec<GroupMember>,
    /// Longest work of the driver's or an agent's.
    limit: Duration,
}

#[derive(Clone, Debug)]
struct GroupMember {
    /// Pid as the host sees it.
    host_pid: i32,
    pid: i32,
    /// Threads that go on, as the host sees them.
    spared: Vec<i32>,
}

/// Processes that stand still. Dropped, they go on.
#[must_use = "dropped, the processes go on"]
pub(crate) struct HaltedProcesses {
    halted: Vec<Halted>,
    limit: Duration,
}

/// Why it cannot be told who is to stand still.
#[derive(Debug, thiserror::Error)]
pub(crate) enum HaltGroupError {
    #[error(transparent)]
    Driver(#[from] cuda::CallError),
    #[error(transparent)]
    Threads(#[from] HaltError),
}

impl HaltGroup {
    /// Makes a group of running processes; work on them may take up to `limit`. `agent` returns the thread number of a
    /// process's agent as the process itself sees it.
    pub fn of(
        driver: &Driver,
        processes: &[Process],
        limit: Duration,
        agent: impl Fn(&Process) -> Option<i32>,
    ) -> Result<Self, HaltGroupError> {
        let stander = |process: &Process| {
            let pid = process.host_pid;
            // The driver numbers it as we do, and the agent as the process does.
            let mut spared = vec![driver.process(pid).restore_thread()?];
            if let Some(agent) = agent(process) {
                let agent = job::thread_of(pid, agent);
                spared.push(agent.ok_or(HaltError::Threads { pid })?);
            }
            Ok(GroupMember {
                host_pid: pid,
                pid: process.pid,
                spared,
            })
        };
        let processes: Result<_, HaltGroupError> = processes.iter().map(stander).collect();
        Ok(Self {
            processes: processes?,
            limit,
        })
    }

    /// Makes a group of an image's processes, found among the existing ones. Missing processes are the caller's
    /// concern.
    pub fn restored(
        facts: &[SparedThreads],
        there: &[Process],
        limit: Duration,
    ) -> Result<Self, HaltError> {
        let stander = |facts: &SparedThreads| {
            let process = there.iter().find(|process| process.pid == facts.pid)?;
            let pid = process.host_pid;
            let threads = facts.threads.iter();
            let spared = threads.map(|id| job::thread_of(pid, *id));
            let spared: Option<Vec<i32>> = spared.collect();
            let found = spared.map(|spared| GroupMember {
                host_pid: pid,
                pid: facts.pid,
                spared,
            });
            Some(found.ok_or(HaltError::Threads { pid }))
        };
        let processes: Result<_, HaltError> = facts.iter().filter_map(stander).collect();
        Ok(Self {
            processes: processes?,
            limit,
        })
    }

    /// Returns the facts for the image.
    pub fn facts(&self) -> Vec<SparedThreads> {
        let facts = |stander: &GroupMember| {
            let inside = |id: &i32| job::number_inside(stander.host_pid, *id);
            Some(SparedThreads {
                pid: stander.pid,
                threads: stander.spared.iter().map(inside).collect::<Option<_>>()?,
            })
        };
        // One that has ended meanwhile needs none.
        self.processes.iter().filter_map(facts).collect()
    }

    /// Halts all that live, stopped or running; their spared threads run then.
    pub fn halt(&self) -> Result<HaltedProcesses, HaltError> {
        let living = self
            .processes
            .iter()
            .filter(|stander| job::is_alive(stander.host_pid));
        let halted: Vec<Halted> = living
            .map(|stander| job::halt(stander.host_pid, &stander.spared))
            .collect::<Result<_, _>>()?;
        halted.iter().for_each(Halted::wake_spared);
        Ok(HaltedProcesses {
            halted,
            limit: self.limit,
        })
    }
}

impl HaltedProcesses {
    /// Has the driver or the agents work on the processes. Where they wait for a lock that a halted thread has, such
    /// threads make way: step by step, and freely `patience` after the beginning. Work without an end harms the job
    /// more than a crash does: the processes are killed then, so that it fails.
    pub fn during<T: Send>(&mut self, patience: Duration, work: impl FnOnce() -> T + Send) -> T {
        let work = Mutex::new(Some(work));
        let work = || {
            let work = locked(&work).take();
            work.map(|work| work())
        };
        let result = thread::scope(|scope| {
            let (ended, end) = mpsc::channel::<()>();
            let worker = thread::Builder::new().spawn_scoped(scope, || {
                let _ended = ended;
                work()
            });
            match worker {
                Ok(worker) => {
                    self.watch(patience, &end);
                    let result = worker.join();
                    result.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
                }
                // Without anybody to watch, but done.
                Err(_) => work(),
            }
        });
        result.unwrap_or_else(|| unreachable!("it is done once"))
    }

    /// Until the other side of `end` is gone.
    fn watch(&mut self, patience: Duration, end: &mpsc::Receiver<()>) {
        let begun = clock::now();
        let mut reliefs = 0;
        while let Err(RecvTimeoutError::Timeout) = end.recv_timeout(LOOK) {
            let freely = begun.elapsed() >= patience;
            let relieved = self.halted.iter_mut();
            let relieved = relieved.filter_map(|halted| halted.relieve(freely).then_some(()));
            reliefs += relieved.count();
            if begun.elapsed() >= self.limit {
                tracing::error!(
                    "the driver has not come to an end within {:?} (snapshot.timeout): the job's GPU processes are killed",
                    self.limit
                );
                for halted in &self.halted {
                    // One that is dead already is as good.
                    let _ = kill(Pid::from_raw(halted.pid()), Signal::SIGKILL);
                }
                let _ = end.recv();
            }
        }
        if reliefs > 0 {
            tracing::debug!(reliefs, "halted threads made way");
        }
    }

    /// Leaves them stopped, to be halted again later: none runs before.
    pub fn stop(self) {
        for halted in self.halted {
            halted.stop();
        }
    }
}
