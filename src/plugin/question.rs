#![allow(unsafe_code, reason = "called by CRIU through C")]
//! Questions to the supervisor: the plugin connects to a socket, whose path a variable has, and waits for a byte.

use core::ffi::{CStr, c_int, c_uint, c_void};

use super::kernel::{O_CLOEXEC, close, connect, getenv, read, socket};
use super::variables::GO_ON;

const AF_UNIX: u16 = 1;
const SOCK_STREAM: c_int = 1;

/// `struct sockaddr_un`.
#[repr(C)]
struct Address {
    family: u16,
    path: [u8; 108],
}

/// Bytes of an [`Address`].
const ADDRESS_BYTES: c_uint = 110;
const _: () = assert!(size_of::<Address>() == ADDRESS_BYTES as usize);

impl Address {
    /// Returns `None` if the path is too long.
    fn of(path: &CStr) -> Option<Self> {
        let bytes = path.to_bytes_with_nul();
        let mut address = Self {
            family: AF_UNIX,
            path: [0; 108],
        };
        address.path.get_mut(..bytes.len())?.copy_from_slice(bytes);
        Some(address)
    }
}

/// Asks on the socket that the variable names, and waits for the supervisor's word or its death. Returns true for
/// [`GO_ON`], and `None` where the variable is not set.
pub fn ask(variable: &CStr) -> Option<bool> {
    // SAFETY: the name ends with a zero; CRIU's process has one thread, so the value stays.
    let path = unsafe { getenv(variable.as_ptr()) };
    if path.is_null() {
        return None;
    }
    // SAFETY: a value of the environment ends with a zero, and nobody changes it.
    Some(may_go_on(unsafe { CStr::from_ptr(path) }))
}

fn may_go_on(path: &CStr) -> bool {
    let Some(address) = Address::of(path) else {
        return false;
    };
    // SAFETY: takes numbers only.
    let socket = unsafe { socket(AF_UNIX.into(), SOCK_STREAM | O_CLOEXEC, 0) };
    if socket < 0 {
        return false;
    }
    let pointer = (&raw const address).cast::<c_void>();
    // SAFETY: the address is of this size, and the kernel only reads it.
    let is_connected = unsafe { connect(socket, pointer, ADDRESS_BYTES) } == 0;
    let mut word = 0_u8;
    // SAFETY: there is room for the one byte. CRIU's signal handlers restart the call.
    let heard = is_connected && unsafe { read(socket, (&raw mut word).cast(), 1) } == 1;
    // SAFETY: this function has opened it.
    unsafe { close(socket) };
    heard && word == GO_ON
}
