//! Halted threads that hold a lock which a spared thread waits for.
//!
//! A thread can be halted anywhere. It may be within malloc, with the lock of the heap that the driver's own thread
//! allocates from or frees to; then that thread's work never ends (580.159.04; if all threads have one heap, at the
//! first snapshot). While all other threads are stopped, a spared thread that waits for a lock of its process waits for
//! one of them. It is not possible to determine which, so the threads that were halted at work (not in a waiting call
//! of the kernel) continue one after the other. They continue by single steps: with these, none can be fast enough to
//! take the lock again before the waiting thread has it.

use std::fs;
use std::ops::Range;
use std::thread;
use std::time::Duration;

use nix::libc;
use nix::sys::ptrace;
use nix::sys::signal::Signal;
use nix::unistd::Pid;

use super::{Halted, STOP_LIMIT, STOP_LOOK, Stop, Thread};
use crate::clock;
use crate::job::tree;

/// Limit on the steps of a thread, about ten milliseconds; malloc and free take hundreds of steps.
const STEPS_MAX: u32 = 3000;
/// Steps between two checks that they were enough.
const STEPS: u32 = 8;
/// Time limit for a step; a longer one is a waiting call of the kernel.
const STEP_MAX: Duration = Duration::from_micros(500);
/// Time for which a thread runs if no step helped: some code, such as a sequence that the kernel restarts, makes no
/// progress by steps.
const RUN: Duration = Duration::from_micros(200);

/// Calls of the kernel that malloc and free make while holding the heap's lock, and drivers while holding theirs. A
/// thread that is halted in one of them stops at its end.
const BRIEF: [i64; 7] = [
    libc::SYS_brk,
    libc::SYS_mmap,
    libc::SYS_munmap,
    libc::SYS_mremap,
    libc::SYS_mprotect,
    libc::SYS_madvise,
    libc::SYS_ioctl,
];

/// Signals that stop a process, unless it has a handler for them.
const STOPPING: [Signal; 4] = [
    Signal::SIGSTOP,
    Signal::SIGTSTP,
    Signal::SIGTTIN,
    Signal::SIGTTOU,
];

/// A thread, as the host sees it, and the lock that it waits for.
pub(super) type Wait = (i32, u64);

impl Halted {
    /// Helps a spared thread that waits for the same lock as at the previous call; returns true if there was one. To be
    /// called every few milliseconds while spared threads have work to do. With `freely`, threads may run for a moment,
    /// to any place, if single steps do not help.
    pub fn relieve(&mut self, freely: bool) -> bool {
        let pid = self.process;
        let spared = self.spared.iter();
        let now: Vec<Wait> = spared
            .filter_map(|&id| Some((id, awaited(pid, id)?)))
            .collect();
        let stuck = now.iter().copied().find(|wait| self.waits.contains(wait));
        self.waits = now;
        if let Some(wait) = stuck {
            self.make_way(wait, freely);
        }
        stuck.is_some()
    }

    fn make_way(&mut self, wait: Wait, freely: bool) {
        let pid = self.process;
        let call = Call::of(pid, wait.0);
        let near = call.and_then(|call| code(pid, *call.words.last()?));
        let is_near = |at: &u64| near.as_ref().is_some_and(|near| near.contains(at));
        let at_work = |thread: &Thread| thread.can_go().then(|| thread.at_work(pid)).flatten();
        // The holder of a lock is most often in the code that makes other threads wait for it.
        self.threads
            .sort_by_cached_key(|thread| match at_work(thread) {
                Some(at) if is_near(&at) => 0,
                Some(_) => 1,
                None => 2,
            });
        let is_over = || awaited(pid, wait.0) != Some(wait.1);
        let working = |thread: &&mut Thread| at_work(thread).is_some();
        for thread in self.threads.iter_mut().filter(working) {
            thread.step_until(is_over);
            if is_over() {
                return;
            }
        }
        let all = self.threads.iter_mut().filter(|thread| thread.can_go());
        for thread in all.filter(|_| freely) {
            thread.run();
            if is_over() {
                return;
            }
        }
    }
}

impl Thread {
    /// Returns true if the thread is stopped and can continue. With a pending signal that stops the whole process it
    /// would stop the working threads, too.
    fn can_go(&self) -> bool {
        match self.stop {
            Stop::Stopped => true,
            Stop::With(signal) => !STOPPING.contains(&signal),
            Stop::Asked | Stop::Gone => false,
        }
    }

    /// Returns the address where the thread was halted; `None` in a waiting call of the kernel.
    fn at_work(&self, process: Pid) -> Option<u64> {
        let call = Call::of(process, self.id.as_raw())?;
        let works = call.number == -1 || BRIEF.contains(&call.number);
        call.words.last().copied().filter(|_| works)
    }

    fn step_until(&mut self, is_over: impl Fn() -> bool) {
        for number in 1..=STEPS_MAX {
            self.go_on(ptrace::step);
            // Any pause would be longer than a step.
            if !self.stops_until(clock::now() + STEP_MAX, Duration::ZERO) {
                self.halt_again();
                return self.end_step();
            }
            if !self.can_go() || number % STEPS == 0 && is_over() {
                return;
            }
        }
    }

    /// Removes the signal of a step that ended when the thread was already stopped; it would kill the process.
    fn end_step(&mut self) {
        while self.stop == Stop::Stopped && has_pending(self.id, Signal::SIGTRAP) {
            // The thread runs only up to that signal.
            self.go_on(ptrace::cont);
            self.halt_again();
        }
    }

    fn run(&mut self) {
        self.go_on(ptrace::cont);
        thread::sleep(RUN);
        self.halt_again();
    }

    fn go_on(&mut self, how: impl FnOnce(Pid, Option<Signal>) -> nix::Result<()>) {
        let signal = match self.stop {
            Stop::With(signal) => Some(signal),
            Stop::Stopped => None,
            Stop::Asked | Stop::Gone => return,
        };
        self.stop = match how(self.id, signal) {
            Ok(()) => Stop::Asked,
            Err(_) => Stop::Gone,
        };
    }

    fn halt_again(&mut self) {
        if self.stop == Stop::Asked && ptrace::interrupt(self.id).is_err() {
            self.stop = Stop::Gone;
        }
        // The same limit as for the first halt; a thread that is in the kernel for longer stops as soon as it leaves
        // the kernel.
        self.stops_until(clock::now() + STOP_LIMIT, STOP_LOOK);
    }
}

/// Returns the address of the lock that a thread waits for. Condition variables and semaphores wait in another way
/// (`FUTEX_WAIT_BITSET`), and so do locks shared between processes.
fn awaited(process: Pid, thread: i32) -> Option<u64> {
    const LOCK: i32 = libc::FUTEX_WAIT | libc::FUTEX_PRIVATE_FLAG;
    let call = Call::of(process, thread).filter(|call| call.number == libc::SYS_futex)?;
    let is_lock = call.words.get(1) == Some(&u64::from(LOCK.unsigned_abs()));
    call.words.first().copied().filter(|_| is_lock)
}

/// Returns true if a signal is pending for this thread alone.
fn has_pending(thread: Pid, signal: Signal) -> bool {
    tree::status(thread.as_raw()).is_ok_and(|status| status.sigpnd & 1 << (signal as i32 - 1) != 0)
}

/// The call of the kernel that a thread waits or was interrupted in.
struct Call {
    /// The number of the call; -1 for none.
    number: i64,
    /// The call's arguments, if there is a call; the last two words are the stack pointer and the program counter.
    words: Vec<u64>,
}

impl Call {
    /// Returns the call; `None` for a running thread.
    fn of(process: Pid, thread: i32) -> Option<Self> {
        let text = fs::read_to_string(format!("/proc/{process}/task/{thread}/syscall")).ok()?;
        let mut words = text.split_whitespace();
        let number = words.next()?.parse().ok()?;
        let word = |word: &str| u64::from_str_radix(word.strip_prefix("0x")?, 16).ok();
        Some(Self {
            number,
            words: words.map(word).collect::<Option<_>>()?,
        })
    }
}

/// Returns the mapping around an address.
fn code(process: Pid, at: u64) -> Option<Range<u64>> {
    let maps = tree::maps(process.as_raw());
    let mut ranges = maps
        .ok()?
        .into_iter()
        .map(|map| map.address.0..map.address.1);
    ranges.find(|range| range.contains(&at))
}
