#![allow(
    unsafe_code,
    reason = "called by CRIU through C, and traces the job's threads"
)]
//! Restart of system calls that wait and that CRIU interrupts at a dump.
//!
//! A stop of a thread interrupts its waiting system call. The kernel restarts most system calls afterwards. For those
//! that it would continue with the remaining time (`nanosleep`, `poll`), CRIU (4.2, x86) sets the result `EINTR`, and
//! some calls return `EINTR` themselves (`epoll_wait`, `semop`, a `read` of inotify). The program then sees an
//! interruption without a signal. So before CRIU reads the registers, calls that can be repeated without harm are
//! changed so that CRIU restarts them:
//!
//! - calls without a time limit, or with an absolute one;
//! - `nanosleep` if the kernel has written the remaining time over the request, as for the C library's `sleep`;
//! - calls that wait for at most [`SHORT_NS`]: they wait for the whole time again, because the remaining time is unknown.
//!
//! A thread with a pending signal is left alone: its call must end, so that the program handles the signal.

use core::ffi::{c_int, c_long, c_void};

use super::kernel::{close, open, read_some};
use super::listing::for_each_entry;
use super::text::{Text, hexadecimal, number};

/// Longest wait, in nanoseconds, that is repeated with its whole time.
const SHORT_NS: u64 = 1_000_000_000;
/// Most bytes of `/proc/PID/task/TID/status` that are read: the masks are within the first 2 KiB.
const STATUS_BYTES: usize = 4096;

/// Result of an interrupted system call inside the kernel (`include/linux/errno.h`).
const EINTR: i64 = -4;
const ERESTARTNOHAND: i64 = -514;
const ERESTART_RESTARTBLOCK: i64 = -516;

/// The registers of a thread inside an interrupted system call.
#[derive(Clone, Copy, Debug)]
pub struct Call {
    pub number: i64,
    pub arguments: [u64; 4],
    pub result: i64,
}

/// Returns true if the call can be made again. `timespec` reads a `struct timespec` of the thread, in nanoseconds.
pub fn can_be_made_again(call: &Call, timespec: impl Fn(u64) -> Option<u64>) -> bool {
    let [first, second, third, fourth] = call.arguments;
    let is_short = |address| timespec(address).is_some_and(|nanoseconds| nanoseconds <= SHORT_NS);
    // The lower half counts; a negative number is no limit.
    let milliseconds = |argument: u64| {
        let limit = argument & u64::from(u32::MAX);
        limit > i32::MAX as u64 || limit * 1_000_000 <= SHORT_NS
    };
    let sleep = |request, left| left == request || left == 0 && is_short(request);
    match (call.result, call.number) {
        (ERESTART_RESTARTBLOCK, calls::POLL) => milliseconds(third),
        (ERESTART_RESTARTBLOCK, calls::NANOSLEEP) => sleep(first, second),
        (ERESTART_RESTARTBLOCK, calls::CLOCK_NANOSLEEP) => sleep(third, fourth),
        (ERESTART_RESTARTBLOCK, calls::FUTEX) => match second & calls::FUTEX_OPERATION {
            calls::FUTEX_WAIT_BITSET => true,
            calls::FUTEX_WAIT => is_short(fourth),
            _ => false,
        },
        (EINTR, calls::EPOLL_WAIT | calls::EPOLL_PWAIT) => milliseconds(fourth),
        (EINTR, calls::READ | calls::SEMOP) => true,
        (EINTR, calls::RT_SIGTIMEDWAIT) => third == 0 || is_short(third),
        (EINTR, calls::SEMTIMEDOP) => fourth == 0,
        _ => false,
    }
}

/// Numbers of system calls on x86-64; elsewhere CRIU is left alone.
mod calls {
    pub const READ: i64 = 0;
    pub const POLL: i64 = 7;
    pub const NANOSLEEP: i64 = 35;
    pub const SEMOP: i64 = 65;
    pub const RT_SIGTIMEDWAIT: i64 = 128;
    pub const FUTEX: i64 = 202;
    pub const SEMTIMEDOP: i64 = 220;
    pub const CLOCK_NANOSLEEP: i64 = 230;
    pub const EPOLL_WAIT: i64 = 232;
    pub const EPOLL_PWAIT: i64 = 281;
    /// The operation without its flags.
    pub const FUTEX_OPERATION: u64 = 127;
    pub const FUTEX_WAIT: u64 = 0;
    /// Operation with an absolute time limit.
    pub const FUTEX_WAIT_BITSET: u64 = 9;
}

/// Makes interrupted waits of a process continue. This process has stopped all its threads. `pid` is as seen by CRIU.
pub fn let_waits_go_on(pid: c_int) {
    if cfg!(not(target_arch = "x86_64")) {
        return;
    }
    let mut path = Text::new();
    path.push(b"/proc/");
    path.push_number(pid);
    path.push(b"/task");
    // SAFETY: the path ends with a zero.
    let folder = unsafe { open(path.as_c().as_ptr(), 0) };
    if folder < 0 {
        return;
    }
    for_each_entry(folder, |_, name| {
        let thread = number(name.to_bytes()).and_then(|thread| c_int::try_from(thread).ok());
        if let Some(thread) = thread {
            let_wait_go_on(&mut path, thread);
        }
        true
    });
    // SAFETY: the descriptor is this function's.
    unsafe { close(folder) };
}

fn let_wait_go_on(path: &mut Text, thread: c_int) {
    let read = |place| peek(PTRACE_PEEKUSER, thread, place);
    let call = Call {
        number: read(registers::ORIG_RAX).cast_signed(),
        result: read(registers::RAX).cast_signed(),
        arguments: [
            registers::RDI,
            registers::RSI,
            registers::RDX,
            registers::R10,
        ]
        .map(read),
    };
    if !matches!(call.result, EINTR | ERESTART_RESTARTBLOCK) {
        return;
    }
    let timespec = |address: u64| {
        let seconds = peek(PTRACE_PEEKDATA, thread, address);
        let nanoseconds = peek(PTRACE_PEEKDATA, thread, address.checked_add(8)?);
        seconds.checked_mul(1_000_000_000)?.checked_add(nanoseconds)
    };
    let is_native = read(registers::CS) == registers::NATIVE_CODE;
    if call.number >= 0
        && is_native
        && can_be_made_again(&call, timespec)
        && !has_signal(path, thread)
    {
        let result = ERESTARTNOHAND as c_long;
        // SAFETY: sets a register of a thread that this process has stopped.
        unsafe { ptrace(PTRACE_POKEUSER, thread, registers::RAX, result) };
    }
}

/// Returns true if a signal waits for the thread, or if that cannot be determined.
fn has_signal(path: &mut Text, thread: c_int) -> bool {
    let length = path.len();
    path.push(b"/");
    path.push_number(thread);
    path.push(b"/status");
    let mut status = [0u8; STATUS_BYTES];
    // SAFETY: the path ends with a zero.
    let file = unsafe { open(path.as_c().as_ptr(), 0) };
    path.cut(length);
    if file < 0 {
        return true;
    }
    let read = read_some(file, &mut status);
    // SAFETY: the descriptor is this function's.
    unsafe { close(file) };
    let text = read.ok().and_then(|n| status.get(..n));
    let mask = |name| text.and_then(|text| hexadecimal(text, name));
    let masks = (
        mask(b"\nSigPnd:\t"),
        mask(b"\nShdPnd:\t"),
        mask(b"\nSigBlk:\t"),
    );
    let (Some(own), Some(shared), Some(blocked)) = masks else {
        return true;
    };
    (own | shared) & !blocked != 0
}

fn peek(request: c_int, thread: c_int, place: u64) -> u64 {
    // SAFETY: reads a word of a thread that this process has stopped; the C library returns it. A failure is all ones.
    let word = unsafe { ptrace(request, thread, place, core::ptr::null_mut::<c_void>()) };
    word.cast_unsigned()
}

const PTRACE_PEEKDATA: c_int = 2;
const PTRACE_PEEKUSER: c_int = 3;
const PTRACE_POKEUSER: c_int = 6;

/// Places in `struct user_regs_struct` (x86-64), in bytes.
mod registers {
    pub const R10: u64 = 7 * 8;
    pub const RAX: u64 = 10 * 8;
    pub const RDX: u64 = 12 * 8;
    pub const RSI: u64 = 13 * 8;
    pub const RDI: u64 = 14 * 8;
    pub const ORIG_RAX: u64 = 15 * 8;
    pub const CS: u64 = 17 * 8;
    /// Selector of 64-bit code (`__USER_CS`).
    pub const NATIVE_CODE: u64 = 0x33;
}

// Of the C library that CRIU runs with; none is linked.
unsafe extern "C" {
    fn ptrace(request: c_int, ...) -> c_long;
}
