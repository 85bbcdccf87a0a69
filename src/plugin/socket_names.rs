#![allow(unsafe_code, reason = "called by CRIU through C")]
//! A `readlink` that replaces the C library's in a dumping CRIU with this library preloaded.
//!
//! CRIU (4.2) takes the file of a unix socket for a removed one if the name by which it was bound was removed, and binds it without a
//! name then. A file that has another name is not a removed one: it gets the name again, and the supervisor gives it the other
//! one afterwards.

use core::ffi::{CStr, c_char, c_long};

use super::inode::{Inode, Links};
use super::interposed::as_library;
use super::system_call::{AT_FDCWD, address, system_call};

const OF_DESCRIPTOR: &[u8] = b"/proc/self/fd/";
/// The kernel's mark of a removed name.
const REMOVED: &[u8] = b" (deleted)";

#[cfg(target_arch = "x86_64")]
const READLINKAT: c_long = 267;
#[cfg(target_arch = "aarch64")]
const READLINKAT: c_long = 78;

/// Reads a link like the function of the C library, without the mark at a socket's file that has another name.
///
/// # Safety
/// The path ends with a zero, and `into` has room for `len` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn readlink(path: *const c_char, into: *mut u8, len: usize) -> isize {
    // SAFETY: by the contract above.
    let path = unsafe { CStr::from_ptr(path) };
    let room = len.cast_signed() as c_long;
    let (name, place) = (address(path.as_ptr()), address(into));
    // SAFETY: by the contract above.
    let read = unsafe { system_call(READLINKAT, [AT_FDCWD.into(), name, place, room, 0, 0]) };
    let Ok(bytes) = usize::try_from(read) else {
        as_library(read);
        return -1;
    };
    // SAFETY: the kernel has written so many bytes.
    let target = unsafe { core::slice::from_raw_parts(into, bytes) };
    let is_marked = path.to_bytes().starts_with(OF_DESCRIPTOR) && target.ends_with(REMOVED);
    if is_marked && has_other_name(path) {
        return (bytes - REMOVED.len()).cast_signed();
    }
    bytes.cast_signed()
}

fn has_other_name(path: &CStr) -> bool {
    let inode = Inode::of_path(AT_FDCWD, path, Links::Followed);
    inode.is_some_and(|inode| inode.is_socket() && inode.names > 0)
}
