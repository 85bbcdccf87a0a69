#![allow(unsafe_code, reason = "called by CRIU through C")]
//! System calls that old C libraries do not have, made without them, and the functions of the C library that the plugin
//! calls.

use core::arch::asm;
use core::ffi::{CStr, c_char, c_int, c_long, c_uint, c_void};

pub const AT_FDCWD: c_int = -100;
pub const O_CLOEXEC: c_int = 0o2_000_000;
#[cfg(target_arch = "x86_64")]
pub const O_DIRECTORY: c_int = 0o200_000;
#[cfg(target_arch = "aarch64")]
pub const O_DIRECTORY: c_int = 0o40_000;

pub const EPERM: c_int = 1;
pub const ENOENT: c_int = 2;
pub const ESRCH: c_int = 3;
pub const EIO: c_int = 5;
pub const EACCES: c_int = 13;

#[cfg(target_arch = "x86_64")]
mod number {
    use core::ffi::c_long;
    pub const READ: c_long = 0;
    pub const WRITE: c_long = 1;
    pub const OPENAT: c_long = 257;
    pub const PREAD64: c_long = 17;
    pub const PWRITE64: c_long = 18;
    pub const READLINKAT: c_long = 267;
}
#[cfg(target_arch = "aarch64")]
mod number {
    use core::ffi::c_long;
    pub const READ: c_long = 63;
    pub const WRITE: c_long = 64;
    pub const OPENAT: c_long = 56;
    pub const PREAD64: c_long = 67;
    pub const PWRITE64: c_long = 68;
    pub const READLINKAT: c_long = 78;
}

/// Number of `mount_setattr`, the same on every machine.
pub const MOUNT_SETATTR: c_long = 442;

/// Makes a system call; returns its result, or an error's number, negative.
///
/// # Safety
/// As the call demands.
pub unsafe fn system_call(number: c_long, arguments: [c_long; 6]) -> c_long {
    let result: c_long;
    #[cfg(target_arch = "x86_64")]
    // SAFETY: the kernel's convention; by the contract above.
    unsafe {
        asm!(
            "syscall",
            inlateout("rax") number => result,
            in("rdi") arguments[0], in("rsi") arguments[1], in("rdx") arguments[2], in("r10") arguments[3], in("r8") arguments[4], in("r9") arguments[5],
            lateout("rcx") _, lateout("r11") _,
            options(nostack),
        );
    }
    #[cfg(target_arch = "aarch64")]
    // SAFETY: the kernel's convention; by the contract above.
    unsafe {
        asm!(
            "svc 0",
            in("x8") number, inlateout("x0") arguments[0] => result,
            in("x1") arguments[1], in("x2") arguments[2], in("x3") arguments[3], in("x4") arguments[4], in("x5") arguments[5],
            options(nostack),
        );
    }
    result
}

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

/// Reads a link; returns the length of what it leads to. `None` also where that does not fit.
pub fn read_link(folder: c_int, path: &CStr, into: &mut [u8]) -> Option<usize> {
    let len = into.len().cast_signed() as c_long;
    let (path, into) = (address(path.as_ptr()), address(into.as_mut_ptr()));
    let arguments = [folder.into(), path, into, len, 0, 0];
    // SAFETY: the path ends with a zero, and the kernel writes at most so many bytes.
    let read = unsafe { system_call(number::READLINKAT, arguments) };
    usize::try_from(read).ok().filter(|_| read < len)
}

/// Reads from a file; the error is its number.
pub fn read_some(file: c_int, into: &mut [u8]) -> Result<usize, c_int> {
    transfer(number::READ, file, into.as_mut_ptr(), into.len(), 0)
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

/// Returns the number of an error.
fn error(result: c_long) -> c_int {
    c_int::try_from(result.wrapping_neg()).unwrap_or(EIO)
}

/// Returns a pointer as an argument of a system call.
pub fn address<T>(pointer: *const T) -> c_long {
    pointer.expose_provenance().cast_signed() as c_long
}

// Of the C library that CRIU runs with; none is linked.
unsafe extern "C" {
    pub fn getenv(name: *const c_char) -> *const c_char;
    pub fn open(path: *const c_char, flags: c_int, ...) -> c_int;
    pub fn read(descriptor: c_int, into: *mut c_void, len: usize) -> isize;
    pub fn close(descriptor: c_int) -> c_int;
    pub fn socket(family: c_int, kind: c_int, protocol: c_int) -> c_int;
    pub fn connect(socket: c_int, address: *const c_void, len: c_uint) -> c_int;
}
