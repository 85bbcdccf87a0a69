//! The halt of a process's threads, except for a few that still have work to do, while other programs still need the
//! process to exist.
//!
//! ```text
//! running ──seize, interrupt──▶ stopping ──wait──▶ halted ──detach──▶ running
//! ```
//! It uses ptrace, as CRIU and debuggers do: no signal is sent, and no handler of the job runs. If the calling thread
//! exits, the kernel releases all halted threads. A halted process can be left stopped by SIGSTOP, for another program
//! to trace, and can be halted again later, without any of its threads having run. If a spared thread needs the lock of
//! a halted one, the halted one can run for a moment (`relief`). This module must not know what is done meanwhile.

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
use relief::Wait;

mod relief;

/// Limit on the readings of the thread list until no thread is new. Each reading finds the threads that were started by
/// threads running during the last one.
const LOOKS_MAX: u32 = 16;
/// Time limit for all threads to stop. A thread stops as soon as it leaves the kernel; a thread in an uninterruptible
/// wait for a disk or a device leaves it later.
const STOP_LIMIT: Duration = Duration::from_secs(2);
/// Pause between two checks that a thread has stopped: the kernel has no wait for one thread with a time limit.
const STOP_LOOK: Duration = Duration::from_micros(100);
/// Limit on the threads of a process.
const THREADS_MAX: usize = 32_768;

/// The reason why a process could not be halted. All its threads run.
#[derive(Debug, thiserror::Error)]
pub enum HaltError {
    /// A thread cannot be traced.
    #[error("cannot stop thread {thread} of process {pid}; is a debugger attached to it?")]
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
    /// The process has exited or starts threads without end.
    #[error("cannot list the threads of process {pid}")]
    Threads {
        /// The process, as the host sees it.
        pid: i32,
    },
}

/// A process whose threads are stopped. They continue when the value is dropped, which must happen on the thread that
/// halted them.
#[derive(Debug)]
#[must_use = "dropping it lets the threads go on"]
pub struct Halted {
    process: Pid,
    threads: Vec<Thread>,
    spared: Vec<i32>,
    /// Spared threads that waited for a lock at the last check.
    waits: Vec<Wait>,
    /// A marker that keeps the value on the tracing thread, which alone may release the threads.
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
    /// The thread stopped at the delivery of this signal, which is still pending for it.
    With(Signal),
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
    for _ in 0..LOOKS_MAX {
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

/// Returns the host's number of the thread of `pid` (a host pid) whose own number is `id`. The host and the process may
/// use the same number for different threads.
#[must_use]
pub fn thread_of(pid: i32, id: i32) -> Option<i32> {
    let inside = |thread: &i32| number_inside(pid, *thread) == Some(id);
    threads_of(pid).ok()?.into_iter().find(inside)
}

/// Returns the number that the process `pid` itself uses for its thread `id`; both arguments are host numbers.
#[must_use]
pub fn number_inside(pid: i32, id: i32) -> Option<i32> {
    let task = ProcessEntry::new(pid).and_then(|entry| entry.task_from_tid(id));
    let status = task.and_then(|_| tree::status(id)).ok()?;
    status.nspid.and_then(|ids| ids.last().copied())
}

/// Returns true if a thread has exited. A first thread that has exited before the others is listed as long as they run,
/// and cannot be traced.
fn has_ended(pid: i32, thread: i32) -> bool {
    let task = ProcessEntry::new(pid).and_then(|entry| entry.task_from_tid(thread));
    task.and_then(|task| task.stat())
        .map_or(true, |stat| matches!(stat.state, 'Z' | 'X'))
}

/// Returns true if no thread of a process is running, or on its way into a stop.
fn stands(pid: i32) -> bool {
    let tasks = ProcessEntry::new(pid).and_then(|entry| entry.tasks());
    let at_work = |stat: procfs::process::Stat| !matches!(stat.state, 'T' | 't' | 'Z' | 'X');
    // A process that has exited counts as stopped.
    tasks.map_or(true, |tasks| {
        !tasks.filter_map(|task| task.ok()?.stat().ok()).any(at_work)
    })
}

pub(super) fn threads_of(pid: i32) -> Result<Vec<i32>, HaltError> {
    let failed = |_| HaltError::Threads { pid };
    let tasks = ProcessEntry::new(pid).and_then(|entry| entry.tasks());
    let threads: Vec<i32> = tasks
        .map_err(failed)?
        .filter_map(|task| Some(task.ok()?.tid))
        .collect();
    if threads.is_empty() || threads.len() > THREADS_MAX {
        return Err(HaltError::Threads { pid });
    }
    Ok(threads)
}

impl Halted {
    /// Ends the tracing and leaves the whole process stopped, as by SIGSTOP. No thread runs in between, because the
    /// kernel makes a released thread take part in the stop. [`halt`] works on the process as on any other.
    ///
    /// Blocks until the threads have stopped: CRIU (4.2.1) waits for two traps of a stopped thread, the stop's and its
    /// own. For a thread on its way into the stop the two are one, and CRIU waits for another until its timeout.
    pub fn stop(self) {
        let pid = self.pid();
        // A dead process does not need the signal.
        let _ = kill(self.process, Signal::SIGSTOP);
        drop(self);
        let deadline = clock::now() + STOP_LIMIT;
        while !stands(pid) && clock::now() < deadline {
            thread::sleep(STOP_LOOK);
        }
    }

    /// The process, as the host sees it.
    #[must_use]
    pub fn pid(&self) -> i32 {
        self.process.as_raw()
    }

    /// Ends the stop of the process for the spared threads; the tracer now holds the others.
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
            if !thread.stops_until(deadline, STOP_LOOK) {
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
    /// Returns true if the thread has stopped, or exited, before the deadline; there is a pause between two checks.
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

    fn look(&mut self) {
        let flags = WaitPidFlag::__WALL | WaitPidFlag::WNOHANG;
        self.stop = match waitpid(self.id, Some(flags)) {
            Ok(WaitStatus::StillAlive) | Err(Errno::EINTR) => Stop::Asked,
            // A signal was about to be delivered: that is a stop as well, and the signal waits.
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
        let deadline = clock::now() + STOP_LIMIT;
        for thread in &mut self.threads {
            // A thread that was requested to stop can be released only once it has stopped; one that never stops
            // continues when ckpt-run exits.
            thread.stops_until(deadline, STOP_LOOK);
            let signal = match thread.stop {
                Stop::With(signal) => Some(signal),
                Stop::Stopped => None,
                Stop::Asked | Stop::Gone => continue,
            };
            if ptrace::detach(thread.id, signal).is_err() {
                // The thread was killed meanwhile. Its process cannot exit before the end of each traced thread was
                // waited for.
                thread.stop = Stop::Asked;
                thread.stops_until(deadline, STOP_LOOK);
            }
        }
    }
}

#[cfg(test)]
mod tests;
