//! Filter that hides from the job what CRIU (4.2.1) cannot dump or does not restore, as on a kernel without it:
//!
//! - `io_uring`: programs that use it if available (libuv, and with it `torchrun`'s store) also work without it;
//! - Landlock: the kernel does not tell whether a process is confined by it, and a restored process would not be. Programs
//!   that confine themselves where they can (`xz`) continue without; those that must have it say so.
//!
//! A seccomp filter makes the first call of each fail: all others need its result. CRIU dumps and restores filters, or leaves
//! this one out and the restored job inherits it from CRIU (`inherited`).
//!
//! The kernel (5.11) determines the system calls that such a filter always allows, and does not run it for them. The
//! filter is installed with `CAP_SYS_ADMIN`. "No new privileges" would be sufficient too, but would break `sudo` in the
//! job, so it is never set. Without the capability, nothing is hidden. The sandbox of an ordinary user has it in its user
//! namespace.

use std::io;

use nix::libc;
use serde::{Deserialize, Serialize};

use super::bpf_filter::{
    LOAD_WORD, MACHINE, MACHINES, NUMBER, RETURN, install, instruction, skip_unless,
};

/// Availability of a feature in the job.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Visibility {
    /// The job cannot use it, if ckpt-run has the privilege to hide it.
    Hide,
    /// The job can use it.
    #[default]
    Allow,
}

/// Availability of features in a process and its descendants.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hidden {
    /// `io_uring`.
    #[serde(default)]
    pub io_uring: Visibility,
    /// Landlock.
    #[serde(default)]
    pub landlock: Visibility,
}

impl Hidden {
    /// All of them are hidden.
    pub const EVERYTHING: Self = Self {
        io_uring: Visibility::Hide,
        landlock: Visibility::Hide,
    };
    /// All of them are available.
    pub const NOTHING: Self = Self {
        io_uring: Visibility::Allow,
        landlock: Visibility::Allow,
    };

    /// Applies the choice to this thread and its descendants.
    ///
    /// The function may be called between fork and exec: it makes one system call and does not allocate.
    ///
    /// # Errors
    /// The kernel has no seccomp, or the privilege is missing.
    pub(in crate::sandbox) fn apply(self) -> io::Result<()> {
        if self == Self::NOTHING {
            return Ok(());
        }
        let number = |visibility, number| match visibility {
            Visibility::Hide => number,
            Visibility::Allow => NO_CALL,
        };
        install(&[
            instruction(LOAD_WORD, MACHINE),
            skip_unless(MACHINES[0], 1, 0),
            skip_unless(MACHINES[1], 0, 4),
            instruction(LOAD_WORD, NUMBER),
            skip_unless(number(self.io_uring, IO_URING_SETUP), 1, 0),
            skip_unless(number(self.landlock, LANDLOCK_CREATE_RULESET), 0, 1),
            instruction(
                RETURN,
                libc::SECCOMP_RET_ERRNO | libc::ENOSYS.cast_unsigned(),
            ),
            instruction(RETURN, libc::SECCOMP_RET_ALLOW),
        ])
    }
}

/// Number of `io_uring_setup`, the same on every architecture and in 32-bit programs.
const IO_URING_SETUP: u32 = 425;
/// Number of `landlock_create_ruleset`, also the same everywhere.
const LANDLOCK_CREATE_RULESET: u32 = 444;
/// Number that no system call has.
const NO_CALL: u32 = u32::MAX;
