//! Halt of a process's threads, except for a few spared threads that must keep working while the process exists.
//!
//! ```text
//! running ──seize, interrupt──▶ stopping ──wait──▶ halted ──detach──▶ running
//! ```
//! The halt uses ptrace, like CRIU and debuggers: no signal is sent, and no signal handler of the job runs. If the
//! tracing thread exits, the kernel releases all halted threads. A halted process can be left stopped by SIGSTOP, so
//! that another program can trace it or this module can halt it again. None of its threads runs in between. If a spared
//! thread needs a lock that a halted thread holds, the halted thread can run for a moment (`relief`). This module is
//! independent of the work that the spared threads do.

use std::marker::PhantomData;
use std::thread;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::sys::ptrace;
use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;
use procfs::process::Process as ProcessEntry;

use super::tree;
use crate::clock;
pub use halted_at::code_of;
use relief::Wait;

mod halted_at;
mod relief;

/// Limit on the readings of the thread list until it contains no new thread. Each reading finds the threads started
/// since the last one by threads that were still running.
const READINGS_MAX: u32 = 16;
/// Time limit for all threads to stop. A thread stops as soon as it leaves the kernel. A thread in an uninterruptible
/// wait for a disk or a device leaves it later.
const STOP_LIMIT: Duration = Duration::from_secs(2);
/// Pause between two checks for a stop: the kernel offers no wait for a single thread with a time limit.
const STOP_CHECK_INTERVAL: Duration = Duration::from_micros(100);
/// Limit on the threads of a process.
const THREADS_MAX: usize = 32_768;

/// Reasons why a process could not be halted. All its threads continue.
#[derive(Debug, thiserror::Error)]
pub enum HaltError {
    /// A thread cannot be traced.
    #[error("cannot stop thread {thread} of process {pid}; detach any debugger from it")]
    Trace {
        /// The process, as the host sees it.
        pid: i32,
        /// The thread, as the host sees it.
        thread: i32,
        /// The reason.
        #[source]
        source: Errno,
    },
    /// A thread did not stop.
    #[error("cannot stop thread {thread} of process {pid} within {STOP_LIMIT:?}")]
    Slow {
        /// The process, as the host sees it.
        pid: i32,
        /// The thread, as the host sees it.
        thread: i32,
    },
    /// The process has exited.
    #[error("process {pid} has exited")]
    Exited {
        /// The process, as the host sees it.
        pid: i32,
    },
    /// The process lives, but a thread that must continue was not found.
    #[error("process {pid} lacks the thread of the CUDA driver or of ckpt-run's agent")]
    Lacks {
        /// The process, as the host sees it.
        pid: i32,
    },
    /// In every attempt a thread was halted within a call of the CUDA driver.
    #[error(
        "cannot stop process {pid} outside of its CUDA calls in {tries} attempts: a thread asks the driver all the time \
         (cuMemGetInfo, cuDeviceGetAttribute); let it pause between two questions"
    )]
    Inside {
        /// The process, as the host sees it.
        pid: i32,
        /// Number of attempts.
        tries: u32,
    },
    /// The process keeps starting threads, or has too many.
    #[error(
        "process {pid} starts threads faster than they can be stopped, or has more than {THREADS_MAX}"
    )]
    Threads {
        /// The process, as the host sees it.
        pid: i32,
    },
}

impl HaltError {
    /// Returns the error about a thread of `pid` that was not found.
    #[must_use]
    pub fn without_thread(pid: i32) -> Self {
        if tree::is_alive(pid) {
            Self::Lacks { pid }
        } else {
            Self::Exited { pid }
        }
    }
}

/// A process whose threads are stopped. The threads continue when the value is dropped, which must happen on the thread
/// that halted them.
#[derive(Debug)]
#[must_use = "dropping it lets the threads continue"]
pub struct Halted {
    process: Pid,
    threads: Vec<Thread>,
    spared: Vec<i32>,
    /// Spared threads that waited for a lock at the last check.
    waits: Vec<Wait>,
    /// Marker that keeps the value on the tracing thread: no other thread can release the halted threads.
    not_send: PhantomData<*const ()>,
}

#[derive(Debug)]
struct Thread {
    id: Pid,
    stop: Stop,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stop {
    /// The thread was requested to stop.
    Asked,
    Stopped,
    /// The thread stopped at the delivery of this signal. The signal remains pending.
    With(Signal),
    /// The thread has exited, or is not traced any more.
    Gone,
}

/// Halts all threads of `pid` except `spared`, all numbered as the host sees them. Blocks until they have stopped.
///
/// # Errors
/// A thread cannot be traced or does not stop; then all threads continue.
pub fn halt(pid: i32, spared: &[i32]) -> Result<Halted, HaltError> {
    let mut halted = Halted {
        process: Pid::from_raw(pid),
        threads: Vec::new(),
        spared: spared.to_vec(),
        waits: Vec::new(),
        not_send: PhantomData,
    };
    for _ in 0..READINGS_MAX {
        let fresh: Vec<i32> = threads_of(pid)?
            .into_iter()
            .filter(|id| !spared.contains(id) && !halted.has(*id))
            .collect();
        if fresh.is_empty() {
            return Ok(halted);
        }
        for &id in &fresh {
            halted.ask(pid, id)?;
        }
        halted.wait(pid)?;
    }
    Err(HaltError::Threads { pid })
}

/// Returns the host number of the thread of `pid` (a host pid) that the job numbers `id`. The two numberings may use
/// the same number for different threads.
#[must_use]
pub fn thread_of(pid: i32, id: i32) -> Option<i32> {
    let inside = |thread: &i32| number_inside(pid, *thread) == Some(id);
    threads_of(pid).ok()?.into_iter().find(inside)
}

/// Returns the job's number of the thread `id` of process `pid`; both arguments are host numbers.
#[must_use]
pub fn number_inside(pid: i32, id: i32) -> Option<i32> {
    let task = ProcessEntry::new(pid).and_then(|entry| entry.task_from_tid(id));
    let status = task.and_then(|_| tree::status(id)).ok()?;
    status.nspid.and_then(|ids| ids.last().copied())
}

/// Returns true if a thread has exited. A main thread that has exited before the others stays listed as long as they
/// run, and cannot be traced.
fn has_ended(pid: i32, thread: i32) -> bool {
    let task = ProcessEntry::new(pid).and_then(|entry| entry.task_from_tid(thread));
    task.and_then(|task| task.stat())
        .map_or(true, |stat| matches!(stat.state, 'Z' | 'X'))
}

/// Returns true if no thread of a process is running or about to stop.
fn has_stopped(pid: i32) -> bool {
    let tasks = ProcessEntry::new(pid).and_then(|entry| entry.tasks());
    let at_work = |stat: procfs::process::Stat| !matches!(stat.state, 'T' | 't' | 'Z' | 'X');
    // A process that has exited counts as stopped.
    tasks.map_or(true, |tasks| {
        !tasks.filter_map(|task| task.ok()?.stat().ok()).any(at_work)
    })
}

pub(super) fn threads_of(pid: i32) -> Result<Vec<i32>, HaltError> {
    let failed = |_| HaltError::Exited { pid };
    let tasks = ProcessEntry::new(pid).and_then(|entry| entry.tasks());
    let threads: Vec<i32> = tasks
        .map_err(failed)?
        .filter_map(|task| Some(task.ok()?.tid))
        .collect();
    match threads.len() {
        0 => Err(HaltError::Exited { pid }),
        1..=THREADS_MAX => Ok(threads),
        _ => Err(HaltError::Threads { pid }),
    }
}

impl Halted {
    /// Ends the tracing and leaves the whole process stopped, as by SIGSTOP. No thread runs in between, because the
    /// kernel makes a released thread take part in the stop. [`halt`] can halt the process again.
    ///
    /// Blocks until the threads have stopped. CRIU (4.2.1) expects two stops of a stopped thread: the existing one and
    /// the one that it requests. For a thread that is still about to stop, the kernel reports one, and CRIU waits for
    /// the other until its timeout.
    pub fn stop(self) {
        let pid = self.pid();
        // A dead process does not need the signal.
        let _ = kill(self.process, Signal::SIGSTOP);
        drop(self);
        let deadline = clock::now() + STOP_LIMIT;
        while !has_stopped(pid) && clock::now() < deadline {
            thread::sleep(STOP_CHECK_INTERVAL);
        }
    }

    /// Returns the host pid of the process.
    #[must_use]
    pub fn pid(&self) -> i32 {
        self.process.as_raw()
    }

    /// Ends the stop of the process for the spared threads. The tracer still holds the others.
    pub fn wake_spared(&self) {
        let _ = kill(self.process, Signal::SIGCONT);
    }

    fn has(&self, id: i32) -> bool {
        self.threads.iter().any(|thread| thread.id.as_raw() == id)
    }

    fn ask(&mut self, pid: i32, id: i32) -> Result<(), HaltError> {
        let thread = Pid::from_raw(id);
        match ptrace::seize(thread, ptrace::Options::empty()) {
            Ok(()) => {}
            // The thread has exited since.
            Err(Errno::ESRCH) => return Ok(()),
            Err(Errno::EPERM) if has_ended(pid, id) => {
                let stop = Stop::Gone;
                self.threads.push(Thread { id: thread, stop });
                return Ok(());
            }
            Err(source) => {
                return Err(HaltError::Trace {
                    pid,
                    thread: id,
                    source,
                });
            }
        }
        let stop = match ptrace::interrupt(thread) {
            Ok(()) => Stop::Asked,
            Err(_) => Stop::Gone,
        };
        self.threads.push(Thread { id: thread, stop });
        Ok(())
    }

    fn wait(&mut self, pid: i32) -> Result<(), HaltError> {
        let deadline = clock::now() + STOP_LIMIT;
        for thread in &mut self.threads {
            if !thread.stops_until(deadline, STOP_CHECK_INTERVAL) {
                return Err(HaltError::Slow {
                    pid,
                    thread: thread.id.as_raw(),
                });
            }
        }
        Ok(())
    }
}

impl Thread {
    /// Waits until the thread has stopped or exited, with a pause between two checks. Returns false at the deadline.
    fn stops_until(&mut self, deadline: Instant, pause: Duration) -> bool {
        while self.stop == Stop::Asked {
            self.look();
            if self.stop != Stop::Asked {
                return true;
            }
            if clock::now() >= deadline {
                return false;
            }
            thread::sleep(pause);
        }
        true
    }

    /// Releases the thread if it has stopped. A killed thread cannot be released: it is reaped, because its process
    /// cannot exit before. The first thread of a process can be reaped only after all others.
    fn release(&mut self) {
        let signal = match self.stop {
            Stop::Asked => return self.look(),
            Stop::With(signal) => Some(signal),
            Stop::Stopped => None,
            Stop::Gone => return,
        };
        self.stop = match ptrace::detach(self.id, signal) {
            Ok(()) => Stop::Gone,
            Err(_) => Stop::Asked,
        };
    }

    fn look(&mut self) {
        let flags = WaitPidFlag::__WALL | WaitPidFlag::WNOHANG;
        self.stop = match waitpid(self.id, Some(flags)) {
            Ok(WaitStatus::StillAlive) | Err(Errno::EINTR) => Stop::Asked,
            // A signal was about to be delivered. The thread is stopped, and the signal remains pending.
            Ok(WaitStatus::Stopped(_, signal)) if signal != Signal::SIGTRAP => Stop::With(signal),
            Ok(
                WaitStatus::Stopped(..)
                | WaitStatus::PtraceEvent(..)
                | WaitStatus::PtraceSyscall(_)
                | WaitStatus::Continued(_),
            ) => Stop::Stopped,
            Ok(WaitStatus::Exited(..) | WaitStatus::Signaled(..)) | Err(_) => Stop::Gone,
        };
    }
}

impl Drop for Halted {
    fn drop(&mut self) {
        // A thread that never stops cannot be released: it continues when the tracing thread exits.
        let deadline = clock::now() + STOP_LIMIT;
        loop {
            for thread in &mut self.threads {
                thread.release();
            }
            if self.threads.iter().all(|thread| thread.stop == Stop::Gone)
                || clock::now() >= deadline
            {
                return;
            }
            thread::sleep(STOP_CHECK_INTERVAL);
        }
    }
}

#[cfg(test)]
pub(crate) mod tests;
