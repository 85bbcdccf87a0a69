#![allow(unsafe_code, reason = "called by CRIU through C")]
//! An `exit` that replaces the C library's in a restoring CRIU with this library preloaded.
//!
//! CRIU (4.2) makes a process that has ended and was not waited for again by one that ends at once, but with seven bits of
//! the exit code: 128 becomes 0. Such a process ends with all of them here.

use core::ffi::{c_int, c_void};

use super::interposed::next_of;
use super::kernel::variable;
use super::text::number;
use super::variables::EXIT_CODES;

/// Bits of the exit code that CRIU keeps.
const KEPT: c_int = 0x7f;

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
    fn _exit(code: c_int) -> !;
}
