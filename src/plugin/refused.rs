#![allow(unsafe_code, reason = "called by CRIU through C")]
//! Replacements for functions of the C library in a CRIU without privileges on the machine. They answer what the kernel
//! refuses to such a CRIU, and pass all other calls on unchanged, with one exception, for every CRIU: `thread_timers`.
//!
//! ```text
//! openat          EPERM: `stand_in`   EACCES: `settings`   a thread's status: `filters`   timers: `thread_timers`
//! stat, fstatat   EPERM: `stand_in`
//! write           `settings`
//! fchownat        EINVAL, for a user or group that is not mapped here: EPERM, and CRIU looks whether the file has it
//! ```

use core::ffi::{CStr, c_char, c_int, c_long, c_uint, c_void};
use core::slice;

use super::interposed::as_library;
use super::kernel::{EACCES, EINVAL, EPERM, openat_with, write_some};
use super::system_call::{AT_FDCWD, address, system_call};
use super::{filters, settings, stand_in, thread_timers};

#[cfg(target_arch = "x86_64")]
const NEWFSTATAT: c_long = 262;
#[cfg(target_arch = "x86_64")]
const FCHOWNAT: c_long = 260;
#[cfg(target_arch = "aarch64")]
const NEWFSTATAT: c_long = 79;
#[cfg(target_arch = "aarch64")]
const FCHOWNAT: c_long = 54;
/// Size of a `struct stat` in words.
const STAT_WORDS: usize = if cfg!(target_arch = "x86_64") { 18 } else { 16 };

/// Opens a file like the function of the C library.
///
/// # Safety
/// The path ends with a zero.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn openat64(
    folder: c_int,
    path: *const c_char,
    flags: c_int,
    mode: c_uint,
) -> c_int {
    // SAFETY: by the contract above.
    let path = unsafe { CStr::from_ptr(path) };
    let shown =
        filters::answer(folder, path, flags).or_else(|| thread_timers::answer(folder, path, flags));
    if let Some(answer) = shown {
        return answer;
    }
    let opened = openat_with(folder, path, flags, mode);
    let answer = match opened {
        Err(EPERM) => stand_in::answer(folder, path, flags),
        Err(EACCES) => settings::answer(folder, path, flags),
        Ok(_) | Err(_) => None,
    };
    match answer.unwrap_or(opened) {
        Ok(file) => file,
        Err(error) => {
            as_library(-c_long::from(error));
            -1
        }
    }
}

/// Returns the attributes of a file like the function of the C library.
///
/// # Safety
/// The path ends with a zero, and `into` has room for a `struct stat`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn stat64(path: *const c_char, into: *mut u64) -> c_int {
    // SAFETY: by the contract above.
    unsafe { fstatat64(AT_FDCWD, path, into, 0) }
}

/// Returns the attributes of a file like the function of the C library.
///
/// # Safety
/// The path ends with a zero, and `into` has room for a `struct stat`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fstatat64(
    folder: c_int,
    path: *const c_char,
    into: *mut u64,
    flags: c_int,
) -> c_int {
    // SAFETY: by the contract above.
    let path = unsafe { CStr::from_ptr(path) };
    let arguments = [
        folder.into(),
        address(path.as_ptr()),
        address(into),
        flags.into(),
        0,
        0,
    ];
    // SAFETY: the path ends with a zero. On these machines the structure is the kernel's.
    let result = unsafe { system_call(NEWFSTATAT, arguments) };
    if result == -c_long::from(EPERM)
        && let Some(identity) = stand_in::about(folder, path)
    {
        let (major, minor) = identity.device;
        let (major, minor) = (u64::from(major), u64::from(minor));
        let device = major << 8 & 0xfff00 | minor & 0xff | (minor & 0xfff_ff00) << 12;
        // SAFETY: by the contract above. The structure begins with the device and the inode on all machines.
        unsafe {
            into.write_bytes(0, STAT_WORDS);
            into.write(device);
            into.add(1).write(identity.inode);
        }
        return 0;
    }
    #[allow(clippy::cast_possible_truncation, reason = "0 or -1")]
    let result = as_library(result) as c_int;
    result
}

/// Gives a file to a user and a group like the function of the C library.
///
/// # Safety
/// The path ends with a zero.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fchownat(
    folder: c_int,
    path: *const c_char,
    user: c_uint,
    group: c_uint,
    flags: c_int,
) -> c_int {
    let (path, user, group) = (address(path), user.into(), group.into());
    let arguments = [folder.into(), path, user, group, flags.into(), 0];
    // SAFETY: by the contract above.
    let result = unsafe { system_call(FCHOWNAT, arguments) };
    let result = if result == -c_long::from(EINVAL) {
        -c_long::from(EPERM)
    } else {
        result
    };
    #[allow(clippy::cast_possible_truncation, reason = "0 or -1")]
    let result = as_library(result) as c_int;
    result
}

/// Writes to a file like the function of the C library.
///
/// # Safety
/// `bytes` points to `len` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn write(file: c_int, bytes: *const c_void, len: usize) -> isize {
    let bytes = if len == 0 {
        &[]
    } else {
        // SAFETY: by the contract above.
        unsafe { slice::from_raw_parts(bytes.cast(), len) }
    };
    match settings::write(file, bytes).unwrap_or_else(|| write_some(file, bytes)) {
        Ok(written) => written.cast_signed(),
        Err(error) => {
            as_library(-c_long::from(error));
            -1
        }
    }
}
