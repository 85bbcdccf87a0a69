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
//! - calls that wait for at most [`SHORT_NS`], or not longer than the job has run since the last freeze ([`WAIT_MS`]): they
//!   wait for the whole time again, because the remaining time is unknown. A longer wait may have been repeated before;
//!   repeated at each dump, it would never end;
//! - calls of sockets with a time limit (`SO_RCVTIMEO`) that is not longer.
//!
//! A call that has moved a part of its bytes is completed ([`short_calls`]). A signal that arrives during the freeze ends
//! all these calls ([`restarts`]).

use core::ffi::c_int;

use super::filters::are_inherited;
use super::kernel::{O_CLOEXEC, O_DIRECTORY, close, openat, variable};
use super::listing::{for_each_number, for_each_thread};
use super::restarts::{self, RESTARTS_WITHOUT_HANDLER};
use super::short_calls;
use super::system_call::AT_FDCWD;
use super::text::number;
use super::tracing::{
    ORIG_RAX, R8, R9, R10, RAX, RDI, RDX, RIP, RSI, Registers, SYSCALL, SYSCALL_BYTES, is_native,
    peek, registers, set_registers,
};
use super::variables::WAIT_MS;

/// Longest wait, in nanoseconds, that is repeated with its whole time at every dump.
const SHORT_NS: u64 = 1_000_000_000;

/// Result of an interrupted system call inside the kernel (`include/linux/errno.h`).
const EINTR: i64 = -4;
const ERESTART_RESTARTBLOCK: i64 = -516;

/// An interrupted system call.
#[derive(Clone, Copy, Debug)]
pub struct Call {
    pub number: i64,
    pub arguments: [u64; 6],
    pub result: i64,
}

impl Call {
    fn of(registers: &Registers) -> Self {
        Self {
            number: registers[ORIG_RAX].cast_signed(),
            result: registers[RAX].cast_signed(),
            arguments: [RDI, RSI, RDX, R10, R8, R9].map(|place| registers[place]),
        }
    }
}

/// Returns true if the call can be made again. A wait of more than `limit` nanoseconds cannot. `timespec` reads a
/// `struct timespec` of the thread, `socket_limit` the time limit of a descriptor, 0 for none, both in nanoseconds.
pub fn can_be_made_again(
    call: &Call,
    limit: u64,
    timespec: impl Fn(u64) -> Option<u64>,
    socket_limit: impl Fn(u64) -> u64,
) -> bool {
    let [first, second, third, fourth, fifth, _] = call.arguments;
    let is_short = |address| timespec(address).is_some_and(|nanoseconds| nanoseconds <= limit);
    // The lower half counts; a negative number is no limit.
    let milliseconds = |argument: u64| {
        let wait = argument & u64::from(u32::MAX);
        wait > i32::MAX as u64 || wait * 1_000_000 <= limit
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
        (EINTR, calls::SEMOP) => true,
        (EINTR, number) if calls::WITHOUT_EFFECT.contains(&number) => socket_limit(first) <= limit,
        (EINTR, calls::RECVMMSG | calls::IO_GETEVENTS) => fifth == 0 || is_short(fifth),
        (EINTR, calls::RT_SIGTIMEDWAIT) => third == 0 || is_short(third),
        (EINTR, calls::SEMTIMEDOP | calls::EPOLL_PWAIT2) => fourth == 0 || is_short(fourth),
        _ => false,
    }
}

/// Prefix that makes of `mov eax` a `mov r8d`.
const OF_R8: u8 = 0x41;

/// Numbers of system calls on x86-64; elsewhere CRIU is left alone.
pub mod calls {
    pub const READ: i64 = 0;
    pub const WRITE: i64 = 1;
    pub const POLL: i64 = 7;
    pub const READV: i64 = 19;
    pub const WRITEV: i64 = 20;
    pub const NANOSLEEP: i64 = 35;
    pub const SENDFILE: i64 = 40;
    pub const CONNECT: i64 = 42;
    pub const ACCEPT: i64 = 43;
    pub const SENDTO: i64 = 44;
    pub const RECVFROM: i64 = 45;
    pub const SENDMSG: i64 = 46;
    pub const RECVMSG: i64 = 47;
    pub const SEMOP: i64 = 65;
    pub const RT_SIGTIMEDWAIT: i64 = 128;
    pub const FUTEX: i64 = 202;
    pub const IO_GETEVENTS: i64 = 208;
    /// Continues a call that was stopped.
    pub const RESTART_SYSCALL: i64 = 219;
    pub const SEMTIMEDOP: i64 = 220;
    pub const CLOCK_NANOSLEEP: i64 = 230;
    pub const EPOLL_WAIT: i64 = 232;
    pub const EPOLL_PWAIT: i64 = 281;
    pub const FALLOCATE: i64 = 285;
    pub const ACCEPT4: i64 = 288;
    pub const RECVMMSG: i64 = 299;
    pub const SENDMMSG: i64 = 307;
    pub const GETRANDOM: i64 = 318;
    pub const EPOLL_PWAIT2: i64 = 441;
    /// Calls of descriptors that have done nothing if they are interrupted. For sockets that is so if they have a time limit.
    pub const WITHOUT_EFFECT: [i64; 13] = [
        READ, WRITE, READV, WRITEV, SENDTO, RECVFROM, SENDMSG, RECVMSG, SENDMMSG, ACCEPT, ACCEPT4,
        CONNECT, FALLOCATE,
    ];
    /// The operation without its flags.
    pub const FUTEX_OPERATION: u64 = 127;
    pub const FUTEX_WAIT: u64 = 0;
    /// Operation with an absolute time limit.
    pub const FUTEX_WAIT_BITSET: u64 = 9;
}

/// Makes interrupted calls of a process continue. This process has stopped all its threads. `pid` is as seen by CRIU.
pub fn let_calls_go_on(pid: c_int) {
    if cfg!(target_arch = "x86_64") {
        // A thread that is left alone sees the interruption.
        let limit = limit();
        for_each_thread(pid, |thread| {
            let_call_go_on(pid, thread, limit);
            Some(())
        });
    }
}

/// Makes interrupted calls of all processes continue that this process has stopped.
pub fn let_all_calls_go_on() {
    let Ok(folder) = openat(AT_FDCWD, c"/proc", O_DIRECTORY | O_CLOEXEC) else {
        return;
    };
    for_each_number(folder, |pid| {
        // Registers can be read only of those.
        if registers(pid).is_some() && are_inherited(pid) {
            let_calls_go_on(pid);
        }
        true
    });
    // SAFETY: nobody else has it.
    unsafe { close(folder) };
}

fn let_call_go_on(pid: c_int, thread: c_int, limit: u64) -> Option<()> {
    let mut registers = registers(thread).filter(is_native)?;
    // Other ways into the kernel have other numbers.
    let code = peek(thread, registers[RIP].checked_sub(SYSCALL_BYTES)?)?;
    (code & 0xffff == SYSCALL).then_some(())?;
    let is_repetition = registers[ORIG_RAX].cast_signed() == calls::RESTART_SYSCALL
        && registers[RAX].cast_signed() == ERESTART_RESTARTBLOCK;
    if is_repetition {
        registers[ORIG_RAX] = number_in_code(thread, registers[RIP])?;
    }
    let call = Call::of(&registers);
    let timespec = |address: u64| {
        let seconds = peek(thread, address)?;
        let nanoseconds = peek(thread, address.checked_add(8)?)?;
        seconds.checked_mul(1_000_000_000)?.checked_add(nanoseconds)
    };
    let socket_limit = |descriptor| short_calls::time_limit(pid, descriptor);
    if can_be_made_again(&call, limit, timespec, socket_limit) {
        registers[RAX] = RESTARTS_WITHOUT_HANDLER;
    } else if call.result > 0 {
        let rest = short_calls::rest(&call, pid)?;
        short_calls::prepare(thread, &mut registers, rest)?;
        registers[RAX] = RESTARTS_WITHOUT_HANDLER;
    } else {
        return restarts::note(thread, &registers);
    }
    set_registers(thread, &registers).then_some(())?;
    restarts::note(thread, &registers)
}

/// Returns the number of the call that the code before an address makes: `mov eax, NUMBER; syscall`. The kernel replaces the
/// number in the registers if a call was stopped before (by SIGSTOP, a debugger), but not the arguments.
fn number_in_code(thread: c_int, behind: u64) -> Option<u64> {
    match peek(thread, behind.checked_sub(8)?)?.to_le_bytes() {
        [before, 0xb8, a, b, c, d, 0x0f, 0x05] if before != OF_R8 => {
            Some(u32::from_le_bytes([a, b, c, d]).into())
        }
        _ => None,
    }
}

fn limit() -> u64 {
    let set = variable(WAIT_MS).and_then(|limit| number(limit.to_bytes()));
    SHORT_NS.max(set.map_or(0, |limit| u64::from(limit) * 1_000_000))
}
