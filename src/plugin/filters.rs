#![allow(unsafe_code, reason = "called by CRIU through C")]
//! Seccomp filters that a task has inherited, for a CRIU that may not suspend them (`PTRACE_O_SUSPEND_SECCOMP` needs
//! privileges on the machine, and no filter on CRIU itself).
//!
//! ```text
//! dump       CRIU reads `/proc/PID/status` of each thread. If all its filters are inherited, it reads that there are none
//! hook       all tasks are frozen: each thread still has only these filters
//! restore    the tasks inherit the filters from CRIU, which has those of the job's sandbox and installs the sandbox's own
//! ```
//! A thread has inherited filters only if it has as many as CRIU and the sandbox's own together, because filters cannot be
//! removed. The parasite that CRIU runs in the task makes none of the calls that the sandbox's own filter rejects. All other
//! threads have their true status, and CRIU reports that it cannot suspend their filters.

use core::ffi::{CStr, c_char, c_int, c_uint};

use super::kernel::{O_CLOEXEC, close, openat, read_some, variable, write_at};
use super::listing::{for_each_thread, with_file};
use super::system_call::AT_FDCWD;
use super::text::number;
use super::variables::FILTERS;

/// Name of the file that shows the filters of a thread.
const STATUS: &CStr = c"status";
/// Longest status that is read. It has the lists of the thread's groups and processors.
const STATUS_BYTES_MAX: usize = 16 << 10;
const O_ACCMODE: c_int = 3;

/// Values of `Seccomp:`.
const NONE: u8 = b'0';
const FILTERED: u8 = b'2';

/// Part of a status about seccomp.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Seccomp {
    /// Value of `Seccomp:`, a digit.
    pub mode: u8,
    /// Place of this digit in the text.
    pub at: usize,
    /// Number of filters.
    pub filters: u32,
}

impl Seccomp {
    /// Finds the two lines in a status. Linux before 5.9 does not show the number.
    pub fn parse(status: &[u8]) -> Option<Self> {
        const MODE: &[u8] = b"\nSeccomp:\t";
        const FILTERS: &[u8] = b"\nSeccomp_filters:\t";
        let mut lines = status.windows(MODE.len());
        let at = lines.position(|window| window == MODE)? + MODE.len();
        let (mode, rest) = status.get(at..)?.split_first()?;
        let rest = rest.strip_prefix(FILTERS)?;
        let end = rest.iter().position(|byte| *byte == b'\n')?;
        Some(Self {
            mode: *mode,
            at,
            filters: number(&rest[..end])?,
        })
    }
}

/// Answers an `openat` of a thread's status if the thread has inherited filters and no others. Returns `None` if the kernel
/// has to answer.
pub fn answer(folder: c_int, path: &CStr, flags: c_int) -> Option<c_int> {
    if path != STATUS || flags & O_ACCMODE != 0 {
        return None;
    }
    let inherited = inherited()?;
    let mut buffer = [0; STATUS_BYTES_MAX];
    let status = read_status(folder, path, &mut buffer)?;
    let seccomp = Seccomp::parse(status)?;
    if seccomp.mode != FILTERED || seccomp.filters != inherited {
        return None;
    }
    *status.get_mut(seccomp.at)? = NONE;
    in_memory(status)
}

/// Returns true if no thread of a frozen process has other filters than it has inherited, or if CRIU suspends filters. CRIU
/// reads the status of a thread when others still run, and one of these can add a filter to all threads of the process.
pub fn are_inherited(pid: c_int) -> bool {
    if variable(FILTERS).is_none() {
        return true;
    }
    let Some(inherited) = inherited() else {
        return false;
    };
    let mut buffer = [0; STATUS_BYTES_MAX];
    let has_no_others = |thread| {
        let read = |status| Seccomp::parse(read_whole(status, &mut buffer)?);
        let seccomp = with_file(thread, b"/status", 0, read)??;
        (seccomp.filters == inherited).then_some(())
    };
    for_each_thread(pid, has_no_others).is_some()
}

/// Returns the number of filters that the job's threads have inherited: those of CRIU, and the sandbox's own. `None` if CRIU
/// suspends filters.
fn inherited() -> Option<u32> {
    let of_sandbox = number(variable(FILTERS)?.to_bytes())?;
    let mut buffer = [0; STATUS_BYTES_MAX];
    let status = read_status(AT_FDCWD, c"/proc/self/status", &mut buffer)?;
    Seccomp::parse(status)?.filters.checked_add(of_sandbox)
}

fn read_status<'a>(folder: c_int, path: &CStr, buffer: &'a mut [u8]) -> Option<&'a mut [u8]> {
    let file = openat(folder, path, O_CLOEXEC).ok()?;
    let status = read_whole(file, buffer);
    // SAFETY: nobody else has it.
    unsafe { close(file) };
    status
}

/// Returns the content of a file; `None` if the buffer is not larger than that.
fn read_whole(file: c_int, buffer: &mut [u8]) -> Option<&mut [u8]> {
    let mut len = 0;
    let is_whole = loop {
        match read_some(file, buffer.get_mut(len..).unwrap_or_default()) {
            Ok(0) => break len < buffer.len(),
            Ok(read) => len += read,
            Err(_) => break false,
        }
    };
    buffer.get_mut(..len).filter(|_| is_whole)
}

/// Returns a file in memory with this content, at its beginning.
pub fn in_memory(content: &[u8]) -> Option<c_int> {
    const MFD_CLOEXEC: c_uint = 1;
    // SAFETY: the name ends with a zero.
    let file = unsafe { memfd_create(STATUS.as_ptr(), MFD_CLOEXEC) };
    if file < 0 {
        return None;
    }
    if write_at(file, content, 0) == Ok(content.len()) {
        return Some(file);
    }
    // SAFETY: nobody else has it.
    unsafe { close(file) };
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(status: &str) -> Option<(u8, u32)> {
        let seccomp = Seccomp::parse(status.as_bytes())?;
        assert_eq!(status.as_bytes()[seccomp.at], seccomp.mode);
        Some((seccomp.mode, seccomp.filters))
    }

    #[test]
    fn the_lines_about_seccomp_are_read() {
        let status = |lines: &str| format!("Name:\tx\nNoNewPrivs:\t1\n{lines}Speculation:\tv\n");
        for (lines, expected) in [
            ("Seccomp:\t2\nSeccomp_filters:\t1\n", Some((b'2', 1))),
            ("Seccomp:\t0\nSeccomp_filters:\t0\n", Some((b'0', 0))),
            ("Seccomp:\t1\nSeccomp_filters:\t12\n", Some((b'1', 12))),
            ("Seccomp:\t2\n", None),
            ("Seccomp_filters:\t1\n", None),
            ("Seccomp:\t2\nSeccomp_filters:\t\n", None),
            ("Seccomp:\t2\nSeccomp_filters:\t1 2\n", None),
            ("Seccomp:\t22\nSeccomp_filters:\t1\n", None),
            ("Seccomp:\t2\nSeccomp_filters:\t4294967296\n", None),
            ("", None),
        ] {
            assert_eq!(parsed(&status(lines)), expected, "{lines}");
        }
        assert_eq!(parsed("\nSeccomp:\t2\nSeccomp_filters:\t1"), None);
        assert_eq!(parsed("\nSeccomp:\t"), None);
    }
}

// Of the C library that CRIU runs with; none is linked.
unsafe extern "C" {
    fn memfd_create(name: *const c_char, flags: c_uint) -> c_int;
}
