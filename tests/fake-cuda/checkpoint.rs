//! The `cuCheckpointProcess...` functions, for a program that suspends others. They do not need `cuInit`.

use std::ffi::{c_int, c_uint};
use std::fs;

use super::c::{give, read};
use super::code::{Code, INVALID_VALUE, OPERATING_SYSTEM};
use super::faults;
use super::link::{PAIRS_MAX, Pair, Request, Verb, ask, inner_id};

/// `CUcheckpointLockArgs`.
#[repr(C)]
#[derive(Clone, Copy)]
struct LockArguments {
    timeout_ms: c_uint,
    reserved: [c_uint; 15],
}

/// `CUcheckpointCheckpointArgs` and `CUcheckpointUnlockArgs`.
type Reserved = [u64; 8];

/// `CUcheckpointRestoreArgs`.
#[repr(C)]
#[derive(Clone, Copy)]
struct RestoreArguments {
    pairs: *const Pair,
    count: c_uint,
    reserved: [c_uint; 13],
}

const _: () = assert!(size_of::<LockArguments>() == 64);
const _: () = assert!(size_of::<RestoreArguments>() == 64);

/// Returns the code of a call that a test can make fail.
fn called(name: &str, work: impl FnOnce() -> Result<(), Code>) -> c_int {
    faults::meet(name).and_then(|()| work()).err().unwrap_or(0)
}

fn ask_only(pid: c_int, request: &Request) -> Result<(), Code> {
    ask(pid, request).map(|_| ())
}

/// Checks the reserved arguments, which must be zero; null is equivalent.
fn check(arguments: *const Reserved) -> Result<(), Code> {
    if arguments.is_null() || read(arguments)? == [0; 8] {
        Ok(())
    } else {
        Err(INVALID_VALUE)
    }
}

#[unsafe(no_mangle)]
extern "C" fn cuCheckpointProcessGetState(pid: c_int, state: *mut c_int) -> c_int {
    called("cuCheckpointProcessGetState", || {
        give(state, ask(pid, &Request::of(Verb::State))?)
    })
}

/// Returns the thread's id in the caller's namespace.
#[unsafe(no_mangle)]
extern "C" fn cuCheckpointProcessGetRestoreThreadId(pid: c_int, thread: *mut c_int) -> c_int {
    called("cuCheckpointProcessGetRestoreThreadId", || {
        let inner = ask(pid, &Request::of(Verb::Thread))?.to_string();
        let tasks = fs::read_dir(format!("/proc/{pid}/task")).map_err(|_| OPERATING_SYSTEM)?;
        let found = tasks.flatten().find_map(|task| {
            let status = fs::read_to_string(task.path().join("status")).ok()?;
            (inner_id(&status) == Some(&inner)).then(|| task.file_name().to_str()?.parse().ok())?
        });
        give(thread, found.ok_or(OPERATING_SYSTEM)?)
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuCheckpointProcessLock(pid: c_int, arguments: *const LockArguments) -> c_int {
    called("cuCheckpointProcessLock", || {
        let mut request = Request::of(Verb::Lock);
        if !arguments.is_null() {
            let arguments = read(arguments)?;
            if arguments.reserved != [0; 15] {
                return Err(INVALID_VALUE);
            }
            request.timeout_ms = arguments.timeout_ms;
        }
        ask_only(pid, &request)
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuCheckpointProcessCheckpoint(pid: c_int, arguments: *const Reserved) -> c_int {
    called("cuCheckpointProcessCheckpoint", || {
        check(arguments)?;
        ask_only(pid, &Request::of(Verb::Checkpoint))
    })
}

#[unsafe(no_mangle)]
extern "C" fn cuCheckpointProcessRestore(pid: c_int, arguments: *const RestoreArguments) -> c_int {
    called("cuCheckpointProcessRestore", || {
        let mut request = Request::of(Verb::Restore);
        if !arguments.is_null() {
            request.pairs = pairs(&read(arguments)?)?;
        }
        ask_only(pid, &request)
    })
}

fn pairs(arguments: &RestoreArguments) -> Result<Vec<Pair>, Code> {
    let count = arguments.count as usize;
    if arguments.reserved != [0; 13]
        || count > PAIRS_MAX
        || (count > 0) == arguments.pairs.is_null()
    {
        return Err(INVALID_VALUE);
    }
    // SAFETY: the caller guarantees the counted number of pairs, which are plain bytes.
    (0..count)
        .map(|number| read(unsafe { arguments.pairs.add(number) }))
        .collect()
}

#[unsafe(no_mangle)]
extern "C" fn cuCheckpointProcessUnlock(pid: c_int, arguments: *const Reserved) -> c_int {
    called("cuCheckpointProcessUnlock", || {
        check(arguments)?;
        ask_only(pid, &Request::of(Verb::Unlock))
    })
}
