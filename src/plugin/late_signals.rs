#![allow(unsafe_code, reason = "called by CRIU through C")]
//! Signals that arrive between CRIU's look at a thread's signals and the end of the dump.
//!
//! CRIU (4.2) saves the signals of a process before its memory and its timers. A timer that expires in between is saved as
//! one that has expired, and its signal is not saved: after a restore, `alarm` would never ring. Therefore the plugin counts
//! the signals that CRIU sees, and puts later ones into the file of the omitted state when all tasks are dumped. A restored
//! process sends itself such a signal before it runs.
//!
//! A timer that expires after it was saved will ring after the restore; its signal is not put into the file. CRIU saves the
//! timers right before its code leaves the process, for which it interrupts the process (`PTRACE_INTERRUPT`).

use core::cell::UnsafeCell;
use core::ffi::{c_int, c_long};

use super::listing::for_each_thread;
use super::omitted_records::{Record, append, file};
use super::remote_calls::Remote;
use super::system_call::{address, system_call};
use super::tracing::{PTRACE, waiting_signals};

/// Kind of a record with a signal: 1 for one of a whole process, otherwise 0, then its `siginfo_t`.
pub const LATE_SIGNAL: u32 = 9;

const PROCESSES_MAX: usize = 1 << 16;
const QUEUES_MAX: usize = 256;
/// Most late signals of a queue that are saved.
const LATE_MAX: u64 = 1024;
/// Words of a `siginfo_t`.
const INFO_WORDS: usize = 16;

/// A queue of signals: that of a process, or of one thread.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Queue {
    thread: c_int,
    is_shared: bool,
}

impl Queue {
    pub const fn of_thread(thread: c_int) -> Self {
        Self {
            thread,
            is_shared: false,
        }
    }
}

/// `struct ptrace_peeksiginfo_args`.
#[repr(C)]
pub struct Peek {
    offset: u64,
    flags: u32,
    number: i32,
}

struct Noted {
    processes: [c_int; PROCESSES_MAX],
    processes_len: usize,
    /// Queues in which CRIU has seen signals, and their number.
    seen: Numbers,
    /// Masks of the signals that waited for each thread and its process when CRIU had saved the timers.
    with_timers: Numbers,
}

/// Numbers of queues; 0 for all others.
struct Numbers {
    known: [(Queue, u64); QUEUES_MAX],
    len: usize,
}

impl Numbers {
    const NONE: Self = Self {
        known: [(Queue::of_thread(0), 0); QUEUES_MAX],
        len: 0,
    };

    fn of(&self, queue: Queue) -> u64 {
        let mut known = self.known.iter().take(self.len);
        let found = known.find(|(known, _)| *known == queue);
        found.map_or(0, |(_, number)| *number)
    }

    fn set(&mut self, queue: Queue, number: u64) {
        let mut known = self.known.iter_mut().take(self.len);
        if let Some((_, known)) = known.find(|(known, _)| *known == queue) {
            *known = number;
        } else if number > 0 {
            if let Some(place) = self.known.get_mut(self.len) {
                *place = (queue, number);
            }
            self.len += 1;
        }
    }

    fn is_whole(&self) -> bool {
        self.len <= QUEUES_MAX
    }
}

struct Shared(UnsafeCell<Noted>);

// SAFETY: CRIU has one thread.
unsafe impl Sync for Shared {}

static NOTED: Shared = Shared(UnsafeCell::new(Noted {
    processes: [0; PROCESSES_MAX],
    processes_len: 0,
    seen: Numbers::NONE,
    with_timers: Numbers::NONE,
}));

/// Notes a process that is about to be dumped.
pub fn note_process(pid: c_int) {
    // SAFETY: CRIU has one thread, and nothing keeps a reference across this.
    let noted = unsafe { &mut *NOTED.0.get() };
    if let Some(place) = noted.processes.get_mut(noted.processes_len) {
        *place = pid;
        noted.processes_len += 1;
    }
}

/// Notes that CRIU has seen so many signals of a thread.
pub fn note_seen(thread: c_int, peek: &Peek, number: c_long) {
    let Some(number) = u64::try_from(number).ok().filter(|number| *number > 0) else {
        return;
    };
    // SAFETY: CRIU has one thread, and nothing keeps a reference across this.
    let noted = unsafe { &mut *NOTED.0.get() };
    let queue = Queue {
        thread,
        is_shared: peek.flags == SHARED,
    };
    noted.seen.set(queue, peek.offset.saturating_add(number));
}

/// Notes that CRIU has interrupted a thread: if it is the first of a process, CRIU may just have saved the process's timers.
pub fn note_timers(thread: c_int) {
    // SAFETY: CRIU has one thread, and nothing keeps a reference across this.
    let noted = unsafe { &mut *NOTED.0.get() };
    if noted.processes[..noted.processes_len].contains(&thread) {
        for_each_thread(thread, |thread| {
            // The process still runs CRIU's code, so its queues cannot be read.
            let waiting = waiting_signals(thread).unwrap_or(0);
            noted.with_timers.set(Queue::of_thread(thread), waiting);
            Some(())
        });
    }
}

/// Saves the signals that CRIU has not seen. All tasks are dumped, and still stopped.
pub fn save() {
    // SAFETY: CRIU has one thread, and nothing keeps a reference across this.
    let noted = unsafe { &*NOTED.0.get() };
    // Beyond the tables, nothing is saved.
    if noted.seen.is_whole() && noted.with_timers.is_whole() {
        for &pid in &noted.processes[..noted.processes_len] {
            for_each_queue(pid, |queue| noted.save_queue(queue));
        }
    }
}

/// Calls `act` with the queues of a process; it has none if it has exited.
fn for_each_queue(pid: c_int, mut act: impl FnMut(Queue) -> Option<()>) {
    let queue = |thread, is_shared| Queue { thread, is_shared };
    act(queue(pid, true));
    for_each_thread(pid, |thread| {
        act(queue(thread, false));
        Some(())
    });
}

impl Noted {
    fn save_queue(&self, queue: Queue) -> Option<()> {
        let first = self.seen.of(queue);
        let waiting = self.with_timers.of(Queue::of_thread(queue.thread));
        for offset in first..first + LATE_MAX {
            let info = peek(queue, offset)?;
            if is_of_timer(&info) && waiting & 1 << ((number_of(&info) - 1) % 64) == 0 {
                continue;
            }
            let info = info.map(u64::to_ne_bytes);
            let shared = u64::from(queue.is_shared).to_ne_bytes();
            let content: [&[u8]; 2] = [&shared, info.as_flattened()];
            append(file()?, LATE_SIGNAL, queue.thread, &content)?;
        }
        Some(())
    }
}

/// Returns true for a signal that a timer has sent.
fn is_of_timer(info: &[u64; INFO_WORDS]) -> bool {
    let code = info[1] & u64::from(u32::MAX);
    code == SI_TIMER || code == SI_KERNEL && OF_TIMERS.contains(&number_of(info))
}

/// Returns the number of a signal, which is at least 1.
pub fn number_of(info: &[u64; INFO_WORDS]) -> u64 {
    (info[0] & u64::from(u32::MAX)).max(1)
}

/// Returns a signal of a stopped thread's queue, which stays there; `None` behind the last one.
pub fn peek(queue: Queue, offset: u64) -> Option<[u64; INFO_WORDS]> {
    let wanted = Peek {
        offset,
        flags: if queue.is_shared { SHARED } else { 0 },
        number: 1,
    };
    let mut info = [0; INFO_WORDS];
    let (wanted, into) = (address(&raw const wanted), address(info.as_mut_ptr()));
    let arguments = [PEEK_SIGNALS, queue.thread.into(), wanted, into, 0, 0];
    // SAFETY: the kernel reads what is wanted, and writes one signal.
    (unsafe { system_call(PTRACE, arguments) } == 1).then_some(info)
}

/// Sends a saved signal to a restored thread or its process.
pub fn send(record: &Record<'_>) -> Option<()> {
    let (words, _) = record.content.as_chunks();
    let (shared, info) = words.split_first()?;
    let is_shared = u64::from_ne_bytes(*shared) != 0;
    let mut words = [0; INFO_WORDS];
    for (word, bytes) in words.iter_mut().zip(info) {
        *word = u64::from_ne_bytes(*bytes);
    }
    let number = number_of(&words);
    if send_itself(record.thread, is_shared, number, &words) == Some(0) {
        return Some(());
    }
    // Without its origin.
    let call = if is_shared { KILL } else { TKILL };
    let number = c_long::try_from(number).ok()?;
    // SAFETY: takes numbers only.
    (unsafe { system_call(call, [record.thread.into(), number, 0, 0, 0, 0]) } == 0).then_some(())
}

/// Only a process itself may send a signal as the kernel does.
fn send_itself(thread: c_int, is_shared: bool, number: u64, info: &[u64]) -> Option<i64> {
    let mut remote = Remote::begin(thread)?;
    let info = remote.put_below_stack(info)?;
    let process = remote.call(GETPID, [0; 4])?.cast_unsigned();
    if is_shared {
        return remote.call(QUEUE_SIGNAL, [process, number, info, 0]);
    }
    let thread = remote.call(GETTID, [0; 4])?.cast_unsigned();
    remote.call(QUEUE_SIGNAL_OF_THREAD, [process, thread, number, info])
}

pub const PEEK_SIGNALS: c_long = 0x4209;
const SI_TIMER: u64 = 2_u32.wrapping_neg() as u64;
const SI_KERNEL: u64 = 0x80;
/// Signals of the timers of `setitimer`: SIGALRM, SIGVTALRM, SIGPROF.
const OF_TIMERS: [u64; 3] = [14, 26, 27];
/// `PTRACE_PEEKSIGINFO_SHARED`.
const SHARED: u32 = 1;
const GETPID: u64 = 39;
const QUEUE_SIGNAL: u64 = 129;
const GETTID: u64 = 186;
const QUEUE_SIGNAL_OF_THREAD: u64 = 297;
#[cfg(target_arch = "x86_64")]
const KILL: c_long = 62;
#[cfg(target_arch = "aarch64")]
const KILL: c_long = 129;
#[cfg(target_arch = "x86_64")]
const TKILL: c_long = 200;
#[cfg(target_arch = "aarch64")]
const TKILL: c_long = 130;
