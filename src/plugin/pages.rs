#![allow(unsafe_code, reason = "called by CRIU through C")]
//! A `read` that replaces the C library's in a restoring CRIU with this library preloaded.
//!
//! CRIU restores a process's memory by reading it from a pipe. The kernel copies with one thread, most of whose time it
//! spends on making the pages. For a long read, the supervisor writes into CRIU's memory instead, with several threads:
//!
//! ```text
//! plugin       connects to the socket of the pipe and sends address and length
//! supervisor   number of bytes that are in the pipe already, and of those that this read returns. If the former are
//!              enough, the exchange ends
//! plugin       reads them, and then sends GO_ON
//! supervisor   writes the remaining bytes, and then sends GO_ON
//! ```
//! If there is no such socket, or the supervisor closes the connection instead of the first answer, all bytes come
//! through the pipe.

use core::ffi::{c_int, c_long, c_void};

use super::connection::{Connection, PATH_BYTES, read_full};
use super::inode::Inode;
use super::interposed::as_library;
use super::kernel::{EIO, READ, variable};
use super::system_call::{address, system_call};
use super::text::Buffer;
use super::variables::{GO_ON, LONG_READ_MIN, PAGES};

/// Reads like the C library's function.
///
/// # Safety
/// `into` has room for `len` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn read(file: c_int, into: *mut c_void, len: usize) -> c_long {
    if len >= LONG_READ_MIN
        && let Some(connection) = connect(file)
    {
        // SAFETY: by the contract above. The bytes are only written.
        let into = unsafe { core::slice::from_raw_parts_mut(into.cast::<u8>(), len) };
        if let Some(read) = read_directly(&connection, file, into) {
            let result = match read {
                Ok(len) => len.cast_signed() as c_long,
                Err(Broken) => -c_long::from(EIO),
            };
            return as_library(result);
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
    as_library(unsafe { system_call(READ, arguments) })
}

/// The exchange broke when bytes had been taken for it.
struct Broken;

/// Connects to the supervisor's socket for a pipe.
fn connect(file: c_int) -> Option<Connection> {
    let prefix = variable(PAGES)?;
    let pipe = Inode::of_descriptor(file)?;
    let mut path = Buffer::<PATH_BYTES>::new();
    path.push(prefix.to_bytes());
    path.push_number(i64::try_from(pipe.number).ok()?);
    Connection::open(path.as_c())
}

/// Reads into `into`, and returns the number of bytes, or an error. Returns `None` if the bytes come through the pipe.
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
