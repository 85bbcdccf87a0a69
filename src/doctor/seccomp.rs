#![allow(unsafe_code, reason = "system calls that a filter may reject")]
//! Seccomp filters on this process, as containers have them.
//!
//! CRIU works under a filter that allows its calls: docker's default filter with the capabilities of the template, not
//! podman's. It cannot save filters that the job sets itself then.

use std::ptr;

use nix::errno::Errno;
use nix::libc::{self, c_long};
use procfs::process::Status;

use super::checks::Check;

/// Value of `Seccomp:` in `/proc/PID/status` for a process with a filter.
const SECCOMP_FILTERED: u32 = 2;
/// `KCMP_VM`, which compares the memory of two processes.
const KCMP_VM: c_long = 1;

/// Remedy for a filter that rejects too much.
const UNCONFINED: &str =
    "in a container set seccomp=unconfined (Kubernetes: seccompProfile of type Unconfined)";

/// Returns the calls of CRIU that a filter on this process rejects, of those that default filters of containers reject.
pub(crate) fn rejected_calls(status: &Status) -> Vec<&'static str> {
    if status.seccomp != Some(SECCOMP_FILTERED) {
        return Vec::new();
    }
    let mut rejected = Vec::new();
    let us = c_long::from(std::process::id().cast_signed());
    // SAFETY: compares this process with itself.
    let compared = unsafe { libc::syscall(libc::SYS_kcmp, us, us, KCMP_VM, 0, 0) };
    if is_rejected(compared) {
        rejected.push("kcmp");
    }
    // SAFETY: there is no such descriptor, and nothing is passed.
    let passed = unsafe { libc::vmsplice(-1, ptr::null(), 0, 0) };
    if is_rejected(passed as c_long) {
        rejected.push("vmsplice");
    }
    rejected
}

/// Returns true if the result is that of a filter. The calls fail with other errors, if at all.
fn is_rejected(result: c_long) -> bool {
    matches!(Errno::result(result), Err(Errno::EPERM | Errno::ENOSYS))
}

/// The check of seccomp.
pub(super) fn check(status: &Status) -> Check {
    const NAME: &str = "seccomp";
    let Some(mode) = status.seccomp else {
        return Check::note(
            NAME,
            "the kernel has no seccomp: io_uring cannot be hidden, and jobs that use it cannot be snapshotted",
            "use a kernel built with CONFIG_SECCOMP_FILTER",
        );
    };
    let rejected = rejected_calls(status).join(" and ");
    if !rejected.is_empty() {
        let detail = format!(
            "this process runs under a seccomp filter that rejects {rejected}: nothing can be snapshotted"
        );
        return Check::problem(NAME, detail, UNCONFINED);
    }
    if mode == SECCOMP_FILTERED {
        return Check::note(
            NAME,
            "this process runs under a seccomp filter: jobs that set another one cannot be snapshotted",
            format!("for such jobs, {UNCONFINED}"),
        );
    }
    Check::ok(NAME, "available, no filter on this process")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rejected_call_is_told_from_one_that_fails() {
        for (errno, expected) in [
            (Errno::EPERM, true),
            (Errno::ENOSYS, true),
            (Errno::EBADF, false),
        ] {
            errno.set();
            assert_eq!(is_rejected(-1), expected, "{errno}");
        }
        assert!(!is_rejected(0));
    }
}
