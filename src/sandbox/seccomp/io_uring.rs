//! Filter that hides `io_uring` from the job, because CRIU (4.2.1) cannot dump it. Programs that use it if available
//! (libuv, and with it `torchrun`'s store) also work without it.
//!
//! A seccomp filter makes `io_uring_setup` fail as on a kernel without it; `io_uring_enter` and `io_uring_register`
//! need its result. CRIU dumps and restores filters, or leaves this one out and the restored job inherits it from CRIU
//! (`inherited`).
//!
//! The kernel (5.11) determines the system calls that such a filter always allows, and does not run it for them. The
//! filter is installed with `CAP_SYS_ADMIN`. "No new privileges" would be sufficient too, but would break `sudo` in the
//! job, so it is never set. Without the capability the job can use `io_uring`. The sandbox of an ordinary user has it in its
//! user namespace.

use std::io;

use nix::libc::{self, sock_filter};
use serde::{Deserialize, Serialize};

use super::bpf_filter::{
    LOAD_WORD, MACHINE, MACHINES, NUMBER, RETURN, install, instruction, skip_unless,
};

/// Availability of `io_uring` in the job.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum IoUring {
    /// The job cannot use `io_uring`, if ckpt-run has the privilege to hide it.
    Hide,
    /// The job can use `io_uring`.
    Allow,
}

impl IoUring {
    /// Applies the choice to this thread and its descendants.
    ///
    /// The function may be called between fork and exec: it makes one system call and does not allocate.
    ///
    /// # Errors
    /// The kernel has no seccomp, or the privilege is missing.
    pub(in crate::sandbox) fn apply(self) -> io::Result<()> {
        match self {
            Self::Allow => Ok(()),
            Self::Hide => install(&FILTER),
        }
    }
}

/// Number of `io_uring_setup`, the same on every architecture and in 32-bit programs.
const IO_URING_SETUP: u32 = 425;

const FILTER: [sock_filter; 7] = [
    instruction(LOAD_WORD, MACHINE),
    skip_unless(MACHINES[0], 1, 0),
    skip_unless(MACHINES[1], 0, 3),
    instruction(LOAD_WORD, NUMBER),
    skip_unless(IO_URING_SETUP, 0, 1),
    instruction(
        RETURN,
        libc::SECCOMP_RET_ERRNO | libc::ENOSYS.cast_unsigned(),
    ),
    instruction(RETURN, libc::SECCOMP_RET_ALLOW),
];
