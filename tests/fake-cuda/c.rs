//! System calls that the standard library lacks, and C's out parameters.

use std::ffi::{c_int, c_long, c_void};
use std::fs::File;
use std::os::fd::AsRawFd;
use std::sync::atomic::AtomicU32;
use std::time::Duration;

use super::code::{Answer, Code, INVALID_VALUE, OUT_OF_MEMORY};

/// Length of a page, and of the smallest piece of device memory.
pub const PAGE: u64 = 4096;

const PROT_NONE: c_int = 0;
const PROT_READ: c_int = 1;
const PROT_BOTH: c_int = 3;
const MAP_SHARED: c_int = 1;
const MAP_PRIVATE: c_int = 2;
const MAP_FIXED: c_int = 0x10;
const MAP_ANONYMOUS: c_int = 0x20;
const MAP_NORESERVE: c_int = 0x4000;
const MADV_DONTFORK: c_int = 10;
const LOCK_SH: c_int = 1;
const LOCK_EX: c_int = 2;
const LOCK_NB: c_int = 4;
const SIG_SETMASK: c_int = 2;
const FUTEX_WAIT_PRIVATE: c_long = 128;
const FUTEX_WAKE_PRIVATE: c_long = 129;
#[cfg(target_arch = "x86_64")]
const SYS_FUTEX: c_long = 202;
#[cfg(not(target_arch = "x86_64"))]
const SYS_FUTEX: c_long = 98;

#[repr(C)]
struct Timespec {
    seconds: i64,
    nanoseconds: i64,
}

unsafe extern "C" {
    fn mmap(
        at: *mut c_void,
        len: usize,
        access: c_int,
        flags: c_int,
        fd: c_int,
        offset: i64,
    ) -> *mut c_void;
    fn munmap(at: *mut c_void, len: usize) -> c_int;
    fn mprotect(at: *mut c_void, len: usize, access: c_int) -> c_int;
    fn madvise(at: *mut c_void, len: usize, advice: c_int) -> c_int;
    fn flock(fd: c_int, operation: c_int) -> c_int;
    fn syscall(number: c_long, ...) -> c_long;
    fn sigfillset(set: *mut [u64; 16]) -> c_int;
    fn pthread_sigmask(how: c_int, set: *const [u64; 16], old: *mut [u64; 16]) -> c_int;
    pub fn gettid() -> c_int;
}

/// Access to a mapping.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Access {
    None,
    Read,
    Both,
}

impl Access {
    const fn bits(self) -> c_int {
        match self {
            Self::None => PROT_NONE,
            Self::Read => PROT_READ,
            Self::Both => PROT_BOTH,
        }
    }
}

/// Writes a C out parameter; null is an error.
pub fn give<T>(at: *mut T, value: T) -> Answer {
    if at.is_null() {
        return Err(INVALID_VALUE);
    }
    // SAFETY: the caller of the C function guarantees room for one value.
    unsafe { at.write(value) };
    Ok(())
}

/// Writes a C out parameter that may be null.
pub fn give_if_asked<T>(at: *mut T, value: T) {
    if !at.is_null() {
        // SAFETY: as above.
        unsafe { at.write(value) };
    }
}

/// Reads a value through a C pointer; null is an error.
pub fn read<T: Copy>(at: *const T) -> Result<T, Code> {
    if at.is_null() {
        return Err(INVALID_VALUE);
    }
    // SAFETY: the caller of the C function guarantees a value there.
    Ok(unsafe { at.read() })
}

/// Reserves addresses without memory: at `hint` if they are free, else at a multiple of `alignment`.
pub fn reserve(len: u64, alignment: u64, hint: u64) -> Result<u64, Code> {
    let whole = len.checked_add(alignment).ok_or(INVALID_VALUE)?;
    if hint != 0 {
        let at = anonymous(hint, len, PROT_NONE, 0)?;
        if at == hint {
            return Ok(at);
        }
        unmap(at, len);
    }
    let at = anonymous(0, whole, PROT_NONE, 0)?;
    let aligned = at.next_multiple_of(alignment);
    if aligned > at {
        unmap(at, aligned - at);
    }
    let end = aligned + len;
    if at + whole > end {
        unmap(end, at + whole - end);
    }
    Ok(aligned)
}

/// Allocates zeroed host memory.
pub fn host_memory(len: u64) -> Result<u64, Code> {
    anonymous(0, len, PROT_BOTH, 0)
}

/// Unmaps memory and keeps the addresses reserved.
pub fn vacate(at: u64, len: u64) -> Answer {
    anonymous(at, len, PROT_NONE, MAP_FIXED).map(|_| ())
}

fn anonymous(at: u64, len: u64, access: c_int, flags: c_int) -> Result<u64, Code> {
    let flags = flags | MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    // SAFETY: with MAP_FIXED, `at` is a reservation of this library; otherwise no existing mapping is affected.
    let mapped = unsafe { mmap(at as *mut c_void, len as usize, access, flags, -1, 0) };
    mapped_at(mapped)
}

/// Maps a file, over the reservation `at` if there is one. A forked child does not inherit the mapping.
pub fn map_file(at: Option<u64>, len: u64, file: &File, access: Access) -> Result<u64, Code> {
    let flags = MAP_SHARED | at.map_or(0, |_| MAP_FIXED);
    let address = at.unwrap_or(0) as *mut c_void;
    // SAFETY: with MAP_FIXED, `at` is a reservation of this library; otherwise no existing mapping is affected.
    let mapped = unsafe {
        mmap(
            address,
            len as usize,
            access.bits(),
            flags,
            file.as_raw_fd(),
            0,
        )
    };
    let at = mapped_at(mapped)?;
    // SAFETY: mapped above; affects forks only.
    unsafe { madvise(mapped, len as usize, MADV_DONTFORK) };
    Ok(at)
}

fn mapped_at(mapped: *mut c_void) -> Result<u64, Code> {
    if mapped as isize == -1 {
        Err(OUT_OF_MEMORY)
    } else {
        Ok(mapped as u64)
    }
}

pub fn set_access(at: u64, len: u64, access: Access) {
    // SAFETY: a mapping of this library, of device memory that only copies access.
    unsafe { mprotect(at as *mut c_void, len as usize, access.bits()) };
}

pub fn unmap(at: u64, len: u64) {
    // SAFETY: a mapping of this library that is no longer used.
    unsafe { munmap(at as *mut c_void, len as usize) };
}

/// Mode of an `flock`.
#[derive(Clone, Copy)]
pub enum Flock {
    /// Exclusive; waits.
    Exclusive,
    /// Shared; waits. The lock belongs to the open file and ends with its last descriptor and mapping, in any process.
    Shared,
    /// Exclusive; does not wait.
    TryExclusive,
}

/// Locks a file; returns true on success.
pub fn lock_file(file: &File, how: Flock) -> bool {
    let operation = match how {
        Flock::Exclusive => LOCK_EX,
        Flock::Shared => LOCK_SH,
        Flock::TryExclusive => LOCK_EX | LOCK_NB,
    };
    // SAFETY: an open descriptor.
    unsafe { flock(file.as_raw_fd(), operation) == 0 }
}

/// Sleeps while `word` is `expected`, up to the timeout. May wake spuriously.
pub fn futex_wait(word: &AtomicU32, expected: u32, timeout: Option<Duration>) {
    let time = timeout.map(|timeout| Timespec {
        seconds: timeout.as_secs() as i64,
        nanoseconds: i64::from(timeout.subsec_nanos()),
    });
    let time = time.as_ref().map_or(std::ptr::null(), std::ptr::from_ref);
    // SAFETY: the word and the time outlive the call.
    unsafe { syscall(SYS_FUTEX, word.as_ptr(), FUTEX_WAIT_PRIVATE, expected, time) };
}

pub fn futex_wake_all(word: &AtomicU32) {
    // SAFETY: only the address is used.
    unsafe { syscall(SYS_FUTEX, word.as_ptr(), FUTEX_WAKE_PRIVATE, c_int::MAX) };
}

/// Runs `body` with all signals blocked; threads that it starts inherit the mask.
pub fn without_signals<T>(body: impl FnOnce() -> T) -> T {
    let (mut all, mut old) = ([0; 16], [0; 16]);
    // SAFETY: 128 bytes, the size of glibc's sigset_t.
    unsafe { sigfillset(&raw mut all) };
    // SAFETY: as above.
    unsafe { pthread_sigmask(SIG_SETMASK, &raw const all, &raw mut old) };
    let result = body();
    // SAFETY: as above.
    unsafe { pthread_sigmask(SIG_SETMASK, &raw const old, std::ptr::null_mut()) };
    result
}
