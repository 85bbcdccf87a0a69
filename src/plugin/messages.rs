#![allow(unsafe_code, reason = "called by CRIU through C")]
//! Empty messages in the queue of a unix socket.
//!
//! CRIU (4.2) looks at one message after the other (`MSG_PEEK` with `SO_PEEK_OFF`), and takes an empty one for the end, so
//! that those behind it would be lost. Therefore it does not see empty ones. They cannot be saved: the kernel shows each
//! to such a look only once, and the next snapshot would not find it.

use core::ffi::{c_int, c_long};

use super::interposed::as_library;
use super::short_calls::{GETSOCKOPT, SO_TYPE, SOL_SOCKET};
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
    loop {
        let arguments = [socket.into(), address(message), flags.into(), 0, 0, 0];
        // SAFETY: by the contract above.
        let result = unsafe { system_call(RECVMSG, arguments) };
        if result != 0 || flags != LOOK || !has_messages(socket) {
            return as_library(result);
        }
        // SAFETY: as it was before the call.
        unsafe { message.write(asked) };
    }
}

/// Returns true for a socket with messages whose other end has not ended them: no bytes are an empty message then.
fn has_messages(socket: c_int) -> bool {
    let (mut kind, mut len) = (0_i32, 4_u32);
    let (into, room) = (address(&raw mut kind), address(&raw mut len));
    let mut look = [socket.cast_unsigned(), ENDED];
    // SAFETY: the kernel writes a number of four bytes, and the events of one descriptor.
    unsafe {
        system_call(
            GETSOCKOPT,
            [socket.into(), SOL_SOCKET, SO_TYPE, into, room, 0],
        );
        system_call(
            PPOLL,
            [address(&raw mut look), 1, address(&NO_TIME), 0, 0, 0],
        );
    }
    let has_ended = look[1] >> 16 & (ENDED | HUNG_UP) != 0;
    kind == DATAGRAMS || kind == PACKETS && !has_ended
}

/// `MSG_PEEK | MSG_DONTWAIT`.
const LOOK: c_int = 0x2 | 0x40;
/// `POLLRDHUP` and `POLLHUP`.
const ENDED: u32 = 0x2000;
const HUNG_UP: u32 = 0x10;
/// `struct timespec`.
const NO_TIME: [u64; 2] = [0; 2];
const DATAGRAMS: i32 = 2;
const PACKETS: i32 = 5;

#[cfg(target_arch = "x86_64")]
const RECVMSG: c_long = 47;
#[cfg(target_arch = "aarch64")]
const RECVMSG: c_long = 212;
#[cfg(target_arch = "x86_64")]
const PPOLL: c_long = 271;
#[cfg(target_arch = "aarch64")]
const PPOLL: c_long = 73;
