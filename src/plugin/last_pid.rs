#![allow(unsafe_code, reason = "called by CRIU through C")]
//! The last pid that the kernel has assigned in the job's PID namespace.
//!
//! New processes of a restored job get the pids after it, as in an uninterrupted run. Otherwise they would get those of
//! processes that had ended before, which the job may remember: a shell keeps the exit status of a child that it has not
//! asked for until another child gets the same pid, and temporary files have pids in their names.

use core::ffi::{CStr, c_int};

use super::kernel::{EINVAL, O_CLOEXEC, close, openat, read_some, variable, write_some};
use super::omitted_records::append;
use super::system_call::AT_FDCWD;
use super::variables::NUMBERS;

/// Kind of a record with the kernel's text. Its thread is 0.
pub const LAST_PID: u32 = 11;

const FILE: &CStr = c"/proc/sys/kernel/ns_last_pid";
/// Longest text.
const TEXT_BYTES_MAX: usize = 16;
const O_RDONLY: c_int = 0;
const O_WRONLY: c_int = 1;

/// Saves the pid. CRIU is in the job's namespace.
pub fn save(file: c_int) -> Option<()> {
    if variable(NUMBERS).is_none() {
        return Some(());
    }
    let mut text = [0; TEXT_BYTES_MAX];
    let len = with_file(O_RDONLY, |opened| read_some(opened, &mut text))?;
    append(file, LAST_PID, 0, &[text.get(..len)?])
}

/// Sets the pid.
pub fn give(text: &[u8]) -> Option<()> {
    let written = with_file(O_WRONLY, |opened| match write_some(opened, text) {
        // This machine has fewer pids (`pid_max`): new processes get those after CRIU's.
        Err(EINVAL) => Ok(text.len()),
        written => written,
    })?;
    (written == text.len()).then_some(())
}

fn with_file(flags: c_int, act: impl FnOnce(c_int) -> Result<usize, c_int>) -> Option<usize> {
    let opened = openat(AT_FDCWD, FILE, flags | O_CLOEXEC).ok()?;
    let moved = act(opened);
    // SAFETY: opened here.
    unsafe { close(opened) };
    moved.ok()
}
