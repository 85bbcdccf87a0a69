//! System calls, made without the C library: they leave `errno` alone, and are safe in a signal handler and after vfork.

use core::arch::asm;
use core::ffi::{CStr, c_char, c_int, c_long, c_void};

pub const AT_FDCWD: c_int = -100;
const CLOCK_MONOTONIC: c_long = 1;

#[cfg(target_arch = "x86_64")]
mod number {
    use core::ffi::c_long;
    pub const GETCWD: c_long = 79;
    pub const CLOCK_GETTIME: c_long = 228;
    pub const UNLINKAT: c_long = 263;
    pub const SYMLINKAT: c_long = 266;
    pub const READLINKAT: c_long = 267;
    pub const FACCESSAT: c_long = 269;
}
#[cfg(target_arch = "aarch64")]
mod number {
    use core::ffi::c_long;
    pub const GETCWD: c_long = 17;
    pub const CLOCK_GETTIME: c_long = 113;
    pub const UNLINKAT: c_long = 35;
    pub const SYMLINKAT: c_long = 36;
    pub const READLINKAT: c_long = 78;
    pub const FACCESSAT: c_long = 48;
}

const ENOENT: c_long = 2;

unsafe extern "C" {
    pub fn abort() -> !;
    pub fn getenv(name: *const c_char) -> *const c_char;
    pub fn dl_iterate_phdr(
        callback: unsafe extern "C" fn(*const c_void, usize, *mut c_void) -> c_int,
        data: *mut c_void,
    ) -> c_int;
}

/// Returns true if something exists at the path, false if nothing does, `None` if that cannot be known. The kernel checks
/// the pointer.
pub fn exists(folder: c_int, path: *const c_char) -> Option<bool> {
    // SAFETY: reads the path, and reports an address that cannot be read.
    match unsafe { call(number::FACCESSAT, [folder.into(), address(path), 0, 0]) } {
        0 => Some(true),
        result if result == -ENOENT => Some(false),
        _ => None,
    }
}

/// Writes the working folder's path and a zero. Returns the length with the zero, or an error as a negative number.
pub fn working_folder(into: &mut [u8]) -> c_long {
    let arguments = [address(into.as_mut_ptr()), size(into), 0, 0];
    // SAFETY: the kernel writes at most so many bytes.
    unsafe { call(number::GETCWD, arguments) }
}

/// Writes the text of a link without a zero. Returns its length, or an error as a negative number.
pub fn read_link(path: &CStr, into: &mut [u8]) -> c_long {
    let (path, size) = (address(path.as_ptr()), size(into));
    let arguments = [AT_FDCWD.into(), path, address(into.as_mut_ptr()), size];
    // SAFETY: the path ends with a zero, and the kernel writes at most so many bytes.
    unsafe { call(number::READLINKAT, arguments) }
}

/// Makes a symbolic link. Returns true if it is new.
pub fn make_link(text: &CStr, path: &CStr) -> bool {
    let (text, path) = (address(text.as_ptr()), address(path.as_ptr()));
    // SAFETY: both end with a zero.
    unsafe { call(number::SYMLINKAT, [text, AT_FDCWD.into(), path, 0]) == 0 }
}

/// Removes a symbolic link.
pub fn remove_link(path: &CStr) {
    let path = address(path.as_ptr());
    // SAFETY: it ends with a zero.
    unsafe { call(number::UNLINKAT, [AT_FDCWD.into(), path, 0, 0]) };
}

/// Returns the time since the machine's start in nanoseconds.
pub fn now_ns() -> u64 {
    let mut time = [0_i64; 2];
    let arguments = [CLOCK_MONOTONIC, address(time.as_mut_ptr()), 0, 0];
    // SAFETY: there is room for a timespec of the two supported machines.
    unsafe { call(number::CLOCK_GETTIME, arguments) };
    let [seconds, rest] = time.map(i64::cast_unsigned);
    seconds * 1_000_000_000 + rest
}

fn size(bytes: &[u8]) -> c_long {
    bytes.len().cast_signed() as c_long
}

fn address<T>(pointer: *const T) -> c_long {
    pointer.expose_provenance().cast_signed() as c_long
}

/// # Safety
/// As the call demands.
unsafe fn call(number: c_long, arguments: [c_long; 4]) -> c_long {
    let result: c_long;
    #[cfg(target_arch = "x86_64")]
    // SAFETY: the kernel's convention; by the contract above.
    unsafe {
        asm!(
            "syscall",
            inlateout("rax") number => result,
            in("rdi") arguments[0], in("rsi") arguments[1], in("rdx") arguments[2], in("r10") arguments[3],
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
            in("x1") arguments[1], in("x2") arguments[2], in("x3") arguments[3],
            options(nostack),
        );
    }
    result
}
