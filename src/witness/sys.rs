//! System calls, made without the C library: they leave `errno` alone, and are safe in a signal handler and after vfork.

use core::ffi::{CStr, c_char, c_int, c_long, c_void};

use super::system_call::{AT_FDCWD, address, system_call};

const CLOCK_MONOTONIC: c_long = 1;

#[cfg(target_arch = "x86_64")]
mod number {
    use core::ffi::c_long;
    pub const CLOSE: c_long = 3;
    pub const GETCWD: c_long = 79;
    pub const CLOCK_GETTIME: c_long = 228;
    pub const OPENAT: c_long = 257;
    pub const UNLINKAT: c_long = 263;
    pub const SYMLINKAT: c_long = 266;
    pub const FACCESSAT: c_long = 269;
    pub const STATX: c_long = 332;
}
#[cfg(target_arch = "aarch64")]
mod number {
    use core::ffi::c_long;
    pub const CLOSE: c_long = 57;
    pub const GETCWD: c_long = 17;
    pub const CLOCK_GETTIME: c_long = 113;
    pub const OPENAT: c_long = 56;
    pub const UNLINKAT: c_long = 35;
    pub const SYMLINKAT: c_long = 36;
    pub const FACCESSAT: c_long = 48;
    pub const STATX: c_long = 291;
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
    match unsafe {
        system_call(
            number::FACCESSAT,
            [folder.into(), address(path), 0, 0, 0, 0],
        )
    } {
        0 => Some(true),
        result if result == -ENOENT => Some(false),
        _ => None,
    }
}

/// The kernel's `struct statx` (`linux/stat.h`), as far as it is read.
#[repr(C)]
#[derive(Default)]
struct Statx {
    mask: u32,
    _before_inode: [u32; 7],
    inode: u64,
    _before_birth: [u64; 5],
    birth_seconds: i64,
    birth_nanoseconds: u32,
    _before_device: [u32; 11],
    device_major: u32,
    device_minor: u32,
    _rest: [u64; 14],
}
const _: () = assert!(size_of::<Statx>() == 256);

/// Returns what identifies the file at a path for ever: its device, its inode, and the time of its creation in nanoseconds;
/// `None` if the file system does not know them.
pub fn identity(folder: c_int, path: *const c_char) -> Option<[u64; 3]> {
    const INODE_AND_BIRTH: u32 = 0x100 | 0x800;
    let mut found = Statx::default();
    let (mask, into) = (c_long::from(INODE_AND_BIRTH), address(&raw mut found));
    let arguments = [folder.into(), address(path), 0, mask, into, 0];
    // SAFETY: there is room for the result, and the kernel reports an address of the path that cannot be read.
    let result = unsafe { system_call(number::STATX, arguments) };
    if result != 0 || found.mask & INODE_AND_BIRTH != INODE_AND_BIRTH {
        return None;
    }
    let device = u64::from(found.device_major) << 32 | u64::from(found.device_minor);
    let seconds = found.birth_seconds.cast_unsigned();
    let birth = seconds
        .wrapping_mul(1_000_000_000)
        .wrapping_add(found.birth_nanoseconds.into());
    Some([device, found.inode, birth])
}

/// Opens a path without access to its content, and calls `act` with the descriptor.
pub fn with_opened<T>(folder: c_int, path: &CStr, act: impl FnOnce(c_int) -> T) -> Option<T> {
    const O_PATH: c_long = 0o10_000_000;
    const O_CLOEXEC: c_long = 0o2_000_000;
    let path = address(path.as_ptr());
    let arguments = [folder.into(), path, O_PATH | O_CLOEXEC, 0, 0, 0];
    // SAFETY: the path ends with a zero.
    let opened = unsafe { system_call(number::OPENAT, arguments) };
    let opened = c_int::try_from(opened).ok().filter(|opened| *opened >= 0)?;
    let done = act(opened);
    // SAFETY: opened here.
    unsafe { system_call(number::CLOSE, [opened.into(), 0, 0, 0, 0, 0]) };
    Some(done)
}

/// Writes the working folder's path and a zero. Returns the length without the zero; `None` also if it does not fit.
pub fn working_folder(into: &mut [u8]) -> Option<usize> {
    let arguments = [address(into.as_mut_ptr()), size(into), 0, 0, 0, 0];
    // SAFETY: the kernel writes at most so many bytes.
    let len = unsafe { system_call(number::GETCWD, arguments) };
    usize::try_from(len).ok()?.checked_sub(1)
}

/// Makes a symbolic link. Returns true if it is new.
pub fn make_link(text: &CStr, path: &CStr) -> bool {
    let (text, path) = (address(text.as_ptr()), address(path.as_ptr()));
    // SAFETY: both end with a zero.
    unsafe { system_call(number::SYMLINKAT, [text, AT_FDCWD.into(), path, 0, 0, 0]) == 0 }
}

/// Removes a symbolic link.
pub fn remove_link(path: &CStr) {
    let path = address(path.as_ptr());
    // SAFETY: it ends with a zero.
    unsafe { system_call(number::UNLINKAT, [AT_FDCWD.into(), path, 0, 0, 0, 0]) };
}

/// Returns the job's monotonic clock in nanoseconds.
pub fn now_ns() -> u64 {
    let mut time = [0_i64; 2];
    let arguments = [CLOCK_MONOTONIC, address(time.as_mut_ptr()), 0, 0, 0, 0];
    // SAFETY: there is room for a timespec of the two supported machines.
    unsafe { system_call(number::CLOCK_GETTIME, arguments) };
    let [seconds, rest] = time.map(i64::cast_unsigned);
    seconds * 1_000_000_000 + rest
}

fn size(bytes: &[u8]) -> c_long {
    bytes.len().cast_signed() as c_long
}
