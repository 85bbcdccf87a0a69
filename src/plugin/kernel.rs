#![allow(unsafe_code, reason = "called by CRIU through C")]
//! System calls that old C libraries do not have, made without them, and the functions of the C library that the plugin
//! calls.

use core::ffi::{CStr, c_char, c_int, c_long, c_uint, c_void};

use super::system_call::{address, system_call};

pub const O_CLOEXEC: c_int = 0o2_000_000;
#[cfg(target_arch = "x86_64")]
pub const O_DIRECTORY: c_int = 0o200_000;
#[cfg(target_arch = "aarch64")]
pub const O_DIRECTORY: c_int = 0o40_000;

pub const EPERM: c_int = 1;
pub const ENOENT: c_int = 2;
pub const ESRCH: c_int = 3;
pub const EINTR: c_int = 4;
pub const EIO: c_int = 5;
pub const EAGAIN: c_int = 11;
pub const ENOMEM: c_int = 12;
pub const EACCES: c_int = 13;
pub const EINVAL: c_int = 22;

#[cfg(target_arch = "x86_64")]
mod number {
    use core::ffi::c_long;
    pub const WRITE: c_long = 1;
    pub const OPENAT: c_long = 257;
    pub const GETSOCKOPT: c_long = 55;
    pub const PREAD64: c_long = 17;
    pub const PWRITE64: c_long = 18;
}
#[cfg(target_arch = "aarch64")]
mod number {
    use core::ffi::c_long;
    pub const WRITE: c_long = 64;
    pub const OPENAT: c_long = 56;
    pub const GETSOCKOPT: c_long = 209;
    pub const PREAD64: c_long = 67;
    pub const PWRITE64: c_long = 68;
}

#[cfg(target_arch = "x86_64")]
pub const READ: c_long = 0;
#[cfg(target_arch = "aarch64")]
pub const READ: c_long = 63;

const SOL_SOCKET: c_long = 1;

/// Number of `mount_setattr`, the same on every machine.
pub const MOUNT_SETATTR: c_long = 442;

/// Opens a file that exists; the error is its number.
pub fn openat(folder: c_int, path: &CStr, flags: c_int) -> Result<c_int, c_int> {
    openat_with(folder, path, flags, 0)
}

/// Opens a file, or creates it with this mode; the error is its number.
pub fn openat_with(folder: c_int, path: &CStr, flags: c_int, mode: c_uint) -> Result<c_int, c_int> {
    let (path, mode) = (address(path.as_ptr()), mode.into());
    let arguments = [folder.into(), path, flags.into(), mode, 0, 0];
    // SAFETY: the path ends with a zero.
    let opened = unsafe { system_call(number::OPENAT, arguments) };
    c_int::try_from(opened)
        .ok()
        .filter(|opened| *opened >= 0)
        .ok_or_else(|| error(opened))
}

/// Reads from a file; the error is its number.
pub fn read_some(file: c_int, into: &mut [u8]) -> Result<usize, c_int> {
    transfer(READ, file, into.as_mut_ptr(), into.len(), 0)
}

/// Writes to a file; the error is its number.
pub fn write_some(file: c_int, bytes: &[u8]) -> Result<usize, c_int> {
    transfer(number::WRITE, file, bytes.as_ptr(), bytes.len(), 0)
}

/// Reads from a place in a file; the error is its number.
pub fn read_at(file: c_int, into: &mut [u8], place: u64) -> Result<usize, c_int> {
    transfer(number::PREAD64, file, into.as_mut_ptr(), into.len(), place)
}

/// Writes to a place in a file; the error is its number.
pub fn write_at(file: c_int, bytes: &[u8], place: u64) -> Result<usize, c_int> {
    transfer(number::PWRITE64, file, bytes.as_ptr(), bytes.len(), place)
}

fn transfer(
    number: c_long,
    file: c_int,
    bytes: *const u8,
    len: usize,
    place: u64,
) -> Result<usize, c_int> {
    let place = place.cast_signed() as c_long;
    let arguments = [
        file.into(),
        address(bytes),
        len.cast_signed() as c_long,
        place,
        0,
        0,
    ];
    // SAFETY: the callers have so many bytes there, writable ones for a read.
    let moved = unsafe { system_call(number, arguments) };
    usize::try_from(moved).map_err(|_| error(moved))
}

/// Option of a socket: its kind.
pub const SO_TYPE: c_long = 3;

/// Returns the value of an option of a socket; zeros for other files.
pub fn socket_option(socket: c_long, option: c_long) -> [u64; 2] {
    let mut value = [0_u64; 2];
    let mut len = size_of_val(&value);
    let (into, room) = (address(&raw mut value), address(&raw mut len));
    let arguments = [socket, SOL_SOCKET, option, into, room, 0];
    // SAFETY: the kernel writes at most so many bytes.
    unsafe { system_call(number::GETSOCKOPT, arguments) };
    value
}

/// Returns the number of an error.
pub fn error(result: c_long) -> c_int {
    c_int::try_from(result.wrapping_neg()).unwrap_or(EIO)
}

/// Returns the value of a variable of CRIU's environment.
pub fn variable(name: &CStr) -> Option<&'static CStr> {
    // SAFETY: the name ends with a zero; CRIU's process has one thread, so the value stays.
    let value = unsafe { getenv(name.as_ptr()) };
    // SAFETY: a value of the environment ends with a zero, and nobody changes it.
    (!value.is_null()).then(|| unsafe { CStr::from_ptr(value) })
}

// Of the C library that CRIU runs with; none is linked.
unsafe extern "C" {
    fn getenv(name: *const c_char) -> *const c_char;
    pub fn open(path: *const c_char, flags: c_int, ...) -> c_int;
    pub fn close(descriptor: c_int) -> c_int;
    pub fn _exit(code: c_int) -> !;
    pub fn pause() -> c_int;
    pub fn socket(family: c_int, kind: c_int, protocol: c_int) -> c_int;
    pub fn connect(socket: c_int, address: *const c_void, len: c_uint) -> c_int;
}
