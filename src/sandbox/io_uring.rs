#![allow(
    unsafe_code,
    reason = "a system call with a filter between fork and exec"
)]
//! Filter that hides `io_uring` from the job, because CRIU (4.2.1) cannot dump it. Programs that use it if available
//! (libuv, and with it `torchrun`'s store) also work without it.
//!
//! A seccomp filter makes `io_uring_setup` fail as on a kernel without it; `io_uring_enter` and `io_uring_register`
//! need its result. CRIU dumps and restores filters, or leaves this one out and the restored job inherits it from CRIU
//! (`filters`).
//!
//! The kernel (5.11) determines the system calls that such a filter always allows, and does not run it for them. The
//! filter is installed with `CAP_SYS_ADMIN`. "No new privileges" would be sufficient too, but would break `sudo` in the
//! job, so it is never set. Without the capability the job can use `io_uring`. The sandbox of an ordinary user has it in its
//! user namespace.

use std::io;
use std::mem::offset_of;

use nix::errno::Errno;
use nix::libc::{self, sock_filter};
use serde::{Deserialize, Serialize};

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
    pub(super) fn apply(self) -> io::Result<()> {
        match self {
            Self::Allow => Ok(()),
            Self::Hide => install(),
        }
    }
}

fn install() -> io::Result<()> {
    let program = libc::sock_fprog {
        len: LENGTH,
        filter: FILTER.as_ptr().cast_mut(),
    };
    // SAFETY: the kernel copies the filter and does not write to it.
    let result = unsafe {
        libc::syscall(
            libc::SYS_seccomp,
            libc::SECCOMP_SET_MODE_FILTER,
            // Kernels before 5.16 otherwise slow down a filtered process (speculative store bypass).
            libc::SECCOMP_FILTER_FLAG_SPEC_ALLOW,
            &raw const program,
        )
    };
    Ok(Errno::result(result).map(drop)?)
}

/// Number of `io_uring_setup`, the same on every architecture and in 32-bit programs.
const IO_URING_SETUP: u32 = 425;

/// Architectures of the filtered system calls (`linux/audit.h`): 64-bit and 32-bit.
#[cfg(target_arch = "x86_64")]
const MACHINES: [u32; 2] = [0xc000_003e, 0x4000_0003];
/// Architectures of the filtered system calls (`linux/audit.h`): 64-bit and 32-bit.
#[cfg(target_arch = "aarch64")]
const MACHINES: [u32; 2] = [0xc000_00b7, 0x4000_0028];

const LENGTH: u16 = 7;
/// Offset of the system call's number in `struct seccomp_data`. The architecture follows it.
const NUMBER: u32 = 0;
const MACHINE: u32 = 4;
const _: () = assert!(offset_of!(libc::seccomp_data, nr) == NUMBER as usize);
const _: () = assert!(offset_of!(libc::seccomp_data, arch) == MACHINE as usize);

// Classes and modes of BPF (`linux/bpf_common.h`), which never change.
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

/// Skips `when_equal` instructions if the loaded value equals `value`, and `otherwise` instructions if not.
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
