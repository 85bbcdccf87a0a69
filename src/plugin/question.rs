#![allow(unsafe_code, reason = "called by CRIU through C")]
//! Questions to the supervisor. The plugin connects to a socket, whose path is in a variable, and waits for a byte.
//!
//! ```text
//! pre-dump        CRIU has started and will inspect the tasks next, so that its start is not part of the freeze
//! (a hook)        the tasks are frozen, and CRIU has not inspected their sockets yet
//! post-dump       all image files are closed. CRIU passes memory pages to their pipes by reference: if the tasks were
//!                 released while a pipe contains unread pages, later writes would change the image
//! post-restore    everything is restored, and packets may reach the restored connections
//! (a hook)        the tasks are ready to run
//! ```
//! If CRIU has no hook for a question, it starts an action script. The preloaded plugin asks instead of the script, in
//! the child that CRIU has forked for it. No program is started, and none could be during a restore that follows no
//! links (see `guard`).
//!
//! A refusal aborts the dump, and the tasks continue, or aborts the restore. The wait ends with the supervisor's answer
//! or its exit.

use core::ffi::{CStr, c_char, c_int, c_uint, c_void};

use super::kernel::{O_CLOEXEC, close, connect, getenv, read, socket};
use super::variables::{BEGIN, DUMPED, GO_ON, RESTORED, SCRIPT};

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

/// Starts a program like the C library's function. For the action script, it asks instead, and ends CRIU's child.
///
/// # Safety
/// See the C library's function.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn execvp(program: *const c_char, arguments: *const *const c_char) -> c_int {
    // SAFETY: by the contract above.
    if unsafe { CStr::from_ptr(program) } == SCRIPT {
        let is_refused = socket_of_action().and_then(ask) == Some(false);
        // SAFETY: takes a number and does not return.
        unsafe { _exit(is_refused.into()) }
    }
    // SAFETY: by the contract above; CRIU's process has one thread, so the environment stays.
    unsafe { execvpe(program, arguments, environ) }
}

/// Returns the variable of the action for which CRIU starts the script; `None` for an action without a question.
fn socket_of_action() -> Option<&'static CStr> {
    // SAFETY: the name ends with a zero; CRIU's process has one thread, so the value stays.
    let action = unsafe { getenv(c"CRTOOLS_SCRIPT_ACTION".as_ptr()) };
    if action.is_null() {
        return None;
    }
    // SAFETY: a value of the environment ends with a zero, and nobody changes it.
    match unsafe { CStr::from_ptr(action) }.to_bytes() {
        b"pre-dump" => Some(BEGIN),
        b"post-dump" => Some(DUMPED),
        b"post-restore" => Some(RESTORED),
        _ => None,
    }
}

/// Asks on the socket named by the variable, and waits for the supervisor's answer or exit. Returns true for
/// [`GO_ON`], and `None` if the variable is not set.
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

// Of the C library that CRIU runs with; none is linked.
unsafe extern "C" {
    static environ: *const *const c_char;
    fn execvpe(
        program: *const c_char,
        arguments: *const *const c_char,
        environment: *const *const c_char,
    ) -> c_int;
    fn _exit(code: c_int) -> !;
}
