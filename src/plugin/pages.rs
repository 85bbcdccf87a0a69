#![allow(unsafe_code, reason = "called by CRIU through C")]
//! A `read` that replaces the C library's in a restoring CRIU with this library preloaded.
//!
//! CRIU restores a process's memory by reading it from a pipe. The kernel copies with one thread, most of whose time it
//! spends on making the pages. For a long read, the supervisor writes into CRIU's memory instead, with several threads:
//!
//! ```text
//! plugin       connects to the socket of the pipe and sends address and length
//! supervisor   in_pipe: number of bytes that are in the pipe already
//!              len: number of bytes that this read returns. If they are in the pipe, the exchange ends here
//! plugin       reads `in_pipe` bytes from the pipe, and then sends GO_ON
//! supervisor   writes the remaining bytes, and then sends GO_ON
//! ```
//! If there is no such socket, or the supervisor closes the connection instead of the first answer, all bytes come
//! through the pipe. If the exchange breaks later or the pipe cannot be read, this process exits: CRIU (4.2.1) ignores
//! failed reads of shared memory.

use core::ffi::{c_int, c_long, c_void};

use super::connection::{Connection, PATH_BYTES, read_full};
use super::inode::Inode;
use super::interposed::as_library;
use super::kernel::{_exit, EAGAIN, EINTR, READ, error, variable};
use super::system_call::{address, system_call};
use super::terminals;
use super::text::Buffer;
use super::variables::{GO_ON, LONG_READ_MIN, PAGES};

/// Most bytes that the kernel reads at once.
const READ_BYTES_MAX: usize = 0x7fff_f000;

/// Reads like the C library's function.
///
/// # Safety
/// `into` has room for `len` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn read(file: c_int, into: *mut c_void, len: usize) -> c_long {
    if terminals::has_kept_data(file, len) {
        return as_library(-c_long::from(EAGAIN));
    }
    if len >= LONG_READ_MIN
        && let Some(connection) = connect(file)
    {
        // SAFETY: by the contract above. The bytes are only written.
        let into =
            unsafe { core::slice::from_raw_parts_mut(into.cast::<u8>(), len.min(READ_BYTES_MAX)) };
        match read_directly(&connection, file, into) {
            Some(Ok(len)) => return len.cast_signed() as c_long,
            // SAFETY: takes a number and does not return.
            Some(Err(Broken)) => unsafe { _exit(1) },
            None => {}
        }
    }
    let arguments = [
        file.into(),
        address(into),
        len.cast_signed() as c_long,
        0,
        0,
        0,
    ];
    // SAFETY: by the contract above.
    let result = unsafe { system_call(READ, arguments) };
    let is_final = result < 0 && ![EINTR, EAGAIN].contains(&error(result));
    if is_final && variable(PAGES).is_some() && pipe_of(file).is_some() {
        // SAFETY: takes a number and does not return.
        unsafe { _exit(1) }
    }
    as_library(result)
}

/// Returns the inode of a pipe.
fn pipe_of(file: c_int) -> Option<Inode> {
    Inode::of_descriptor(file).filter(Inode::is_pipe)
}

/// An exchange that broke after bytes were taken from the pipe.
struct Broken;

/// Connects to the supervisor's socket for a pipe.
fn connect(file: c_int) -> Option<Connection> {
    let prefix = variable(PAGES)?;
    let pipe = pipe_of(file)?;
    let (major, minor) = pipe.device();
    // The sockets' folder has longer names.
    let mut path = Buffer::<PATH_BYTES>::new();
    path.push(prefix.to_bytes());
    for number in [major.into(), minor.into(), pipe.number] {
        path.push(b".");
        path.push_number(i64::try_from(number).ok()?);
    }
    Connection::open(path.as_c())
}

/// Reads into `into`, and returns the number of bytes. Returns `None` if the bytes come through the pipe.
fn read_directly(
    connection: &Connection,
    pipe: c_int,
    into: &mut [u8],
) -> Option<Result<usize, Broken>> {
    let place = into.as_ptr().expose_provenance();
    let request = [place, into.len()].map(usize::to_le_bytes);
    let mut answer = [[0; 8]; 2];
    if !connection.send(request.as_flattened()) || !connection.receive(answer.as_flattened_mut()) {
        return None;
    }
    let [in_pipe, len] = answer.map(usize::from_le_bytes);
    if in_pipe >= len {
        return None;
    }
    let is_done = || {
        let mut word = [0];
        connection.send(&[GO_ON]) && connection.receive(&mut word) && word == [GO_ON]
    };
    // From here on, bytes that are missing do not come through the pipe either.
    let is_read = len <= into.len() && read_full(pipe, &mut into[..in_pipe]) && is_done();
    Some(if is_read { Ok(len) } else { Err(Broken) })
}
