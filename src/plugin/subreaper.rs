#![allow(unsafe_code, reason = "called by CRIU through C")]
//! A `setsid` that replaces the C library's in a restoring CRIU with this library preloaded.
//!
//! CRIU creates a process whose parent had exited through a helper that exits immediately, and relies on the tree's
//! first process to adopt it. That process was a subreaper, but CRIU (4.2) restores this property last, when the
//! helpers have exited. Until then, the kernel lets the sandbox adopt the process, outside the tree, and later images
//! would omit it. Therefore the first process becomes a subreaper when it starts its session, before it has any child.
//!
//! CRIU's hooks cannot do this, because none of them runs in the first process at that time.

use core::ffi::{c_int, c_long};

use super::kernel::variable;
use super::variables::ROOT;

const PR_SET_CHILD_SUBREAPER: c_int = 36;
#[cfg(target_arch = "x86_64")]
const SYS_SETSID: c_long = 112;
#[cfg(target_arch = "aarch64")]
const SYS_SETSID: c_long = 157;

/// Starts a session like the C library's function. The tree's first process also becomes a subreaper.
#[unsafe(no_mangle)]
extern "C" fn setsid() -> c_int {
    // SAFETY: takes no arguments.
    if Some(unsafe { getpid() }) == root() {
        // SAFETY: a flag, without pointers. Where it fails, later snapshots are refused.
        unsafe { prctl(PR_SET_CHILD_SUBREAPER, 1_u64, 0_u64, 0_u64, 0_u64) };
    }
    // SAFETY: takes no arguments. The result is a pid or -1.
    c_int::try_from(unsafe { syscall(SYS_SETSID) }).unwrap_or(-1)
}

/// Returns the pid of the tree's first process as seen by CRIU.
fn root() -> Option<c_int> {
    variable(ROOT)?.to_str().ok()?.parse().ok()
}

// Of the C library that CRIU runs with; none is linked.
unsafe extern "C" {
    fn getpid() -> c_int;
    fn prctl(option: c_int, ...) -> c_int;
    fn syscall(number: c_long, ...) -> c_long;
}
