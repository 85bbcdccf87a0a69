#![allow(unsafe_code, reason = "called by CRIU through C")]
//! `exit` and `kill` that replace the C library's in a restoring CRIU with this library preloaded.
//!
//! CRIU (4.2) makes a process that has ended and was not waited for again by one that ends at once.
//! - It passes seven bits of the exit code: 128 becomes 0. Here the process ends with all of them.
//! - A process that was killed by a signal kills itself, by SIGABRT if it was a real-time signal. Here it is the signal that
//!   it was. To avoid a core file, CRIU makes the process undumpable, and then (Linux 6.18) no ordinary user can read how it
//!   ended, so that the next image would say that it had succeeded. Here the limit on core files avoids it.

use core::ffi::{c_int, c_long, c_void};

use super::interposed::next_of;
use super::kernel::variable;
use super::text::number;
use super::variables::{BY_SIGNAL, EXIT_CODES};

/// Bits of the exit code that CRIU keeps.
const KEPT: c_int = 0x7f;
#[cfg(target_arch = "x86_64")]
const SYS_KILL: c_long = 62;
#[cfg(target_arch = "aarch64")]
const SYS_KILL: c_long = 129;
const PR_SET_DUMPABLE: c_int = 4;
const RLIMIT_CORE: c_int = 4;
/// With this limit the kernel neither writes a core file nor starts a program that takes one. With 0 it starts the program.
const NO_CORE: [u64; 2] = [1, 1];

/// Ends the process like the C library's function.
#[unsafe(no_mangle)]
extern "C" fn exit(code: c_int) -> ! {
    // SAFETY: takes no arguments.
    let whole = code_of(unsafe { getpid() }).filter(|whole| whole & KEPT == code);
    let next = next_of(c"exit");
    if next.is_null() {
        // SAFETY: takes a number and does not return.
        unsafe { _exit(whole.unwrap_or(code)) }
    }
    // SAFETY: the C library's function.
    let next = unsafe { core::mem::transmute::<*mut c_void, extern "C" fn(c_int) -> !>(next) };
    next(whole.unwrap_or(code))
}

/// Sends a signal like the C library's function. In CRIU, only a process that was killed before the dump sends one to itself.
#[unsafe(no_mangle)]
extern "C" fn kill(pid: c_int, signal: c_int) -> c_int {
    let mut signal = signal;
    // SAFETY: takes no arguments.
    if pid == unsafe { getpid() } {
        if let Some(whole) = code_of(pid).filter(|whole| *whole >= BY_SIGNAL.into()) {
            signal = whole - c_int::from(BY_SIGNAL);
        }
        // SAFETY: the kernel reads the limit. The process stays undumpable without it.
        if unsafe { setrlimit(RLIMIT_CORE, NO_CORE.as_ptr()) } == 0 {
            // SAFETY: a flag, without pointers.
            unsafe { prctl(PR_SET_DUMPABLE, 1_u64, 0_u64, 0_u64, 0_u64) };
        }
    }
    // SAFETY: takes numbers. The result is 0 or -1.
    c_int::try_from(unsafe { syscall(SYS_KILL, c_long::from(pid), c_long::from(signal)) })
        .unwrap_or(-1)
}

/// Returns the exit code of a process that had ended at the dump, if CRIU does not restore it.
fn code_of(pid: c_int) -> Option<c_int> {
    let list = variable(EXIT_CODES)?.to_bytes();
    let found = list.split(|byte| *byte == b';').find_map(|entry| {
        let space = entry.iter().position(|byte| *byte == b' ')?;
        let (of, code) = entry.split_at(space);
        (number(of)? == pid.cast_unsigned()).then(|| number(code.get(1..)?))?
    });
    c_int::try_from(found?).ok()
}

// Of the C library that CRIU runs with; none is linked.
unsafe extern "C" {
    fn getpid() -> c_int;
    fn prctl(option: c_int, ...) -> c_int;
    fn setrlimit(resource: c_int, limit: *const u64) -> c_int;
    fn syscall(number: c_long, ...) -> c_long;
    fn _exit(code: c_int) -> !;
}
