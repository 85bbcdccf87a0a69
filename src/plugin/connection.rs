#![allow(unsafe_code, reason = "called by CRIU through C")]
//! Connection to the supervisor over a unix socket.

use core::ffi::{CStr, c_int, c_long, c_uint, c_void};

use super::kernel::{EINTR, O_CLOEXEC, close, connect, read_some, socket};
use super::system_call::{address, system_call};

const AF_UNIX: u16 = 1;
const SOCK_STREAM: c_int = 1;
const MSG_NOSIGNAL: c_long = 0x4000;
#[cfg(target_arch = "x86_64")]
const SENDTO: c_long = 44;
#[cfg(target_arch = "aarch64")]
const SENDTO: c_long = 206;

/// Size of a socket's path with the zero at its end.
pub const PATH_BYTES: usize = 108;

/// `struct sockaddr_un`.
#[repr(C)]
struct Address {
    family: u16,
    path: [u8; PATH_BYTES],
}

/// Bytes of an [`Address`].
const ADDRESS_BYTES: c_uint = 110;
const _: () = assert!(size_of::<Address>() == ADDRESS_BYTES as usize);

/// An open connection.
pub struct Connection(c_int);

impl Connection {
    /// Returns `None` if nobody listens there, or the path is too long.
    pub fn open(path: &CStr) -> Option<Self> {
        let bytes = path.to_bytes_with_nul();
        let mut address = Address {
            family: AF_UNIX,
            path: [0; PATH_BYTES],
        };
        address.path.get_mut(..bytes.len())?.copy_from_slice(bytes);
        // SAFETY: takes numbers only.
        let socket = unsafe { socket(AF_UNIX.into(), SOCK_STREAM | O_CLOEXEC, 0) };
        if socket < 0 {
            return None;
        }
        let opened = Self(socket);
        let pointer = (&raw const address).cast::<c_void>();
        // SAFETY: the address is of this size, and the kernel only reads it.
        (unsafe { connect(socket, pointer, ADDRESS_BYTES) } == 0).then_some(opened)
    }

    /// Sends a short message. Returns false if the supervisor has closed the connection.
    pub fn send(&self, message: &[u8]) -> bool {
        let len = message.len().cast_signed() as c_long;
        let arguments = [
            self.0.into(),
            address(message.as_ptr()),
            len,
            MSG_NOSIGNAL,
            0,
            0,
        ];
        // SAFETY: the message has so many bytes.
        unsafe { system_call(SENDTO, arguments) == len }
    }

    /// Waits for an answer of this length. Returns false if the supervisor has closed the connection.
    pub fn receive(&self, answer: &mut [u8]) -> bool {
        read_full(self.0, answer)
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        // SAFETY: nobody else has it.
        unsafe { close(self.0) };
    }
}

/// Fills `into` from a file. Returns false if the file is too short or cannot be read.
pub fn read_full(file: c_int, into: &mut [u8]) -> bool {
    let mut filled = 0;
    while filled < into.len() {
        match read_some(file, &mut into[filled..]) {
            Ok(0) => return false,
            Ok(more) => filled += more,
            Err(EINTR) => {}
            Err(_) => return false,
        }
    }
    true
}
