#![allow(unsafe_code, reason = "called by CRIU through C")]
//! System calls that old C libraries do not have, made without them, and the functions of the C library that the plugin
//! calls.

use core::arch::asm;
use core::ffi::{c_char, c_int, c_long, c_uint, c_void};

pub const AT_FDCWD: c_int = -100;
pub const O_CLOEXEC: c_int = 0o2_000_000;

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
