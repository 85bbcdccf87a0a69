#![allow(
    unsafe_code,
    reason = "called by CRIU through C, and traces the job's threads"
)]
//! State of processes that CRIU (4.2) omits, in a file in memory, which the supervisor keeps with the image:
//!
//! - permission to use large registers (`arch_prctl(ARCH_REQ_XCOMP_PERM)`), without which the first instruction of AMX ends
//!   the program, and the contents of registers that CRIU does not know;
//! - memory protection keys;
//! - the check of a thread's accesses for alignment, which CRIU's code does not pass;
//! - the dispatch of system calls to a handler (`PR_SET_SYSCALL_USER_DISPATCH`);
//! - the last pid in the job's namespace ([`last_pid`]);
//! - record locks on mapped files, which the supervisor records;
//! - calls that a signal would end ([`restarts`]), and signals that CRIU has not seen ([`late_signals`]).
//!
//! ```text
//! dump      hook        saves the state of each process, and removes what would hinder CRIU's code in it
//!           post-dump   all tasks are dumped: saves late signals. The supervisor reads the file
//!           exit        CRIU has left the processes: gives back registers, flags and dispatch, and empties the file
//! restore   hook        gives everything back, and empties the file; the supervisor checks that it is empty
//! ```
//! A dump is refused because of:
//!
//! - a thread with descriptors or a working folder of its own, or with the policy `SCHED_DEADLINE`;
//! - keys beside memory that may be executed and not read: the kernel uses a key of its own for that, which a restored
//!   process would get first;
//! - memory whose key the process has freed.

use core::ffi::{c_int, c_long};
use core::sync::atomic::{AtomicU8, Ordering};

use super::call_dispatch::Dispatch;
use super::extended_registers::{
    BY_PERMISSION, ExtendedRegisters, KEY_RIGHTS, TILES, has_keys, unknown_components,
};
use super::kernel::{_exit, ENOENT, O_CLOEXEC, O_DIRECTORY, openat, variable, write_at};
use super::last_pid::{self, LAST_PID};
use super::late_signals::{self, LATE_SIGNAL};
use super::listing::for_each_thread;
use super::omitted_records::{Record, append, empty, file, for_each_record, header};
use super::protection_keys::{
    INITIAL_RIGHTS, Keyed, SYS_MPROTECT, allocate, allocated, for_each_keyed, protect,
};
use super::remote_calls::{Remote, can_call};
use super::restarts::{self, RESTART};
use super::system_call::{AT_FDCWD, address, system_call};
use super::text::Text;
use super::tracing::{FLAGS, registers, set_registers};
use super::variables::{
    ALIGNMENT, BAD_KEYS, BLOCKED, DEADLINE, DISPATCH, FILTERS, LOCK, REGISTERS, UNSHARED,
};

/// Permission of a process: the set of components.
const PERMISSION: u32 = 1;
/// Keys of a process: their set.
const KEYS: u32 = 3;
/// Mapping of a process with a key: start, end, rights, key.
const KEYED: u32 = 4;

/// `EFLAGS.AC`.
const CHECKS_ALIGNMENT: u64 = 1 << 18;
const ARCH_GET_XCOMP_PERM: u64 = 0x1022;
const ARCH_REQ_XCOMP_PERM: u64 = 0x1023;
const SYS_ARCH_PRCTL: u64 = 158;

/// Saves the state of the whole job. Returns false if that fails.
pub fn save_shared() -> bool {
    file().is_none_or(|file| last_pid::save(file).is_some())
}

/// Saves the state of a process. CRIU has stopped all its threads and will run its own code in them. Returns false if the
/// state cannot be determined or restored.
pub fn save(pid: c_int) -> bool {
    let Some(file) = file() else { return true };
    // First, because the calls that this makes in the process could be dispatched.
    let is_saved = for_each_thread(pid, |thread| {
        check_thread(file, pid, thread)?;
        save_alignment(file, thread)?;
        save_dispatch(file, thread)
    })
    .and_then(|()| save_process(file, pid));
    let has_none = unknown_components() == 0;
    let save_all = || for_each_thread(pid, |thread| save_registers(file, thread));
    is_saved.is_some() && (has_none || save_all().is_some())
}

/// Gives back what [`save`] has removed, and registers that CRIU has overwritten.
pub fn leave() {
    let Some(file) = file() else { return };
    let mut refused = None;
    let is_given = for_each_record(file, |record| {
        if matches!(record.kind, BAD_KEYS | UNSHARED | DEADLINE | BLOCKED) {
            refused = Some((record.kind, record.thread));
        }
        let is_lacking = matches!(record.kind, REGISTERS | DISPATCH | ALIGNMENT);
        if record.kind == RESTART {
            restarts::let_kernel_decide(record);
        }
        !is_lacking || give_record(record).is_some() || has_exited(record.thread)
    });
    if is_given {
        empty(file);
        if let Some((kind, pid)) = refused {
            // If that fails, CRIU's failure has no name.
            let _ = write_at(file, &header(kind, pid, 0), 0);
        }
    }
}

/// Gives everything back to restored processes, none of which has run yet. Last are the dispatch, and the calls that a signal
/// ends.
pub fn give_back() {
    let Some(file) = file() else { return };
    let give_all = |last| {
        for_each_record(file, |record| {
            matches!(record.kind, DISPATCH | RESTART) != last || give_record(record).is_some()
        })
    };
    if give_all(false) && give_all(true) {
        empty(file);
    }
}

fn save_process(file: c_int, pid: c_int) -> Option<()> {
    let may_need_permission = unknown_components() & BY_PERMISSION != 0;
    if !may_need_permission && !has_keys() {
        return Some(());
    }
    // In a process of 32-bit code, this state is not looked for. Nor does a process have it that may not make the calls.
    let may_have_keys = has_keys() && may_use_keys();
    let may_need_permission = may_need_permission && may_ask_for_permission();
    if !can_call(pid) || !may_need_permission && !may_have_keys {
        return Some(());
    }
    let mut remote = Remote::begin(pid)?;
    if may_need_permission {
        remote.put(0).then_some(())?;
        let arguments = [ARCH_GET_XCOMP_PERM, remote.place, 0, 0];
        // Kernels without the call (before 5.16) leave the word alone, and do not use these registers.
        remote.call(SYS_ARCH_PRCTL, arguments)?;
        let granted = remote.word()? & BY_PERMISSION;
        if granted != 0 {
            append(file, PERMISSION, pid, &[&granted.to_ne_bytes()])?;
        }
    }
    if !may_have_keys {
        return Some(());
    }
    let keys = allocated(&mut remote)?;
    drop(remote);
    let mut registers = ExtendedRegisters::of(pid)?;
    let rights = u32::from_ne_bytes(*registers.component(KEY_RIGHTS)?.first_chunk()?);
    if keys == 0 && rights == INITIAL_RIGHTS {
        return Some(());
    }
    if keys != 0 {
        append(file, KEYS, pid, &[&keys.to_ne_bytes()])?;
    }
    let mut is_unreadable = false;
    let are_saved = for_each_keyed(pid, |keyed| {
        is_unreadable |= rights >> (2 * keyed.key) & 1 != 0;
        let content: [&[u8]; 4] = [
            &keyed.start.to_ne_bytes(),
            &keyed.end.to_ne_bytes(),
            &keyed.rights.to_ne_bytes(),
            &keyed.key.to_ne_bytes(),
        ];
        let is_allocated = keys & 1 << keyed.key != 0;
        // Where the process has no keys, only the kernel's is restored, by the kernel.
        if keys == 0 && keyed.is_of_kernel() {
            return true;
        }
        let kind = if is_allocated && !keyed.is_of_kernel() {
            KEYED
        } else {
            BAD_KEYS
        };
        append(file, kind, pid, &content).is_some() && kind == KEYED
    });
    if are_saved && is_unreadable {
        // CRIU reads the memory with this thread's rights.
        save_component(file, pid, &registers, KEY_RIGHTS)?;
        let none = registers.component(KEY_RIGHTS)?.len();
        registers.set_component(KEY_RIGHTS, [0; 8].get(..none)?)?;
        registers.give_to(pid).then_some(())?;
    }
    are_saved.then_some(())
}

/// Refuses a thread that CRIU does not restore as it is.
fn check_thread(file: c_int, pid: c_int, thread: c_int) -> Option<()> {
    let differs = |what| {
        let arguments = [pid.into(), thread.into(), what, 0, 0, 0];
        // SAFETY: takes numbers only. A kernel without the call answers with an error, which is negative.
        unsafe { system_call(KCMP, arguments) > 0 }
    };
    // SAFETY: takes numbers only.
    let policy = unsafe { system_call(SCHED_GETSCHEDULER, [thread.into(), 0, 0, 0, 0, 0]) };
    let kind = if differs(KCMP_FILES) || differs(KCMP_FS) {
        UNSHARED
    } else if policy & SCHED_POLICY == SCHED_DEADLINE {
        DEADLINE
    } else {
        return Some(());
    };
    append(file, kind, pid, &[])?;
    None
}

fn save_alignment(file: c_int, thread: c_int) -> Option<()> {
    if !cfg!(target_arch = "x86_64") {
        return Some(());
    }
    let mut registers = registers(thread)?;
    if registers[FLAGS] & CHECKS_ALIGNMENT != 0 {
        append(file, ALIGNMENT, thread, &[])?;
        registers[FLAGS] &= !CHECKS_ALIGNMENT;
        set_registers(thread, &registers).then_some(())?;
    }
    Some(())
}

fn give_alignment(thread: c_int) -> Option<()> {
    let mut registers = registers(thread)?;
    registers[FLAGS] |= CHECKS_ALIGNMENT;
    set_registers(thread, &registers).then_some(())
}

fn save_dispatch(file: c_int, thread: c_int) -> Option<()> {
    if let Some(dispatch) = Dispatch::of(thread).filter(Dispatch::is_on) {
        append(file, DISPATCH, thread, &[&dispatch.0])?;
        Dispatch::OFF.give_to(thread)?;
    }
    Some(())
}

fn save_registers(file: c_int, thread: c_int) -> Option<()> {
    let registers = ExtendedRegisters::of(thread)?;
    let unknown = registers.unknown_to_criu();
    for component in (0..u64::BITS).filter(|component| unknown & 1 << component != 0) {
        save_component(file, thread, &registers, component)?;
    }
    Some(())
}

fn save_component(
    file: c_int,
    thread: c_int,
    registers: &ExtendedRegisters,
    component: u32,
) -> Option<()> {
    let bytes = registers.component(component)?;
    append(file, REGISTERS, thread, &[&component.to_ne_bytes(), bytes])
}

fn give_record(record: &Record<'_>) -> Option<()> {
    let word = |at: usize| {
        Some(u32::from_ne_bytes(
            *record.content.get(at..)?.first_chunk()?,
        ))
    };
    let long = |at: usize| {
        Some(u64::from_ne_bytes(
            *record.content.get(at..)?.first_chunk()?,
        ))
    };
    let remote = || Remote::begin(record.thread);
    match record.kind {
        PERMISSION => {
            let granted = long(0)? & BY_PERMISSION;
            for component in (0..u64::BITS).filter(|it| granted & 1 << it != 0) {
                let arguments = [ARCH_REQ_XCOMP_PERM, component.into(), 0, 0];
                (remote()?.call(SYS_ARCH_PRCTL, arguments)? == 0).then_some(())?;
            }
            Some(())
        }
        REGISTERS => give_register(record.thread, word(0)?, record.content.get(4..)?),
        KEYS => {
            let registers = ExtendedRegisters::of(record.thread)?;
            allocate(&mut remote()?, word(0)?)?;
            // The kernel has given the thread rights to the new keys.
            give_register(record.thread, KEY_RIGHTS, registers.component(KEY_RIGHTS)?)
        }
        KEYED => {
            let (start, end, rights, key) = (long(0)?, long(8)?, word(16)?, word(20)?);
            let keyed = Keyed {
                start,
                end,
                rights,
                key,
            };
            protect(&mut remote()?, &keyed)
        }
        LAST_PID => last_pid::give(record.content),
        LATE_SIGNAL => late_signals::send(record),
        LOCK => {
            let mut lock = [0; 4];
            for (number, word) in lock.iter_mut().enumerate() {
                *word = long(4 + 8 * number)?;
            }
            let mut remote = remote()?;
            let place = remote.put_below_stack(&lock)?;
            let arguments = [word(0)?.into(), F_SETLK, place, 0];
            (remote.call(SYS_FCNTL, arguments)? == 0).then_some(())
        }
        RESTART => restarts::let_kernel_decide(record),
        ALIGNMENT => give_alignment(record.thread),
        DISPATCH => Dispatch(*record.content.first_chunk()?).give_to(record.thread),
        _ => None,
    }
}

fn give_register(thread: c_int, component: u32, bytes: &[u8]) -> Option<()> {
    let mut registers = ExtendedRegisters::of(thread)?;
    registers.set_component(component, bytes)?;
    if !registers.give_to(thread) && component == TILES {
        let mut before = ExtendedRegisters::of(thread)?;
        before.set_one_tile()?;
        before.give_to(thread).then_some(())?;
        Remote::begin(thread)?.zero_tile().then_some(())?;
        registers.give_to(thread).then_some(())?;
    }
    // Some kernels ignore a part (5.14 to 6.1: the rights to keys).
    let given = ExtendedRegisters::of(thread)?;
    (given.component(component)? == bytes).then_some(())
}

/// Returns false if a filter ends a process that asks for its permission.
fn may_ask_for_permission() -> bool {
    static ANSWER: AtomicU8 = AtomicU8::new(UNKNOWN);
    is_allowed(&ANSWER, || {
        let mut word = 0_u64;
        let place = address(&raw mut word);
        let code = ARCH_GET_XCOMP_PERM.cast_signed() as c_long;
        // SAFETY: the kernel writes a word.
        unsafe {
            system_call(
                SYS_ARCH_PRCTL.cast_signed() as c_long,
                [code, place, 0, 0, 0, 0],
            )
        };
    })
}

/// Returns false if a filter ends a process that uses keys.
fn may_use_keys() -> bool {
    static ANSWER: AtomicU8 = AtomicU8::new(UNKNOWN);
    is_allowed(&ANSWER, || {
        let number = SYS_MPROTECT.cast_signed() as c_long;
        // SAFETY: protects nothing.
        unsafe { system_call(number, [0; 6]) };
    })
}

const UNKNOWN: u8 = 0;
const ALLOWED: u8 = 1;
const FORBIDDEN: u8 = 2;

/// Tries a call in a child of CRIU, once, if CRIU may not suspend filters: the job's processes have inherited them from the
/// same process as CRIU.
fn is_allowed(answer: &AtomicU8, call: impl FnOnce()) -> bool {
    if variable(FILTERS).is_none() {
        return true;
    }
    if answer.load(Ordering::Relaxed) == UNKNOWN {
        // SAFETY: CRIU has one thread; the child makes system calls only.
        let child = unsafe { fork() };
        if child == 0 {
            call();
            // SAFETY: takes a number and does not return.
            unsafe { _exit(0) }
        }
        let mut status = -1;
        // SAFETY: there is room for the status.
        let waited = child > 0 && unsafe { waitpid(child, &raw mut status, 0) } == child;
        let found = if waited && status == 0 {
            ALLOWED
        } else {
            FORBIDDEN
        };
        answer.store(found, Ordering::Relaxed);
    }
    answer.load(Ordering::Relaxed) == ALLOWED
}

fn has_exited(thread: c_int) -> bool {
    let mut path = Text::new();
    path.push(b"/proc/");
    path.push_number(thread);
    let folder = openat(AT_FDCWD, path.as_c(), O_DIRECTORY | O_CLOEXEC);
    folder.is_err_and(|error| error == ENOENT)
}

const F_SETLK: u64 = 6;
#[cfg(target_arch = "x86_64")]
const SYS_FCNTL: u64 = 72;
#[cfg(target_arch = "aarch64")]
const SYS_FCNTL: u64 = 25;
const KCMP_FILES: c_long = 2;
const KCMP_FS: c_long = 3;
const SCHED_DEADLINE: c_long = 6;
/// The policy without its flag.
const SCHED_POLICY: c_long = 0xff;
#[cfg(target_arch = "x86_64")]
const KCMP: c_long = 312;
#[cfg(target_arch = "aarch64")]
const KCMP: c_long = 272;
#[cfg(target_arch = "x86_64")]
const SCHED_GETSCHEDULER: c_long = 145;
#[cfg(target_arch = "aarch64")]
const SCHED_GETSCHEDULER: c_long = 120;

// Of the C library that CRIU runs with; none is linked.
unsafe extern "C" {
    fn fork() -> c_int;
    fn waitpid(pid: c_int, status: *mut c_int, options: c_int) -> c_int;
}
