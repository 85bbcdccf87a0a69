#![allow(unsafe_code, reason = "called by CRIU through C")]
//! The functions that CRIU calls, and the descriptor by which it finds them (`CR_PLUGIN_DESC`).
//!
//! ```text
//! dump     CHECKPOINT_DEVICES                 all tasks are frozen: waits once for the supervisor's answer; checks
//!                                             seccomp filters (`filters`); lets threads receive the signals of
//!                                             faults (`faults`); makes interrupted calls go on; saves what CRIU
//!                                             omits (`omitted_state`)
//!          HANDLE_DEVICE_VMA, DUMP_EXT_FILE   a listed device?  0 (nothing to save) : -ENOTSUP (CRIU refuses)
//!          exit                               see `omitted_state`
//! restore  RESTORE_EXT_FILE                   → /dev/null
//!          UPDATE_VMA_MAP                     → /dev/zero
//!          init, RESUME_DEVICES_LATE          see `guard`; tasks make their own system calls, and the supervisor
//!                                             completes and checks them before they run
//! ```
//! The list contains major numbers of the driver, as assigned by the kernel. Paths are not reliable, because the job
//! may create nodes and mounts with any name, and a hook receives neither the process nor the path.
//!
//! During a restore, CRIU calls these hooks only for files that this plugin handled at the dump, because no other
//! plugin is ever loaded. It receives only `/dev/null` and `/dev/zero`, for any image.
//!
//! ABI: `criu-plugin.h`, CRIU 4.0 to 4.2.1. Order and arguments of the hooks below are the same in all of them.

use core::ffi::{CStr, c_char, c_int, c_uint, c_void};

use core::sync::atomic::{AtomicBool, Ordering};

use super::faults::let_faults_arrive;
use super::filters::are_inherited;
use super::guard;
use super::inode::Inode;
use super::interrupted::{let_all_calls_go_on, let_calls_go_on};
use super::kernel::{open, pause, variable};
use super::late_signals;
use super::omitted_state;
use super::question::ask;
use super::remote_calls::make_calls;
use super::text::number;
use super::variables::{CALLS, FROZEN, MAJORS, QUESTION, RETRY};

/// Version 0.2.0, as CRIU packs it.
const VERSION: c_uint = 2 << 8;
/// Number of hooks up to `CHECKPOINT_DEVICES`. CRIU refuses a plugin with more hooks than it knows ("Corrupted
/// plugin").
const HOOKS: c_uint = 12;

/// Result `ENOTSUP`: CRIU continues as without a plugin.
const NOT_MINE: c_int = -95;
/// CRIU aborts the dump and releases the tasks.
const ABORT: c_int = -1;
/// `CR_PLUGIN_STAGE__DUMP`.
const DUMP: c_int = 0;
/// CRIU uses the new offset and descriptor.
const UPDATED: c_int = 1;

/// `cr_plugin_desc_t`.
#[repr(C)]
pub struct Descriptor {
    pub name: &'static [u8; 9],
    pub init: Option<extern "C" fn(stage: c_int) -> c_int>,
    pub exit: Option<extern "C" fn(stage: c_int, result: c_int)>,
    pub version: c_uint,
    pub max_hooks: c_uint,
    pub hooks: Hooks,
}

/// The hooks, in CRIU's order.
#[repr(C)]
pub struct Hooks {
    dump_unix_socket: Option<extern "C" fn()>,
    restore_unix_socket: Option<extern "C" fn()>,
    pub dump_file: Option<extern "C" fn(c_int, c_int) -> c_int>,
    pub restore_file: Option<unsafe extern "C" fn(c_int, *mut bool) -> c_int>,
    dump_mount: Option<extern "C" fn()>,
    restore_mount: Option<extern "C" fn()>,
    dump_link: Option<extern "C" fn()>,
    pub handle_device_mapping: Option<extern "C" fn(c_int, *const c_void) -> c_int>,
    pub update_mapping:
        Option<unsafe extern "C" fn(*const c_char, u64, u64, *mut u64, *mut c_int) -> c_int>,
    pub resume_late: Option<extern "C" fn(c_int) -> c_int>,
    pause: Option<extern "C" fn()>,
    pub checkpoint: Option<extern "C" fn(c_int) -> c_int>,
}

const _: () = assert!(size_of::<Hooks>() == HOOKS as usize * size_of::<*const c_void>());
const _: () = assert!(core::mem::offset_of!(Descriptor, hooks) == 32);

/// Symbol by which CRIU finds the plugin.
#[unsafe(no_mangle)]
pub static CR_PLUGIN_DESC: Descriptor = Descriptor {
    name: b"ckpt-run\0",
    init: Some(guard::begin),
    exit: Some(exit),
    version: VERSION,
    max_hooks: HOOKS,
    hooks: Hooks {
        dump_unix_socket: None,
        restore_unix_socket: None,
        dump_file: Some(dump_file),
        restore_file: Some(restore_file),
        dump_mount: None,
        restore_mount: None,
        dump_link: None,
        handle_device_mapping: Some(handle_device_mapping),
        update_mapping: Some(update_mapping),
        resume_late: Some(resume_late),
        pause: None,
        checkpoint: Some(checkpoint),
    },
};

/// Called at the end, for a dump when CRIU's code has left the tasks and they are still frozen.
extern "C" fn exit(stage: c_int, _result: c_int) {
    if stage == DUMP {
        if !ASKED.load(Ordering::Relaxed) {
            let_all_calls_go_on();
        }
        omitted_state::leave();
    }
}

/// Called for an open file that CRIU cannot dump.
extern "C" fn dump_file(descriptor: c_int, _id: c_int) -> c_int {
    verdict(descriptor)
}

/// Called for a mapped file that is neither regular nor `/dev/zero`. CRIU's `struct stat`, which differs by
/// architecture, is not used.
extern "C" fn handle_device_mapping(descriptor: c_int, _status: *const c_void) -> c_int {
    verdict(descriptor)
}

/// Opens the replacement of a file.
///
/// # Safety
/// Where [`RETRY`] is set, `retry` points to a `bool`. Up to CRIU 4.2.1 there is no such argument, and it
/// holds anything; later it points to a `bool` without a value (criu-dev, `files-ext.c`).
unsafe extern "C" fn restore_file(_id: c_int, retry: *mut bool) -> c_int {
    if variable(RETRY).is_some() {
        // SAFETY: by the contract above.
        unsafe { retry.write(false) };
    }
    open_both_ways(c"/dev/null")
}

/// Opens the replacement of a mapped file. CRIU maps it at the old address, with the old protection.
///
/// # Safety
/// `offset` and `descriptor` point to variables for the results.
unsafe extern "C" fn update_mapping(
    _path: *const c_char,
    _address: u64,
    _old_offset: u64,
    offset: *mut u64,
    descriptor: *mut c_int,
) -> c_int {
    let zeros = open_both_ways(c"/dev/zero");
    if zeros < 0 {
        return zeros;
    }
    // SAFETY: by the contract above.
    unsafe { offset.write(0) };
    // SAFETY: by the contract above.
    unsafe { descriptor.write(zeros) };
    UPDATED
}

/// Called for each task when all tasks are frozen and CRIU has not inspected any of them yet. After a refusal, CRIU releases
/// all tasks.
extern "C" fn checkpoint(pid: c_int) -> c_int {
    if may_be_dumped(pid) {
        return NOT_MINE;
    }
    let_all_calls_go_on();
    ABORT
}

/// True once CRIU has frozen all tasks.
static ASKED: AtomicBool = AtomicBool::new(false);

/// The first call asks the supervisor.
fn may_be_dumped(pid: c_int) -> bool {
    let is_first = !ASKED.swap(true, Ordering::Relaxed);
    if is_first && (ask(FROZEN) == Some(false) || !omitted_state::save_shared()) {
        return false;
    }
    if !are_inherited(pid) || let_faults_arrive(pid).is_none() {
        return false;
    }
    late_signals::note_process(pid);
    let_calls_go_on(pid);
    omitted_state::save(pid)
}

/// Called for each task when all tasks are restored and none is running yet. The first call makes the tasks' own system
/// calls, and blocks CRIU until the supervisor has completed and checked the tasks. It cannot make CRIU fail: if the
/// supervisor detects a problem, it kills the sandbox, and CRIU waits for that.
extern "C" fn resume_late(_pid: c_int) -> c_int {
    static HELD: AtomicBool = AtomicBool::new(false);
    if HELD.swap(true, Ordering::Relaxed) {
        return NOT_MINE;
    }
    if let Some(calls) = variable(CALLS) {
        make_calls(calls);
    }
    omitted_state::give_back();
    guard::end();
    if ask(QUESTION) == Some(false) {
        // The supervisor kills the sandbox or has exited, and then the sandbox exits too. The tasks would run if CRIU
        // exited first.
        loop {
            // SAFETY: takes no arguments.
            unsafe { pause() };
        }
    }
    NOT_MINE
}

fn verdict(descriptor: c_int) -> c_int {
    let Some(majors) = variable(MAJORS) else {
        return NOT_MINE;
    };
    let inode = Inode::of_descriptor(descriptor);
    match inode.and_then(|inode| inode.character_device()) {
        Some((major, _)) if is_listed(majors.to_bytes(), major) => 0,
        Some(_) | None => NOT_MINE,
    }
}

/// Returns true if `major` is one of the decimal numbers of `list`, which are separated by spaces.
pub fn is_listed(list: &[u8], major: u32) -> bool {
    list.split(|byte| *byte == b' ')
        .any(|word| number(word) == Some(major))
}

fn open_both_ways(path: &CStr) -> c_int {
    // SAFETY: the path ends with a zero; without O_CREAT there is no third argument.
    unsafe { open(path.as_ptr(), O_RDWR) }
}

const O_RDWR: c_int = 2;
