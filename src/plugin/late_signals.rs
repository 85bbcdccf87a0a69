#![allow(unsafe_code, reason = "called by CRIU through C")]
//! Signals that arrive between CRIU's look at a thread's signals and the end of the dump.
//!
//! CRIU (4.2) saves the signals of a process before its memory and its timers. A timer that expires in between is saved as
//! one that has expired, and its signal is not saved: after a restore, `alarm` would never ring. Therefore the plugin counts
//! the signals that CRIU sees, and puts later ones into the file of the omitted state when all tasks are dumped. A restored
//! process sends itself such a signal before it runs.

use core::cell::UnsafeCell;
use core::ffi::{c_int, c_long};

use super::listing::for_each_thread;
use super::omitted_records::{Record, append, file};
use super::remote_calls::Remote;
use super::system_call::{address, system_call};
use super::tracing::PTRACE;

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
struct Queue {
    thread: c_int,
    is_shared: bool,
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
    seen: [(Queue, u64); QUEUES_MAX],
    seen_len: usize,
}

struct Shared(UnsafeCell<Noted>);

// SAFETY: CRIU has one thread.
unsafe impl Sync for Shared {}

const NO_QUEUE: Queue = Queue {
    thread: 0,
    is_shared: false,
};
static NOTED: Shared = Shared(UnsafeCell::new(Noted {
    processes: [0; PROCESSES_MAX],
    processes_len: 0,
    seen: [(NO_QUEUE, 0); QUEUES_MAX],
    seen_len: 0,
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
    let seen = peek.offset.saturating_add(number);
    let known = noted.seen.iter_mut().take(noted.seen_len);
    if let Some((_, count)) = known.into_iter().find(|(known, _)| *known == queue) {
        *count = seen;
    } else {
        // Beyond the table, nothing is saved.
        if let Some(place) = noted.seen.get_mut(noted.seen_len) {
            *place = (queue, seen);
        }
        noted.seen_len += 1;
    }
}

/// Saves the signals that CRIU has not seen. All tasks are dumped, and still stopped.
pub fn save() {
    // SAFETY: CRIU has one thread, and nothing keeps a reference across this.
    let noted = unsafe { &*NOTED.0.get() };
    if noted.seen_len > QUEUES_MAX {
        return;
    }
    for &pid in &noted.processes[..noted.processes_len] {
        let queue = |thread, is_shared| Queue { thread, is_shared };
        noted.save_queue(queue(pid, true));
        // A process that is not listed has exited.
        for_each_thread(pid, |thread| {
            noted.save_queue(queue(thread, false));
            Some(())
        });
    }
}

impl Noted {
    fn save_queue(&self, queue: Queue) -> Option<()> {
        let mut known = self.seen.iter().take(self.seen_len);
        let seen = known.find(|(known, _)| *known == queue);
        let first = seen.map_or(0, |(_, count)| *count);
        for offset in first..first + LATE_MAX {
            let info = peek(queue, offset)?.map(u64::to_ne_bytes);
            let shared = u64::from(queue.is_shared).to_ne_bytes();
            let content: [&[u8]; 2] = [&shared, info.as_flattened()];
            append(file()?, LATE_SIGNAL, queue.thread, &content)?;
        }
        Some(())
    }
}

/// Returns a signal of a stopped thread's queue, which stays there; `None` behind the last one.
fn peek(queue: Queue, offset: u64) -> Option<[u64; INFO_WORDS]> {
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
    let number = words[0] & u64::from(u32::MAX);
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
