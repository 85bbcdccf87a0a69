#![allow(
    unsafe_code,
    reason = "reads and sets signal dispositions before main and between fork and exec"
)]
//! Signals that ckpt-run's caller has ignored or blocked. The job inherits them as it would without ckpt-run.
//!
//! A shell cannot trap a signal that was ignored when it started, and programs started with `nohup` or by systemd
//! (`IgnoreSIGPIPE=`) rely on ignored signals. Rust's runtime ignores SIGPIPE before `main`, and an `execve` resets the
//! supervisor's handlers to the default action. Therefore the state is recorded when the program is loaded, and every
//! job starts with it.

use std::ptr;
use std::sync::atomic::{AtomicU64, Ordering};

use nix::libc;
use serde::{Deserialize, Serialize};

/// Highest signal number (Linux, `_NSIG`).
const SIGNAL_MAX: i32 = 64;
/// Size of the kernel's signal set in bytes.
const SET_BYTES: usize = size_of::<u64>();

static IGNORED: AtomicU64 = AtomicU64::new(0);
static BLOCKED: AtomicU64 = AtomicU64::new(0);

/// Function called when the program is loaded, before `main`.
#[used]
#[unsafe(link_section = ".init_array")]
static RECORD: extern "C" fn() = record;

/// Records the state with system calls only, because the runtime is not initialized.
extern "C" fn record() {
    let mut ignored = 0;
    for number in 1..=SIGNAL_MAX {
        if act(number, None) == Some(libc::SIG_IGN) {
            ignored |= bit(number);
        }
    }
    IGNORED.store(ignored, Ordering::Relaxed);
    let mut blocked: u64 = 0;
    // SAFETY: reads the mask into an integer of the kernel's size.
    unsafe {
        libc::syscall(
            libc::SYS_rt_sigprocmask,
            libc::SIG_SETMASK,
            ptr::null::<u64>(),
            &raw mut blocked,
            SET_BYTES,
        )
    };
    BLOCKED.store(blocked, Ordering::Relaxed);
}

/// Restores the default action of SIGCHLD, so that this process can wait for its children.
pub fn await_children() {
    act(libc::SIGCHLD, Some(libc::SIG_DFL));
}

/// Ignores SIGXFSZ, so that a write beyond the limit on files (`ulimit -f`) fails with EFBIG.
pub fn survive_file_limits() {
    act(libc::SIGXFSZ, Some(libc::SIG_IGN));
}

/// Dispositions and mask with which a job starts. Bit `n - 1` of a set stands for signal `n`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct CallersSignals {
    ignored: u64,
    blocked: u64,
}

impl CallersSignals {
    /// Returns the state of this process at its start.
    pub fn recorded() -> Self {
        Self {
            ignored: IGNORED.load(Ordering::Relaxed),
            blocked: BLOCKED.load(Ordering::Relaxed),
        }
    }

    /// Sets the state in this process.
    ///
    /// The function may be called between fork and exec, because it makes only system calls. SIGKILL and SIGSTOP cannot
    /// be changed.
    pub fn apply(self) {
        for number in 1..=SIGNAL_MAX {
            let action = if self.ignored & bit(number) == 0 {
                libc::SIG_DFL
            } else {
                libc::SIG_IGN
            };
            act(number, Some(action));
        }
        set_mask(self.blocked);
    }
}

fn set_mask(blocked: u64) {
    // SAFETY: the kernel reads an integer of its size.
    unsafe {
        libc::syscall(
            libc::SYS_rt_sigprocmask,
            libc::SIG_SETMASK,
            &raw const blocked,
            ptr::null_mut::<u64>(),
            SET_BYTES,
        )
    };
}

/// Returns a signal's action, and sets a new one if it is given. Uses the system call, because the C library hides the
/// two signals that it uses.
fn act(number: i32, wanted: Option<libc::sighandler_t>) -> Option<libc::sighandler_t> {
    let wanted: Option<KernelAction> = wanted.map(|handler| [handler, 0, 0, 0]);
    let mut before: KernelAction = [libc::SIG_DFL; 4];
    // SAFETY: the kernel reads and writes structures of this size.
    let result = unsafe {
        libc::syscall(
            libc::SYS_rt_sigaction,
            number,
            wanted.as_ref().map_or(ptr::null(), ptr::from_ref),
            &raw mut before,
            SET_BYTES,
        )
    };
    (result == 0).then_some(before[0])
}

/// `struct kernel_sigaction`: handler, flags, restorer, and a mask of [`SET_BYTES`].
type KernelAction = [libc::sighandler_t; 4];

fn bit(number: i32) -> u64 {
    1 << (number - 1)
}
