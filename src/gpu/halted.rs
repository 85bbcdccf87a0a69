//! CUDA processes that are frozen together, without a gap, from the suspend of their GPU state to its resume.
//!
//! ```text
//! running ─ halt ─▶ halted ─(driver suspends)─ stop ─▶ stopped ─(CRIU)─▶ stopped ─ halt ─▶ halted ─(driver resumes)─▶ running
//! ```
//! While the processes are halted or stopped, none of their threads runs except the few that the driver and the agent
//! need for that work. This is necessary: the driver's own mappings are inaccessible while it is suspended, and some of
//! its calls read them, or inspect an address, before they wait for it (580.159.04). A thread that queries an event
//! dies of SIGSEGV, a copy fails with "invalid argument", and a graph or an NCCL kernel fails with a launch failure.
//!
//! Some calls do not wait for the driver's lock, such as those for free memory, a device's name or its clock rates. A
//! thread that is halted inside one of them continues after the resume with a handle that is no longer valid, and the
//! call fails: in `cublasCreate` with "not initialized" (580.159.04). So processes are halted again until none of their
//! threads is inside the driver.
//!
//! Processes are halted by ptrace, which CRIU needs for itself. In between, SIGSTOP keeps them stopped, and an image
//! contains them stopped.

use std::ops::Range;
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
/// Time limit for finding a moment at which no thread is inside the driver. Its questions take up to some ms.
const OUTSIDE_LIMIT: Duration = Duration::from_secs(5);
/// First pause between two attempts at that.
const OUTSIDE_PAUSE: Duration = Duration::from_millis(2);
/// Limit on the pauses between two attempts.
const PAUSE_MAX: Duration = Duration::from_millis(200);
/// Beginning of the file name of the driver's library in a process.
const DRIVER_LIBRARY: &str = "libcuda.so";

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
    /// Code of the driver's library.
    driver_code: Vec<Range<u64>>,
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

/// A pause between two attempts at halting processes, in which their threads run. The next one is longer by a quarter, up
/// to [`PAUSE_MAX`]: on a loaded machine a thread waits that long for a processor.
pub(crate) struct HaltPause {
    next: Duration,
}

impl HaltPause {
    pub fn first(first: Duration) -> Self {
        Self { next: first }
    }

    pub fn wait(&mut self) {
        thread::sleep(self.next);
        self.next = (self.next * 5 / 4).min(PAUSE_MAX);
    }
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
                driver_code: job::code_of(pid, DRIVER_LIBRARY),
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
                // Halted outside of it for the image.
                driver_code: Vec::new(),
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

    /// Halts all living processes while none of their threads is inside the driver, other than waiting for its lock.
    pub fn halt_outside_driver(&self) -> Result<HaltedProcesses, HaltError> {
        let deadline = clock::now() + OUTSIDE_LIMIT;
        let mut pause = HaltPause::first(OUTSIDE_PAUSE);
        let mut tries = 0;
        loop {
            tries += 1;
            let processes = self.halt()?;
            let Some(pid) = self.inside_driver(&processes) else {
                return Ok(processes);
            };
            if clock::now() >= deadline {
                return Err(HaltError::Inside { pid, tries });
            }
            tracing::debug!(pid, tries, "a thread is inside the CUDA driver");
            drop(processes);
            pause.wait();
        }
    }

    /// Returns the host pid of a process with a thread that was halted inside the driver.
    fn inside_driver(&self, processes: &HaltedProcesses) -> Option<i32> {
        let is_inside = |halted: &&Halted| {
            let member = self
                .processes
                .iter()
                .find(|one| one.host_pid == halted.pid());
            member.is_some_and(|member| halted.works_in(&member.driver_code))
        };
        processes.halted.iter().find(is_inside).map(Halted::pid)
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

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    /// Halts the looping program, whose own code stands for the driver's.
    fn halt_outside(body: &str) -> Result<bool, HaltError> {
        let folder = tempfile::tempdir().unwrap();
        let source =
            format!("#include <unistd.h>\nint main() {{ for (volatile long i;;) {{ {body} }} }}");
        let program = job::compiled(&folder, "looping", &source, &[]);
        let mut child = Command::new(program).spawn().unwrap();
        let host_pid = i32::try_from(child.id()).unwrap();
        // Its start takes less processor time than this.
        let ticks = || {
            let process = procfs::process::Process::new(host_pid).unwrap();
            process.stat().unwrap().utime
        };
        while ticks() < 5 {
            thread::yield_now();
        }
        let member = GroupMember {
            host_pid,
            pid: host_pid,
            spared: Vec::new(),
            driver_code: job::code_of(host_pid, "looping"),
        };
        let group = HaltGroup {
            processes: vec![member],
            limit: Duration::ZERO,
        };
        let result = group.halt_outside_driver();
        let is_outside = result.map(|halted| group.inside_driver(&halted).is_none());
        child.kill().unwrap();
        child.wait().unwrap();
        is_outside
    }

    #[test]
    fn processes_are_halted_between_their_calls() {
        let body = "for (i = 0; i < 1000000; i++); usleep(20000);";
        assert!(halt_outside(body).unwrap());
    }

    #[test]
    fn a_process_that_is_always_inside_is_reported() {
        let error = halt_outside("i++;").unwrap_err();
        assert!(matches!(error, HaltError::Inside { tries, .. } if tries > 1));
    }
}
