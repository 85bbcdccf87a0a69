#![allow(
    unsafe_code,
    reason = "a system call with a filter between fork and exec"
)]
//! Hides `io_uring` from the job: CRIU cannot dump it (4.2.1), and programs that use it where it is there (libuv,
//! with it `torchrun`'s store) do without where it is not.
//!
//! A seccomp filter lets `io_uring_setup` fail as on a kernel without it; `io_uring_enter` and `io_uring_register`
//! need what that returns. CRIU dumps and restores filters.
//!
//! The kernel (5.11) works out from such a filter which calls it always allows, and does not run it for them. The
//! filter is installed by privilege: "no new privileges" would do as well and break `sudo` in the job, so it is
//! never set, and without `CAP_SYS_ADMIN` the job sees `io_uring`.

use std::mem::offset_of;

use nix::libc::{self, sock_filter};
use serde::{Deserialize, Serialize};

/// The job's view of `io_uring`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum IoUring {
    /// The job has no `io_uring`, if ckpt-run may decide that.
    Hide,
    /// The job has `io_uring`.
    Allow,
}

impl IoUring {
    /// Applies to this thread, and to what it executes and forks.
    ///
    /// For between fork and exec: one system call, no allocation. Where the filter is refused, for want of the
    /// privilege or of seccomp, the job runs without it; a snapshot that fails for `io_uring` says so.
    pub(super) fn apply(self) {
        match self {
            Self::Allow => {}
            Self::Hide => install(),
        }
    }
}

fn install() {
    let program = libc::sock_fprog {
        len: LENGTH,
        filter: FILTER.as_ptr().cast_mut(),
    };
    // SAFETY: the kernel copies the filter and does not write to it.
    unsafe {
        libc::syscall(
            libc::SYS_seccomp,
            libc::SECCOMP_SET_MODE_FILTER,
            // Kernels before 5.16 slow a filtered process down otherwise (speculative store bypass).
            libc::SECCOMP_FILTER_FLAG_SPEC_ALLOW,
            &raw const program,
        )
    };
}

/// Number of `io_uring_setup`, the same on every machine and in programs of 32 bits.
const IO_URING_SETUP: u32 = 425;

/// Machine whose system calls these are (`linux/audit.h`); and its programs of 32 bits.
#[cfg(target_arch = "x86_64")]
const MACHINES: [u32; 2] = [0xc000_003e, 0x4000_0003];
/// Machine whose system calls these are (`linux/audit.h`); and its programs of 32 bits.
#[cfg(target_arch = "aarch64")]
const MACHINES: [u32; 2] = [0xc000_00b7, 0x4000_0028];

const LENGTH: u16 = 7;
/// Offset of the system call's number in `struct seccomp_data`; the machine's architecture follows.
const NUMBER: u32 = 0;
const MACHINE: u32 = 4;
const _: () = assert!(offset_of!(libc::seccomp_data, nr) == NUMBER as usize);
const _: () = assert!(offset_of!(libc::seccomp_data, arch) == MACHINE as usize);

// Classes and modes of BPF (`linux/bpf_common.h`), which are the same for ever.
const LOAD_WORD: u16 = 0x20;
const JUMP_IF_EQUAL: u16 = 0x15;
const RETURN: u16 = 0x06;

const FILTER: [sock_filter; LENGTH as usize] = [
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

/// Skips so many instructions when the loaded value is this one, or is not.
const fn skip_unless(value: u32, when_equal: u8, otherwise: u8) -> sock_filter {
    sock_filter {
        jt: when_equal,
        jf: otherwise,
        ..instruction(JUMP_IF_EQUAL, value)
    }
}

const fn instruction(code: u16, value: u32) -> sock_filter {
    sock_filter {
        code,
        jt: 0,
        jf: 0,
        k: value,
    }
}
