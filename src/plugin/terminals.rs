#![allow(unsafe_code, reason = "called by CRIU through C")]
//! Data in terminals of the job, which stays there at a dump.
//!
//! CRIU (4.2, `tty_do_dump_queued_data`) reads what programs have not read yet from both ends of a terminal, saves it, and
//! writes it into the other end. It passes through the line discipline again on this way: a part can be lost, lines change
//! their order, and control characters act as keys. Therefore CRIU finds no data. The supervisor refuses a dump while there
//! is any.

use core::ffi::{c_int, c_long};

use super::kernel::variable;
use super::system_call::{address, system_call};
use super::variables::DUMPED;

/// Bytes that CRIU asks a terminal for, and no other file.
const QUEUE_BYTES: usize = 16384;
const TCGETS: c_long = 0x5401;
/// Bytes of a `struct termios`, and some more.
const MODES_BYTES: usize = 64;
#[cfg(target_arch = "x86_64")]
const IOCTL: c_long = 16;
#[cfg(target_arch = "aarch64")]
const IOCTL: c_long = 29;

/// Returns true if this read is CRIU's at a dump, of a terminal's data.
pub fn has_kept_data(file: c_int, len: usize) -> bool {
    len == QUEUE_BYTES && variable(DUMPED).is_some() && is_terminal(file)
}

fn is_terminal(file: c_int) -> bool {
    let mut modes = [0_u8; MODES_BYTES];
    let into = address(modes.as_mut_ptr());
    // SAFETY: the kernel writes at most so many bytes.
    unsafe { system_call(IOCTL, [file.into(), TCGETS, into, 0, 0, 0]) == 0 }
}
