#![allow(unsafe_code, reason = "system calls")]
//! The way into the kernel without the C library: `errno` is left alone, and it is safe in a signal handler and after
//! vfork. The plugin and the witness share this file.

use core::arch::asm;
use core::ffi::{CStr, c_int, c_long};

/// The working folder, in place of a folder's descriptor.
pub const AT_FDCWD: c_int = -100;

#[cfg(target_arch = "x86_64")]
const READLINKAT: c_long = 267;
#[cfg(target_arch = "aarch64")]
const READLINKAT: c_long = 78;

/// Makes a system call; returns its result, or an error's number, negative.
///
/// # Safety
/// The arguments are valid for the call.
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

/// Returns a pointer as an argument of a system call.
pub fn address<T>(pointer: *const T) -> c_long {
    pointer.expose_provenance().cast_signed() as c_long
}

/// Reads a link; returns the length of what it leads to. `None` also where that does not fit.
pub fn read_link(folder: c_int, path: &CStr, into: &mut [u8]) -> Option<usize> {
    let len = into.len().cast_signed() as c_long;
    let (path, into) = (address(path.as_ptr()), address(into.as_mut_ptr()));
    let arguments = [folder.into(), path, into, len, 0, 0];
    // SAFETY: the path ends with a zero, and the kernel writes at most so many bytes.
    let read = unsafe { system_call(READLINKAT, arguments) };
    usize::try_from(read).ok().filter(|_| read < len)
}
