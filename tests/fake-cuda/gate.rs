//! Entrance of the driver, which every call of a job passes.
//!
//! ```text
//! call ──▶ initialized here? ──▶ gate ──▶ faults ──▶ the driver's lock ──▶ its work
//! ```
//! A checkpoint's lock closes the gate. The gate is a single word, so that a thread that is stopped anywhere holds no
//! part of it. The driver's own lock is separate, and [`fakeHoldDriverLock`] holds it without passing the gate: a
//! checkpoint's lock does not notice this, but a call made while such a thread is stopped never returns.

use std::ffi::{CStr, OsStr, c_char, c_int};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use super::c;
use super::code::{Answer, INVALID_VALUE, NOT_INITIALIZED, UNKNOWN};
use super::faults;

/// Bit of [`WORD`] that closes the gate. The other bits count the threads inside.
const CLOSED: u32 = 1 << 31;
static WORD: AtomicU32 = AtomicU32::new(0);
/// Process that called `cuInit`; a forked child is another one.
static INITIALIZED: AtomicU32 = AtomicU32::new(0);
static DRIVER_LOCK: Mutex<()> = Mutex::new(());

pub fn is_initialized() -> bool {
    INITIALIZED.load(Ordering::Acquire) == std::process::id()
}

/// Returns true if the parent initialized CUDA before the fork: the child can never use it.
pub fn is_of_parent() -> bool {
    ![0, std::process::id()].contains(&INITIALIZED.load(Ordering::Acquire))
}

pub fn set_initialized() {
    INITIALIZED.store(std::process::id(), Ordering::Release);
}

/// Runs `body` as a call of the driver API.
pub fn call(name: &str, body: impl FnOnce() -> Answer) -> c_int {
    if !is_initialized() {
        return NOT_INITIALIZED;
    }
    enter();
    let answer = faults::meet(name).and_then(|()| {
        let _lock = DRIVER_LOCK.lock().map_err(|_| UNKNOWN)?;
        body()
    });
    leave();
    answer.err().unwrap_or(0)
}

fn enter() {
    loop {
        let word = WORD.load(Ordering::Acquire);
        if word & CLOSED != 0 {
            c::futex_wait(&WORD, word, None);
        } else if WORD
            .compare_exchange(word, word + 1, Ordering::AcqRel, Ordering::Relaxed)
            .is_ok()
        {
            return;
        }
    }
}

fn leave() {
    if WORD.fetch_sub(1, Ordering::AcqRel) == CLOSED + 1 {
        c::futex_wake_all(&WORD);
    }
}

/// Closes the gate and waits for the threads inside, for ever without a timeout. Returns false if the gate is open
/// again.
pub fn close(timeout: Option<Duration>) -> bool {
    let begun = Instant::now();
    WORD.fetch_or(CLOSED, Ordering::AcqRel);
    loop {
        let word = WORD.load(Ordering::Acquire);
        if word == CLOSED {
            return true;
        }
        let left = timeout.map(|timeout| timeout.saturating_sub(begun.elapsed()));
        if left == Some(Duration::ZERO) {
            open();
            return false;
        }
        c::futex_wait(&WORD, word, left);
    }
}

pub fn open() {
    WORD.fetch_and(!CLOSED, Ordering::AcqRel);
    c::futex_wake_all(&WORD);
}

/// Extension of the fake: GPU work that ends when the file exists. A lock waits for it.
#[unsafe(no_mangle)]
extern "C" fn fakeKernel(path: *const c_char) -> c_int {
    until("fakeKernel", path, || {
        enter();
        leave
    })
}

/// Extension of the fake: the thread is inside the driver and holds its lock until the file exists. A lock does not
/// wait for it.
#[unsafe(no_mangle)]
extern "C" fn fakeHoldDriverLock(path: *const c_char) -> c_int {
    until("fakeHoldDriverLock", path, || {
        let lock = DRIVER_LOCK.lock();
        move || drop(lock)
    })
}

fn until<L: FnOnce()>(call: &str, path: *const c_char, take: impl FnOnce() -> L) -> c_int {
    if path.is_null() {
        return INVALID_VALUE;
    }
    // SAFETY: the caller passes a text that ends with a zero.
    let path = unsafe { CStr::from_ptr(path) };
    let let_go = take();
    faults::hang(call, Path::new(OsStr::from_bytes(path.to_bytes())));
    let_go();
    0
}

/// Declares functions of the driver API: the first CUDA version that has each, its C signature, its body.
macro_rules! calls {
    ($($since:literal fn $name:ident($($argument:ident: $kind:ty),* $(,)?) $body:block)*) => {
        $(
            #[unsafe(no_mangle)]
            extern "C" fn $name($($argument: $kind),*) -> std::ffi::c_int {
                $crate::gate::call(stringify!($name), || $body)
            }
        )*
        /// Returns the table for `cuGetProcAddress`.
        pub fn table() -> Vec<$crate::lookup::Entry> {
            vec![$($crate::lookup::Entry {
                name: stringify!($name),
                since: $since,
                address: $name as *const () as usize,
            }),*]
        }
    };
}
pub(crate) use calls;
