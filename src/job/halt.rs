//! Stops the threads of a process while it goes on existing for others: all but a few that still have work to do.
//!
//! ```text
//! running ──seize, interrupt──▶ stopping ──wait──▶ halted ──detach──▶ running
//! ```
//! By ptrace, as CRIU and debuggers do it: no signal is sent, and no handler of the job's runs. Where the calling
//! thread ends, the kernel lets all of them go. A halted process can be left stopped by SIGSTOP, for somebody else to
//! trace, and be halted again later, without one of its threads having run. Must not know what is done meanwhile.

use std::marker::PhantomData;
use std::thread;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::sys::ptrace;
use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;
use procfs::process::Process as ProcessEntry;

use crate::clock;

/// Looks at the list of threads until none is new: each look finds what those running during the last one started.
const LOOKS_MAX: u32 = 16;
/// For all threads to stop. A thread stops as soon as it leaves the kernel; one that waits for a disk or a device
/// without being interruptible leaves it later.
const STOP_LIMIT: Duration = Duration::from_secs(2);
/// Between two questions whether a thread has stopped: the kernel has no wait for one thread with a limit.
const STOP_LOOK: Duration = Duration::from_micros(100);
/// Most threads of a process.
const THREADS_MAX: usize = 32_768;

/// Why a process could not be halted. All its threads run.
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
    /// The process is gone or starts threads without end.
    #[error("cannot list the threads of process {pid}")]
    Threads {
        /// The process, as the host sees it.
        pid: i32,
    },
}

/// A process whose threads stand still. They go on when it is dropped, which must be on the thread that halted them.
#[derive(Debug)]
#[must_use = "dropping it lets the threads go on"]
pub struct Halted {
    process: Pid,
    threads: Vec<Thread>,
    /// Only the thread that traces may let go.
    not_send: PhantomData<*const ()>,
}

#[derive(Debug)]
struct Thread {
    id: Pid,
    stop: Stop,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stop {
    /// It was asked to.
    Asked,
    Stopped,
    /// It stopped to be given this signal, which it still has to get.
    With(Signal),
    Gone,
}

/// Halts all threads of `pid` but `spared`, all as the host sees them. Blocks until they stand still.
///
/// # Errors
/// A thread cannot be traced or does not stop; then all run on.
pub fn halt(pid: i32, spared: &[i32]) -> Result<Halted, HaltError> {
    let mut halted = Halted {
        process: Pid::from_raw(pid),
        threads: Vec::new(),
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

/// The thread of `pid` (a host pid) that calls itself `id`, as the host sees it. Both may have threads of that number,
/// and then they are not the same.
#[must_use]
pub fn thread_of(pid: i32, id: i32) -> Option<i32> {
    let inside = |thread: &i32| number_inside(pid, *thread) == Some(id);
    threads_of(pid).ok()?.into_iter().find(inside)
}

/// How the process `pid` itself calls its thread `id`; both as the host sees them.
#[must_use]
pub fn number_inside(pid: i32, id: i32) -> Option<i32> {
    let task = ProcessEntry::new(pid).and_then(|entry| entry.task_from_tid(id));
    let status = task.and_then(|task| task.status()).ok()?;
    status.nspid.and_then(|ids| ids.last().copied())
}

/// A first thread that has ended before the others is listed as long as they run, and cannot be traced.
fn has_ended(pid: i32, thread: i32) -> bool {
    let task = ProcessEntry::new(pid).and_then(|entry| entry.task_from_tid(thread));
    task.and_then(|task| task.stat())
        .map_or(true, |stat| matches!(stat.state, 'Z' | 'X'))
}

fn threads_of(pid: i32) -> Result<Vec<i32>, HaltError> {
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
    /// Lets the tracer go and leaves the process stopped, all of it, as by SIGSTOP: no thread runs in between, because
    /// the kernel has one that is let go take part in the stop. [`halt`] works on it as on any.
    pub fn stop(self) {
        // One that has died needs it no more.
        let _ = kill(self.process, Signal::SIGSTOP);
    }

    /// Ends the stop of the process for those threads that were spared; the others are held by us now.
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
            // It has ended since.
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
            if !thread.stops_until(deadline) {
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
    /// Whether it stands still, or is gone, before the deadline.
    fn stops_until(&mut self, deadline: Instant) -> bool {
        while self.stop == Stop::Asked {
            self.look();
            if self.stop != Stop::Asked {
                return true;
            }
            if clock::now() >= deadline {
                return false;
            }
            thread::sleep(STOP_LOOK);
        }
        true
    }

    fn look(&mut self) {
        let flags = WaitPidFlag::__WALL | WaitPidFlag::WNOHANG;
        self.stop = match waitpid(self.id, Some(flags)) {
            Ok(WaitStatus::StillAlive) | Err(Errno::EINTR) => Stop::Asked,
            // A signal was about to reach it: that is a stop as well, and the signal waits.
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
            // One that was asked can be let go only once it stands; one that never does goes on when we end.
            thread.stops_until(deadline);
            let signal = match thread.stop {
                Stop::With(signal) => Some(signal),
                Stop::Stopped => None,
                Stop::Asked | Stop::Gone => continue,
            };
            if ptrace::detach(thread.id, signal).is_err() {
                // Killed meanwhile. Its process cannot end before the end of each traced thread was taken note of.
                thread.stop = Stop::Asked;
                thread.stops_until(deadline);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader, Write};
    use std::process::{Child, Command, Stdio};

    use super::*;

    /// Three threads that count lines on stdout, one each, after their thread ids.
    const COUNTERS: &str = r"
import sys, threading
counts = [0, 0, 0]
def count(place):
    while True:
        counts[place] += 1
for place in (1, 2):
    threading.Thread(target=count, args=(place,), daemon=True).start()
print(*[thread.native_id for thread in threading.enumerate()], flush=True)
for line in sys.stdin:
    print(*counts, flush=True)
";

    struct Counters {
        child: Child,
        lines: std::io::Lines<BufReader<std::process::ChildStdout>>,
        threads: Vec<i32>,
    }

    fn numbers(line: &str) -> Vec<i32> {
        let words = line.split_whitespace();
        words.map(|word| word.parse().unwrap()).collect()
    }

    impl Counters {
        fn start() -> Self {
            let mut child = Command::new("python3")
                .args(["-c", COUNTERS])
                .stdin(Stdio::piped())
                .stdout(Stdio::piped())
                .spawn()
                .unwrap();
            let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
            let threads = numbers(&lines.next().unwrap().unwrap());
            Self {
                child,
                lines,
                threads,
            }
        }

        fn pid(&self) -> i32 {
            i32::try_from(self.child.id()).unwrap()
        }

        fn ask(&mut self) -> Vec<i32> {
            writeln!(self.child.stdin.as_mut().unwrap()).unwrap();
            numbers(&self.lines.next().unwrap().unwrap())
        }

        fn state(&self, thread: i32) -> char {
            let task = ProcessEntry::new(self.pid()).unwrap();
            let task = task.task_from_tid(thread).unwrap();
            task.stat().unwrap().state
        }
    }

    impl Drop for Counters {
        fn drop(&mut self) {
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
    }

    #[test]
    fn all_threads_stand_still_but_those_that_are_spared() {
        let mut job = Counters::start();
        let pid = job.pid();
        let halted = halt(pid, &[job.threads[1]]).unwrap();
        let states: Vec<char> = job.threads.iter().map(|id| job.state(*id)).collect();
        assert_eq!([states[0], states[2]], ['t', 't']);
        assert_ne!(states[1], 't');
        drop(halted);
        assert_eq!(job.ask().len(), 3);
        assert!(job.threads.iter().all(|id| job.state(*id) != 't'));
    }

    #[test]
    fn a_signal_that_comes_meanwhile_is_not_lost() {
        let job = Counters::start();
        let pid = job.pid();
        let halted = halt(pid, &[]).unwrap();
        nix::sys::signal::kill(Pid::from_raw(pid), Signal::SIGTERM).unwrap();
        drop(halted);
        let mut job = job;
        assert_eq!(job.lines.next().map(|line| line.is_ok()), None);
    }

    #[test]
    fn a_process_that_is_traced_already_is_refused_and_runs_on() {
        let mut job = Counters::start();
        let pid = job.pid();
        let traced = job.threads[2];
        let (told, hold) = std::sync::mpsc::channel::<()>();
        let (ready, begun) = std::sync::mpsc::channel::<()>();
        let tracer = std::thread::spawn(move || {
            ptrace::seize(Pid::from_raw(traced), ptrace::Options::empty()).unwrap();
            ready.send(()).unwrap();
            let _ = hold.recv();
        });
        begun.recv().unwrap();
        let error = halt(pid, &[]).unwrap_err();
        assert!(error.to_string().contains("debugger"), "{error}");
        assert_eq!(job.ask().len(), 3);
        drop(told);
        tracer.join().unwrap();
    }

    #[test]
    fn a_process_that_is_killed_meanwhile_lets_us_go() {
        let mut job = Counters::start();
        let halted = halt(job.pid(), &[]).unwrap();
        job.child.kill().unwrap();
        drop(halted);
        // Ours to wait for as its parent and as its tracer: the latter may have been first.
        let _ = job.child.wait();
        assert!(matches!(
            halt(job.pid(), &[]),
            Err(HaltError::Threads { .. })
        ));
    }

    #[test]
    fn a_process_that_is_left_stopped_and_halted_again_has_not_run() {
        let mut job = Counters::start();
        let pid = job.pid();
        let spared = job.threads[1];
        let ran = |job: &Counters| -> u64 {
            let others = [job.threads[0], job.threads[2]];
            let task = |id| ProcessEntry::new(pid).unwrap().task_from_tid(id).unwrap();
            let times = others.map(|id| task(id).schedstat().unwrap().sum_exec_runtime);
            times.iter().sum()
        };
        let halted = halt(pid, &[spared]).unwrap();
        let before = ran(&job);
        halted.stop();
        while job.threads.iter().any(|id| job.state(*id) != 'T') {
            std::thread::yield_now();
        }
        let halted = halt(pid, &[spared]).unwrap();
        halted.wake_spared();
        while job.state(spared) == 'T' {
            std::thread::yield_now();
        }
        let others = [job.state(job.threads[0]), job.state(job.threads[2])];
        assert_eq!(others, ['t', 't']);
        // To stop and to be traced takes microseconds in the kernel; a turn of a thread that counts is milliseconds.
        let ran = ran(&job) - before;
        assert!(ran < 2_000_000, "{ran} ns");
        drop(halted);
        assert_eq!(job.ask().len(), 3);
    }

    #[test]
    fn a_thread_is_known_by_the_number_that_the_host_sees() {
        let job = Counters::start();
        assert_eq!(thread_of(job.pid(), job.threads[2]), Some(job.threads[2]));
        assert_eq!(thread_of(job.pid(), 1), None);
    }

    #[test]
    fn a_first_thread_that_has_ended_is_no_obstacle() {
        let script = format!(
            "import ctypes, threading, time\n\
            threading.Thread(target=time.sleep, args=(100,)).start()\n\
            print(flush=True)\n\
            ctypes.CDLL(None).syscall({}, 0)",
            nix::libc::SYS_exit
        );
        let mut child = Command::new("python3")
            .args(["-c", &script])
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap())
            .read_line(&mut line)
            .unwrap();
        let pid = i32::try_from(child.id()).unwrap();
        while !has_ended(pid, pid) {
            std::thread::yield_now();
        }
        let halted = halt(pid, &[]);
        child.kill().unwrap();
        let halted = halted.unwrap();
        assert_eq!(halted.threads.len(), 2);
        drop(halted);
        child.wait().unwrap();
    }
}
