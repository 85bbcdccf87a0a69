#![allow(
    unsafe_code,
    reason = "a system call with a filter between fork and exec"
)]
//! Parts of seccomp filters, which are programs of BPF.

use std::io;
use std::mem::offset_of;

use nix::errno::Errno;
use nix::libc::{self, sock_filter};

/// Architectures of the filtered system calls (`linux/audit.h`): 64-bit and 32-bit.
#[cfg(target_arch = "x86_64")]
pub(super) const MACHINES: [u32; 2] = [0xc000_003e, 0x4000_0003];
/// Architectures of the filtered system calls (`linux/audit.h`): 64-bit and 32-bit.
#[cfg(target_arch = "aarch64")]
pub(super) const MACHINES: [u32; 2] = [0xc000_00b7, 0x4000_0028];

/// Offset of the system call's number in `struct seccomp_data`. The architecture and the arguments follow.
pub(super) const NUMBER: u32 = 0;
pub(super) const MACHINE: u32 = 4;
const ARGUMENTS: u32 = 16;
const _: () = assert!(offset_of!(libc::seccomp_data, nr) == NUMBER as usize);
const _: () = assert!(offset_of!(libc::seccomp_data, arch) == MACHINE as usize);
const _: () = assert!(offset_of!(libc::seccomp_data, args) == ARGUMENTS as usize);

// Classes and modes of BPF (`linux/bpf_common.h`), which never change.
pub(super) const LOAD_WORD: u16 = 0x20;
const JUMP_IF_EQUAL: u16 = 0x15;
const JUMP_IF_GREATER: u16 = 0x25;
pub(super) const RETURN: u16 = 0x06;

/// Installs a filter for this thread and its descendants. May be called between fork and exec: it makes one system call and
/// does not allocate.
///
/// # Errors
/// The kernel has no seccomp, or the privilege is missing.
pub(super) fn install<const LENGTH: usize>(filter: &[sock_filter; LENGTH]) -> io::Result<()> {
    const { assert!(LENGTH <= u16::MAX as usize) };
    let program = libc::sock_fprog {
        #[allow(clippy::cast_possible_truncation, reason = "checked above")]
        len: LENGTH as u16,
        filter: filter.as_ptr().cast_mut(),
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

/// Returns the offset of the lower half of an argument.
pub(super) const fn argument(number: u32) -> u32 {
    ARGUMENTS + 8 * number
}

/// Skips `when_equal` instructions if the loaded value equals `value`, and `otherwise` instructions if not.
pub(super) const fn skip_unless(value: u32, when_equal: u8, otherwise: u8) -> sock_filter {
    sock_filter {
        jt: when_equal,
        jf: otherwise,
        ..instruction(JUMP_IF_EQUAL, value)
    }
}

/// Skips `otherwise` instructions unless the loaded value is greater than `value`.
pub(super) const fn skip_unless_greater(value: u32, otherwise: u8) -> sock_filter {
    sock_filter {
        jf: otherwise,
        ..instruction(JUMP_IF_GREATER, value)
    }
}

pub(super) const fn instruction(code: u16, value: u32) -> sock_filter {
    sock_filter {
        code,
        jt: 0,
        jf: 0,
        k: value,
    }
}
