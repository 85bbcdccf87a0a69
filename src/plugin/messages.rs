#![allow(unsafe_code, reason = "called by CRIU through C")]
//! Empty messages in the queue of a unix socket.
//!
//! CRIU (4.2) looks at one message after the other (`MSG_PEEK` with `SO_PEEK_OFF`), and takes an empty one for the end, so
//! that those behind it would be lost. Therefore it does not see empty ones. They cannot be saved: the kernel shows each
//! to such a look only once, and the next snapshot would not find it.

use core::ffi::{c_int, c_long};

use super::interposed::as_library;
use super::kernel::{SO_TYPE, socket_option};
use super::system_call::{address, system_call};

/// `struct msghdr`, of which a call changes the lengths and flags.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Message([u64; 7]);

/// Receives a message like the function of the C library, but looks behind empty ones.
///
/// # Safety
/// The message is valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn recvmsg(socket: c_int, message: *mut Message, flags: c_int) -> c_long {
    // SAFETY: by the contract above.
    let asked = unsafe { message.read() };
    for _ in 0..LOOKS_MAX {
        let arguments = [socket.into(), address(message), flags.into(), 0, 0, 0];
        // SAFETY: by the contract above.
        let result = unsafe { system_call(RECVMSG, arguments) };
        if result != 0 || flags != LOOK || !has_messages(socket) {
            return as_library(result);
        }
        // SAFETY: as it was before the call.
        unsafe { message.write(asked) };
    }
    0
}

/// Returns true for a socket with messages, where no bytes are an empty message, or the end.
fn has_messages(socket: c_int) -> bool {
    let [kind, _] = socket_option(socket.into(), SO_TYPE);
    kind == DATAGRAMS || kind == PACKETS
}

/// Looks at the most: where the other end is closed, each look behind the last message finds the end again. More empty
/// messages than this do not wait one behind the other (`net.unix.max_dgram_qlen`, 10 unless it was raised).
const LOOKS_MAX: u32 = 600;
/// `MSG_PEEK | MSG_DONTWAIT`.
const LOOK: c_int = 0x2 | 0x40;
const DATAGRAMS: u64 = 2;
const PACKETS: u64 = 5;

#[cfg(target_arch = "x86_64")]
const RECVMSG: c_long = 47;
#[cfg(target_arch = "aarch64")]
const RECVMSG: c_long = 212;
