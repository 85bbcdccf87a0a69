//! Relief of spared threads that wait for a lock of a halted thread.
//!
//! A thread can be halted anywhere, for example within malloc while it holds the lock of a heap. If the driver's own
//! thread needs this heap, its work never ends (observed with driver 580.159.04; at the first snapshot if all threads
//! share one heap). While all other threads are halted, a spared thread that waits for a lock of its process waits for
//! a halted thread. The holder cannot be determined, so all threads that were halted while computing (not in a blocking
//! system call) run in turn. They run in single steps, so slowly that none can take the lock again before the waiting
//! thread gets it.

use std::ops::Range;
use std::thread;
use std::time::Duration;

use nix::libc;
use nix::sys::ptrace;
use nix::sys::signal::Signal;
use nix::unistd::Pid;

use super::halted_at::Call;
use super::{Halted, STOP_CHECK_INTERVAL, STOP_LIMIT, Stop, Thread};
use crate::clock;
use crate::job::tree;

/// Limit on the steps of a thread, about ten milliseconds. Malloc and free take hundreds of steps.
const STEPS_MAX: u32 = 3000;
/// Steps between two checks for the release of the lock.
const STEPS: u32 = 8;
/// Time limit for a step. A longer step is a blocking system call.
const STEP_MAX: Duration = Duration::from_micros(500);
/// Time for which a thread runs freely if no step helped. Some code makes no progress in single steps, such as a
/// restartable sequence.
const RUN: Duration = Duration::from_micros(200);

/// Signals that stop a process without a handler for them.
const STOPPING: [Signal; 4] = [
    Signal::SIGSTOP,
    Signal::SIGTSTP,
    Signal::SIGTTIN,
    Signal::SIGTTOU,
];

/// A thread (host thread id) and the address of the lock that it waits for.
pub(super) type Wait = (i32, u64);

impl Halted {
    /// Helps a spared thread that has waited for the same lock since the previous call. Returns true if there was one.
    /// Call this every few milliseconds while spared threads work. With `freely`, threads may run unrestricted for a
    /// moment if single steps do not help.
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
        let near = call.and_then(|call| code(pid, call.counter()?));
        let is_near = |at: &u64| near.as_ref().is_some_and(|near| near.contains(at));
        let at_work = |thread: &Thread| {
            thread
                .can_continue()
                .then(|| Call::of(pid, thread.id.as_raw())?.address_at_work())
                .flatten()
        };
        // The holder of a lock is often in the same code as other threads that wait for it.
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
        let all = self
            .threads
            .iter_mut()
            .filter(|thread| thread.can_continue());
        for thread in all.filter(|_| freely) {
            thread.run();
            if is_over() {
                return;
            }
        }
    }
}

impl Thread {
    /// Returns true if the thread is stopped and can continue. A pending signal that stops the whole process would stop
    /// the spared threads, too.
    fn can_continue(&self) -> bool {
        match self.stop {
            Stop::Stopped => true,
            Stop::With(signal) => !STOPPING.contains(&signal),
            Stop::Asked | Stop::Gone => false,
        }
    }

    fn step_until(&mut self, is_over: impl Fn() -> bool) {
        for number in 1..=STEPS_MAX {
            self.resume(ptrace::step);
            // Any pause would be longer than a step.
            if !self.stops_until(clock::now() + STEP_MAX, Duration::ZERO) {
                self.halt_again();
                return self.end_step();
            }
            if !self.can_continue() || number % STEPS == 0 && is_over() {
                return;
            }
        }
    }

    /// Discards the trap of a step that ended when the thread was already stopped. The trap would kill the process.
    fn end_step(&mut self) {
        while self.stop == Stop::Stopped && has_pending(self.id, Signal::SIGTRAP) {
            // The thread runs only until the trap is delivered.
            self.resume(ptrace::cont);
            self.halt_again();
        }
    }

    fn run(&mut self) {
        self.resume(ptrace::cont);
        thread::sleep(RUN);
        self.halt_again();
    }

    fn resume(&mut self, how: impl FnOnce(Pid, Option<Signal>) -> nix::Result<()>) {
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
        // The limit of the first halt applies: a thread that stays longer in the kernel stops when it leaves it.
        self.stops_until(clock::now() + STOP_LIMIT, STOP_CHECK_INTERVAL);
    }
}

/// Returns the address of the lock that a thread waits for. Condition variables, semaphores and locks shared between
/// processes use other operations (such as `FUTEX_WAIT_BITSET`).
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

/// Returns the mapping around an address.
fn code(process: Pid, at: u64) -> Option<Range<u64>> {
    let maps = tree::maps(process.as_raw());
    let mut ranges = maps
        .ok()?
        .into_iter()
        .map(|map| map.address.0..map.address.1);
    ranges.find(|range| range.contains(&at))
}
