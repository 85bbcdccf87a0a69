//! CUDA processes that are frozen together, without a gap, from the suspend of their GPU state to its resume.
//!
//! ```text
//! running ─ halt ─▶ halted ─(driver suspends)─ stop ─▶ stopped ─(CRIU)─▶ stopped ─ halt ─▶ halted ─(driver resumes)─▶ running
//! ```
//! While the processes are halted or stopped, none of their threads runs except the few that the driver and the agent
//! need for that work. This is necessary: the driver's own mappings are inaccessible while it is suspended, and some of
//! its calls read them, or inspect an address, before they wait for it (580.159.04). A thread that queries an event
//! dies of SIGSEGV, a copy fails with "invalid argument", and a graph or an NCCL kernel fails with a launch failure.
//! Processes are halted by ptrace, which CRIU needs for itself. In between, SIGSTOP keeps them stopped, and an image
//! contains them stopped.

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

/// Interval between two checks for halted threads that block the working threads; short enough that it hardly prolongs
/// a freeze.
const LOOK: Duration = Duration::from_millis(2);
/// Wait before a halted thread may run for a moment where it might use the GPU while its memory is not mapped.
pub(crate) const LAST_RESORT: Duration = Duration::from_secs(2);
/// Processes that are frozen together, so that no running process waits on the GPU for a frozen one.
#[derive(Clone, Debug, Default)]
pub(crate) struct HaltGroup {
    processes: Vec<GroupMember>,
    /// Longest permitted work of the driver or an agent.
    limit: Duration,
}

#[derive(Clone, Debug)]
struct GroupMember {
    /// Pid as the host sees it.
    host_pid: i32,
    pid: i32,
    /// Threads that continue, by their host ids.
    spared: Vec<i32>,
}

/// Frozen processes. Dropping the value lets them continue.
#[must_use = "dropped, the processes continue"]
pub(crate) struct HaltedProcesses {
    halted: Vec<Halted>,
    limit: Duration,
}

/// Reason why the threads to be frozen could not be determined.
#[derive(Debug, thiserror::Error)]
pub(crate) enum HaltGroupError {
    #[error(transparent)]
    Driver(#[from] cuda::CallError),
    #[error(transparent)]
    Threads(#[from] HaltError),
}

impl HaltGroup {
    /// Creates the group from running processes. Work on them may take up to `limit`. `agent` returns the id of a
    /// process's agent thread as the process itself sees it.
    pub fn of(
        driver: &Driver,
        processes: &[Process],
        limit: Duration,
        agent: impl Fn(&Process) -> Option<i32>,
    ) -> Result<Self, HaltGroupError> {
        let stander = |process: &Process| {
            let pid = process.host_pid;
            // The driver uses the host's thread ids, as ckpt-run does; the agent uses those of the process.
            let mut spared = vec![driver.process(pid).restore_thread()?];
            if let Some(agent) = agent(process) {
                let agent = job::thread_of(pid, agent);
                spared.push(agent.ok_or_else(|| HaltError::without_thread(pid))?);
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

    /// Creates the group from the processes recorded in an image that are among the processes `there`. The others are
    /// ignored: another check reports missing processes.
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
            Some(found.ok_or_else(|| HaltError::without_thread(pid)))
        };
        let processes: Result<_, HaltError> = facts.iter().filter_map(stander).collect();
        Ok(Self {
            processes: processes?,
            limit,
        })
    }

    /// Returns the facts that an image records about the group.
    pub fn facts(&self) -> Vec<SparedThreads> {
        let facts = |stander: &GroupMember| {
            let inside = |id: &i32| job::number_inside(stander.host_pid, *id);
            Some(SparedThreads {
                pid: stander.pid,
                threads: stander.spared.iter().map(inside).collect::<Option<_>>()?,
            })
        };
        // A process that has exited meanwhile needs no entry.
        self.processes.iter().filter_map(facts).collect()
    }

    /// Halts all living processes, whether stopped or running; their spared threads run.
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
    /// Runs `work`, in which the driver or the agents work on the processes. If the work waits for a lock that a halted
    /// thread holds, such threads may run: step by step, and freely once `patience` has elapsed. Work that never ends
    /// harms the job more than a crash does: after the limit the processes are killed, so that the job fails.
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
                // No thread could be started: the work is done without a watcher.
                Err(_) => work(),
            }
        });
        result.unwrap_or_else(|| unreachable!("it is done once"))
    }

    /// Watches the halted threads until the other side of `end` is dropped.
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
                    "the driver did not finish within {:?} (snapshot.timeout): the job's GPU processes are killed",
                    self.limit
                );
                for halted in &self.halted {
                    // A failed kill is harmless: the process is dead already.
                    let _ = kill(Pid::from_raw(halted.pid()), Signal::SIGKILL);
                }
                let _ = end.recv();
            }
        }
        if reliefs > 0 {
            tracing::debug!(reliefs, "halted threads ran to release a lock");
        }
    }

    /// Leaves the processes stopped, to be halted again later; none runs in between.
    pub fn stop(self) {
        for halted in self.halted {
            halted.stop();
        }
    }
}
