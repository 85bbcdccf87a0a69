#![allow(unsafe_code, reason = "called by CRIU through C")]
//! Functions that replace those of the C library in a dumping CRIU, into which the supervisor preloads this library.
//!
//! ```text
//! syscall(prlimit64)   limits of another user's process, without CAP_SYS_RESOURCE → /proc/PID/limits
//! linkat, unlinkat     the folder of the name is opened without following links, and then used
//! ptrace, fork         `late_signals`
//! recvmsg              `messages`
//! ```
//! CRIU creates hard links (`link_remap.N`) for open files whose names were removed, in their former folders. The job's
//! user may replace such a folder by a link at the same time.

use core::ffi::{CStr, c_char, c_int, c_long, c_void};
use core::sync::atomic::{AtomicBool, Ordering};

use super::kernel::{O_CLOEXEC, close, open, read_some, variable};
use super::late_signals::{self, PEEK_SIGNALS, Peek, note_seen};
use super::question::{ACTION, AT_END};
use super::system_call::{address, system_call};
use super::tracing::{PTRACE, PTRACE_INTERRUPT};

/// Size limit of `/proc/PID/limits`, which has 17 lines of 80 bytes.
const LIMITS_BYTES_MAX: usize = 4096;
/// Column of the first limit in a line. The second limit is 21 columns further.
const FIRST_COLUMN: usize = 26;
const INFINITY: u64 = u64::MAX;
/// Longest path.
const PATH_BYTES_MAX: usize = 4096;

const EPERM: c_long = 1;
const O_RDONLY: c_int = 0;
const O_PATH: u64 = 0o10_000_000;
const O_DIRECTORY: u64 = 0o200_000;
const RESOLVE_NO_SYMLINKS: u64 = 4;

#[cfg(target_arch = "x86_64")]
mod number {
    use core::ffi::c_long;
    pub const LINKAT: c_long = 265;
    pub const UNLINKAT: c_long = 263;
    pub const PRLIMIT64: c_long = 302;
}
#[cfg(target_arch = "aarch64")]
mod number {
    use core::ffi::c_long;
    pub const LINKAT: c_long = 37;
    pub const UNLINKAT: c_long = 35;
    pub const PRLIMIT64: c_long = 261;
}
/// Number of `openat2`, the same on every machine.
const OPENAT2: c_long = 437;

// Of the C library that CRIU runs with; none is linked.
unsafe extern "C" {
    fn __errno_location() -> *mut c_int;
    fn dlsym(library: *mut c_void, name: *const c_char) -> *mut c_void;
}

/// `struct rlimit64`.
#[repr(C)]
struct Limit {
    soft: u64,
    hard: u64,
}

/// `struct open_how`.
#[repr(C)]
struct OpenHow {
    flags: u64,
    mode: u64,
    resolve: u64,
}

/// Makes any system call, like the function of the C library.
///
/// # Safety
/// As the call demands. The callers pass as many arguments as the call has; what is passed on beyond them is ignored.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn syscall(
    number: c_long,
    first: c_long,
    second: c_long,
    third: c_long,
    fourth: c_long,
    fifth: c_long,
    sixth: c_long,
) -> c_long {
    let arguments = [first, second, third, fourth, fifth, sixth];
    // SAFETY: by the contract above.
    let result = unsafe { system_call(number, arguments) };
    let is_question = number == number::PRLIMIT64 && third == 0 && fourth != 0;
    if result == -EPERM
        && is_question
        && let Some(limit) = limit_of(first, second)
    {
        #[allow(clippy::cast_possible_truncation, reason = "an address")]
        let into: *mut Limit =
            core::ptr::with_exposed_provenance_mut(fourth.cast_unsigned() as usize);
        // SAFETY: the kernel would have written there.
        unsafe { into.write(limit) };
        return 0;
    }
    as_library(result)
}

/// Creates a hard link like the function of the C library, but follows no link on the path of the new name.
///
/// # Safety
/// Both paths end with a zero.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn linkat(
    old_folder: c_int,
    old: *const c_char,
    folder: c_int,
    new: *const c_char,
    flags: c_int,
) -> c_int {
    // SAFETY: by the contract above.
    let new = unsafe { CStr::from_ptr(new) };
    in_folder(folder, new, |folder, name| {
        let (old_folder, old) = (old_folder.into(), address(old));
        let arguments = [old_folder, old, folder.into(), name, flags.into(), 0];
        // SAFETY: all paths end with zeros.
        unsafe { system_call(number::LINKAT, arguments) }
    })
}

/// Removes a name like the function of the C library, but follows no link on its path.
///
/// # Safety
/// The path ends with a zero.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn unlinkat(folder: c_int, path: *const c_char, flags: c_int) -> c_int {
    // SAFETY: by the contract above.
    let path = unsafe { CStr::from_ptr(path) };
    in_folder(folder, path, |folder, name| {
        let arguments = [folder.into(), name, flags.into(), 0, 0, 0];
        // SAFETY: the path ends with a zero.
        unsafe { system_call(number::UNLINKAT, arguments) }
    })
}

/// Traces like the function of the C library, and notes what CRIU sees.
///
/// # Safety
/// The arguments are valid for the request.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ptrace(
    request: c_int,
    thread: c_int,
    place: c_long,
    data: c_long,
) -> c_long {
    let mut word: c_long = 0;
    let is_peek = PEEKS.contains(&request);
    let into = if is_peek {
        address(&raw mut word)
    } else {
        data
    };
    let arguments = [request.into(), thread.into(), place, into, 0, 0];
    // SAFETY: by the contract above; a peek writes a word.
    let result = unsafe { system_call(PTRACE, arguments) };
    if c_long::from(request) == PEEK_SIGNALS && result > 0 {
        #[allow(clippy::cast_possible_truncation, reason = "an address")]
        let peek: *const Peek = core::ptr::with_exposed_provenance(place.cast_unsigned() as usize);
        // SAFETY: the kernel has read it.
        note_seen(thread, unsafe { &*peek }, result);
    }
    if request == PTRACE_INTERRUPT && result == 0 {
        late_signals::note_timers(thread);
    }
    let result = as_library(result);
    if is_peek && result == 0 {
        // SAFETY: takes nothing, and returns the address of this thread's variable, which is valid as long as the thread.
        unsafe { __errno_location().write(0) };
        return word;
    }
    result
}

/// Makes a child like the function of the C library. Before the child that is CRIU's action script at the end of a dump, saves
/// late signals.
///
/// # Safety
/// See the C library's function.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn fork() -> c_int {
    static SAVED: AtomicBool = AtomicBool::new(false);
    let is_at_end = variable(ACTION).is_some_and(|action| action.to_bytes() == AT_END);
    if is_at_end && !SAVED.swap(true, Ordering::Relaxed) {
        late_signals::save();
    }
    let next = next_of(c"fork");
    if next.is_null() {
        return short(as_library(-38)); // ENOSYS
    }
    // SAFETY: the C library's function.
    unsafe { core::mem::transmute::<*mut c_void, unsafe extern "C" fn() -> c_int>(next)() }
}

/// Returns the function of the C library that one here replaces; null if there is none.
pub fn next_of(name: &CStr) -> *mut c_void {
    // SAFETY: the name ends with a zero.
    unsafe { dlsym(NEXT, name.as_ptr()) }
}

/// Requests that return a word: `PTRACE_PEEKTEXT`, `PTRACE_PEEKDATA`, `PTRACE_PEEKUSER`.
const PEEKS: [c_int; 3] = [1, 2, 3];
/// `RTLD_NEXT`.
const NEXT: *mut c_void = core::ptr::without_provenance_mut(usize::MAX);

/// Opens the folder of a path without following links, and acts on the name in it.
fn in_folder(folder: c_int, path: &CStr, act: impl FnOnce(c_int, c_long) -> c_long) -> c_int {
    let bytes = path.to_bytes();
    let Some(slash) = bytes.iter().rposition(|byte| *byte == b'/') else {
        return short(as_library(act(folder, address(path.as_ptr()))));
    };
    let mut parent = [0_u8; PATH_BYTES_MAX];
    let len = slash.max(1);
    if len >= PATH_BYTES_MAX {
        return short(as_library(-36)); // ENAMETOOLONG
    }
    parent[..len].copy_from_slice(&bytes[..len]);
    let how = OpenHow {
        flags: O_PATH | O_DIRECTORY | u64::from(O_CLOEXEC.cast_unsigned()),
        mode: 0,
        resolve: RESOLVE_NO_SYMLINKS,
    };
    let arguments = [
        folder.into(),
        address(parent.as_ptr()),
        address(&raw const how),
        size_of::<OpenHow>().cast_signed() as c_long,
        0,
        0,
    ];
    // SAFETY: the path ends with a zero, and the structure is as large as is said.
    let opened = unsafe { system_call(OPENAT2, arguments) };
    if opened < 0 {
        return short(as_library(opened));
    }
    let opened = short(opened);
    let result = act(opened, address(bytes[slash + 1..].as_ptr()));
    // SAFETY: nobody else has it.
    unsafe { close(opened) };
    short(as_library(result))
}

/// Returns a descriptor or a result of 0 and -1.
#[allow(
    clippy::cast_possible_truncation,
    reason = "descriptors are numbers of an int"
)]
fn short(result: c_long) -> c_int {
    result as c_int
}

/// Reads a limit of a process from `/proc`, which is readable by all users.
fn limit_of(pid: c_long, resource: c_long) -> Option<Limit> {
    let mut path = [0_u8; 40];
    let path = limits_path(pid, &mut path)?;
    let mut text = [0_u8; LIMITS_BYTES_MAX];
    // SAFETY: the path ends with a zero; without O_CREAT there is no third argument.
    let file = unsafe { open(path.as_ptr(), O_RDONLY | O_CLOEXEC) };
    if file < 0 {
        return None;
    }
    let len = read_some(file, &mut text);
    // SAFETY: nobody else has it.
    unsafe { close(file) };
    let text = text.get(..len.ok()?)?;
    find_limit(text, usize::try_from(resource).ok()?)
}

fn limits_path(pid: c_long, into: &mut [u8; 40]) -> Option<&CStr> {
    let mut digits = [0_u8; 20];
    let (mut left, mut at) = (u64::try_from(pid).ok()?, digits.len());
    loop {
        at -= 1;
        digits[at] = b'0' + u8::try_from(left % 10).ok()?;
        left /= 10;
        if left == 0 {
            break;
        }
    }
    let mut len = 0;
    for part in [&b"/proc/"[..], &digits[at..], b"/limits"] {
        into.get_mut(len..len + part.len())?.copy_from_slice(part);
        len += part.len();
    }
    CStr::from_bytes_until_nul(into).ok()
}

/// Finds a limit in the text. Line 0 is the heading, and the other lines are in the order of the resources' numbers.
fn find_limit(text: &[u8], resource: usize) -> Option<Limit> {
    let line = text.split(|byte| *byte == b'\n').nth(resource + 1)?;
    let values = line.get(FIRST_COLUMN..)?;
    let mut values = values
        .split(|byte| *byte == b' ')
        .filter(|it| !it.is_empty());
    Some(Limit {
        soft: value(values.next()?)?,
        hard: value(values.next()?)?,
    })
}

fn value(word: &[u8]) -> Option<u64> {
    if word == b"unlimited" {
        return Some(INFINITY);
    }
    core::str::from_utf8(word).ok()?.parse().ok()
}

/// Returns the result of a system call in the form of the C library, and sets `errno` after an error.
pub fn as_library(result: c_long) -> c_long {
    if !(-4095..0).contains(&result) {
        return result;
    }
    // SAFETY: takes nothing, and returns the address of this thread's variable.
    let errno = unsafe { __errno_location() };
    #[allow(clippy::cast_possible_truncation, reason = "below 4096")]
    // SAFETY: that address is valid as long as the thread.
    unsafe {
        errno.write(-result as c_int);
    }
    -1
}
