//! Calls to the C library and the kernel. The driver is not called here.
//!
//! Only functions of the main library of every glibc and of musl are referenced here, without symbol versions.
//! Functions that were in `libdl` or `libpthread` before glibc 2.34 are looked up by `elf` when needed.

use core::ffi::{c_char, c_int, c_long, c_uint, c_void};
use core::ptr;

/// `struct iovec`.
#[repr(C)]
pub struct Piece {
    pub start: *mut c_void,
    pub len: usize,
}

impl Piece {
    /// Returns the bytes of a value, for reading only.
    pub fn of<T>(value: &T) -> Self {
        Self {
            start: (&raw const *value).cast_mut().cast(),
            len: size_of::<T>(),
        }
    }
}

/// `struct msghdr`. musl has 32-bit lengths with padding instead of the 64-bit lengths, which is equivalent on little
/// endian.
#[repr(C)]
pub struct Message {
    pub name: *mut c_void,
    pub name_len: c_uint,
    pub pieces: *mut Piece,
    pub pieces_len: usize,
    pub control: *mut c_void,
    pub control_len: usize,
    pub flags: c_int,
}

/// `struct cmsghdr`.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct ControlHead {
    pub len: usize,
    pub level: c_int,
    pub kind: c_int,
}

/// `struct ucred`.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct Credentials {
    pub pid: c_int,
    pub uid: c_uint,
    pub gid: c_uint,
}

/// `struct sockaddr_un`.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct Address {
    pub family: u16,
    pub path: [u8; 108],
}

/// `struct rlimit`.
#[repr(C)]
pub struct Limit {
    pub soft: u64,
    pub hard: u64,
}

const _: () = assert!(size_of::<Message>() == 56);
const _: () = assert!(size_of::<ControlHead>() == 16);
const _: () = assert!(size_of::<Address>() == ADDRESS_LEN as usize);

pub const AF_UNIX: c_int = 1;
/// Length of an [`Address`].
pub const ADDRESS_LEN: c_uint = 110;
pub const SOCK_DGRAM: c_int = 2;
pub const SOCK_CLOEXEC: c_int = 0o2_000_000;
pub const SOL_SOCKET: c_int = 1;
pub const SO_PASSCRED: c_int = 16;
pub const SO_RCVTIMEO: c_int = 20;
pub const SO_SNDTIMEO: c_int = 21;
pub const SCM_RIGHTS: c_int = 1;
pub const SCM_CREDENTIALS: c_int = 2;
pub const MSG_CTRUNC: c_int = 0x8;
pub const MSG_TRUNC: c_int = 0x20;
pub const MSG_NOSIGNAL: c_int = 0x4000;
pub const MSG_CMSG_CLOEXEC: c_int = 0x4000_0000;
pub const RLIMIT_NOFILE: c_int = 7;

pub const EINTR: c_int = 4;
pub const ETOOMANYREFS: c_int = 109;

const F_DUPFD_CLOEXEC: c_int = 1030;
const FUTEX_WAIT_PRIVATE: c_long = 128;
const FUTEX_WAKE_PRIVATE: c_long = 129;
const SIG_SETMASK: c_long = 2;
const PR_SET_NAME: c_int = 15;

#[cfg(target_arch = "x86_64")]
mod number {
    use core::ffi::c_long;
    pub const FUTEX: c_long = 202;
    pub const RT_SIGPROCMASK: c_long = 14;
    pub const GETTID: c_long = 186;
    pub const NANOSLEEP: c_long = 35;
}
#[cfg(target_arch = "aarch64")]
mod number {
    use core::ffi::c_long;
    pub const FUTEX: c_long = 98;
    pub const RT_SIGPROCMASK: c_long = 135;
    pub const GETTID: c_long = 178;
    pub const NANOSLEEP: c_long = 101;
}

unsafe extern "C" {
    pub fn getenv(name: *const c_char) -> *const c_char;
    pub fn getpid() -> c_int;
    pub fn geteuid() -> c_uint;
    pub fn abort() -> !;
    pub fn close(descriptor: c_int) -> c_int;
    pub fn socket(family: c_int, kind: c_int, protocol: c_int) -> c_int;
    pub fn bind(socket: c_int, address: *const Address, len: c_uint) -> c_int;
    pub fn setsockopt(
        socket: c_int,
        level: c_int,
        option: c_int,
        value: *const c_void,
        len: c_uint,
    ) -> c_int;
    pub fn sendmsg(socket: c_int, message: *const Message, flags: c_int) -> isize;
    pub fn recvmsg(socket: c_int, message: *mut Message, flags: c_int) -> isize;
    fn gettimeofday(time: *mut i64, zone: *mut c_void) -> c_int;
    pub fn getrlimit(resource: c_int, limit: *mut Limit) -> c_int;
    pub fn setrlimit(resource: c_int, limit: *const Limit) -> c_int;
    pub fn dl_iterate_phdr(
        callback: unsafe extern "C" fn(*const c_void, usize, *mut c_void) -> c_int,
        data: *mut c_void,
    ) -> c_int;
    fn fcntl(descriptor: c_int, command: c_int, ...) -> c_int;
    fn prctl(option: c_int, ...) -> c_int;
    fn syscall(number: c_long, ...) -> c_long;
    fn __errno_location() -> *mut c_int;
}

/// Returns the error number of the last call in this thread.
pub fn errno() -> c_int {
    // SAFETY: the C library provides this location for every thread.
    unsafe { *__errno_location() }
}

/// Sleeps until `word` is woken; returns at once if it is not `expected`. May wake spuriously.
pub fn futex_wait(word: *const u32, expected: u32) {
    let forever = ptr::null::<c_void>();
    // SAFETY: the kernel only reads the word, and reports an invalid address.
    unsafe { syscall(number::FUTEX, word, FUTEX_WAIT_PRIVATE, expected, forever) };
}

/// Wakes one thread that sleeps on `word`.
pub fn futex_wake(word: *const u32) {
    // SAFETY: the address is only looked up, not read.
    unsafe { syscall(number::FUTEX, word, FUTEX_WAKE_PRIVATE, 1) };
}

/// Returns this thread's id in the process's own namespace.
pub fn thread() -> c_int {
    // SAFETY: has no arguments.
    let thread = unsafe { syscall(number::GETTID) };
    c_int::try_from(thread).unwrap_or(0)
}

/// Sets the signals that are blocked in this thread; returns the previous mask.
pub fn block_signals(mask: u64) -> u64 {
    let mut before = 0u64;
    let set = &raw const mask;
    // SAFETY: both masks have the kernel's 8 bytes. The C library's own function would leave out its internal signals.
    unsafe {
        syscall(
            number::RT_SIGPROCMASK,
            SIG_SETMASK,
            set,
            &raw mut before,
            8usize,
        )
    };
    before
}

/// Names this thread; at most 15 bytes and a zero.
pub fn name_thread(name: &core::ffi::CStr) {
    // SAFETY: reads up to the zero.
    unsafe { prctl(PR_SET_NAME, name.as_ptr()) };
}

/// Duplicates the descriptor at the lowest free number from `number`, closed on exec; returns a negative value if there
/// is none.
pub fn duplicate_from(descriptor: c_int, number: c_int) -> c_int {
    // SAFETY: F_DUPFD_CLOEXEC takes an int.
    unsafe { fcntl(descriptor, F_DUPFD_CLOEXEC, number) }
}

/// Returns the time in microseconds since the epoch; never 0.
pub fn microseconds() -> u64 {
    let mut time = [0i64; 2];
    // SAFETY: there is room for a timeval of the two supported machines.
    unsafe { gettimeofday(time.as_mut_ptr(), ptr::null_mut()) };
    let [seconds, rest] = time.map(|part| u64::try_from(part).unwrap_or(0));
    (seconds * 1_000_000 + rest).max(1)
}

/// Waits a moment, for resources whose release by the kernel cannot be awaited.
pub fn pause_ms(ms: u32) {
    let time = [0i64, i64::from(ms) * 1_000_000];
    // SAFETY: a timespec of the two supported machines; the rest is not written.
    unsafe { syscall(number::NANOSLEEP, time.as_ptr(), ptr::null::<c_void>()) };
}
