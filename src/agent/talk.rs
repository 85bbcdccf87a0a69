//! The agent's thread and its socket: takes requests of the supervisor and answers them.
//!
//! ```text
//! first covered allocation ─▶ start ─▶ thread: receive ─▶ hand_over ─▶ answer ─▶ receive …
//! ```
//! The socket has a name that only who knows the run's token can guess, and listens to root and to the job's own user
//! alone. Nothing is ever printed. What a request means is not known here.

use core::ffi::{c_int, c_void};
use core::mem::{MaybeUninit, transmute};
use core::ptr;
use core::sync::atomic::{AtomicI32, AtomicU8, Ordering};

use super::datagram::{self, Incoming, Peer};
use super::hand_over::HandOver;
use super::sys::Piece;
use super::wire::{MAGIC, Request};
use super::{driver, elf, interpose, memory, sys};

/// Stack of the thread. The driver's calls need some 50 KiB; untouched pages cost nothing.
const STACK_LEN: usize = 512 << 10;
/// Seconds that the supervisor has to take an answer, should its queue be full.
const SEND_S: i64 = 5;
/// The signals that the C library says to threads itself (32 and 33; musl 34): without them setuid would hang.
const SIGNALS_OF_LIBC: u64 = 0b111 << 31;

/// The socket, once there is one. -1: not yet, or not any more.
static SOCKET: AtomicI32 = AtomicI32::new(-1);

const UNTRIED: u8 = 0;
const READY: u8 = 1;
const STARTED: u8 = 2;
const FAILED: u8 = 3;
static STAGE: AtomicU8 = AtomicU8::new(UNTRIED);

type Create = unsafe extern "C" fn(
    *mut c_void,
    *const c_void,
    extern "C" fn(*mut c_void) -> *mut c_void,
    *mut c_void,
) -> c_int;
type OnAttributes = unsafe extern "C" fn(*mut c_void) -> c_int;
type SetNumber = unsafe extern "C" fn(*mut c_void, usize) -> c_int;
type SetDetached = unsafe extern "C" fn(*mut c_void, c_int) -> c_int;
type Handler = unsafe extern "C" fn();
type AtFork =
    unsafe extern "C" fn(Option<Handler>, Option<Handler>, Option<Handler>, *mut c_void) -> c_int;

/// Returns true if the driver has all that the agent needs, and nothing failed yet.
pub fn is_ready() -> bool {
    if STAGE.load(Ordering::Acquire) == UNTRIED {
        let stage = if driver::load(interpose::symbol) {
            READY
        } else {
            FAILED
        };
        let _ = STAGE.compare_exchange(UNTRIED, stage, Ordering::AcqRel, Ordering::Relaxed);
    }
    matches!(STAGE.load(Ordering::Acquire), READY | STARTED)
}

/// Starts the thread, once; `None` when it cannot be, and then nothing is ever covered. Called under the lock.
pub fn start() -> Option<()> {
    match STAGE.load(Ordering::Acquire) {
        STARTED => return Some(()),
        READY => {}
        _ => return None,
    }
    let started = open_socket().and_then(|socket| {
        SOCKET.store(socket, Ordering::Release);
        watch_forks().and_then(|()| start_thread())
    });
    if started.is_none() {
        // SAFETY: ours, or -1, which the kernel refuses.
        unsafe { sys::close(SOCKET.swap(-1, Ordering::AcqRel)) };
    }
    let stage = if started.is_some() { STARTED } else { FAILED };
    STAGE.store(stage, Ordering::Release);
    started
}

/// A socket with the agent's name, at a number where it is in nobody's way.
fn open_socket() -> Option<c_int> {
    // SAFETY: has no arguments.
    let pid = unsafe { sys::getpid() }.unsigned_abs();
    let name = datagram::agent(&interpose::token(), pid)?;
    new_socket(&name).map(datagram::move_up)
}

/// A socket with a name that waits for nobody for ever when it sends.
pub fn new_socket(name: &Peer) -> Option<c_int> {
    // SAFETY: plain numbers.
    let socket = unsafe { sys::socket(sys::AF_UNIX, sys::SOCK_DGRAM | sys::SOCK_CLOEXEC, 0) };
    if socket < 0 {
        return None;
    }
    let one: c_int = 1;
    let good = set(socket, sys::SO_PASSCRED, &one)
        && set(socket, sys::SO_SNDTIMEO, &[SEND_S, 0])
        // SAFETY: the address has this length.
        && unsafe { sys::bind(socket, &raw const name.address, name.len) } == 0;
    if !good {
        // SAFETY: ours alone.
        unsafe { sys::close(socket) };
        return None;
    }
    Some(socket)
}

/// Sets an option of a socket.
pub fn set<T>(socket: c_int, option: c_int, value: &T) -> bool {
    let value = Piece::of(value);
    let len = u32::try_from(value.len).unwrap_or(0);
    // SAFETY: the value has this length.
    unsafe { sys::setsockopt(socket, sys::SOL_SOCKET, option, value.start, len) == 0 }
}

/// Has `in_child` called in every child of a fork.
fn watch_forks() -> Option<()> {
    // glibc has `pthread_atfork` in a part that is linked into programs; this is what that calls.
    let register = elf::find(c"__register_atfork");
    let register = if register.is_null() {
        elf::find(c"pthread_atfork")
    } else {
        register
    };
    if register.is_null() {
        return None;
    }
    // SAFETY: `pthread_atfork`, which ignores the last argument, or that with the library it belongs to: none.
    let register: AtFork = unsafe { transmute(register) };
    // SAFETY: the agent is never unloaded.
    (unsafe { register(None, None, Some(in_child), ptr::null_mut()) } == 0).then_some(())
}

/// # Safety
/// Called by the C library in the child of a fork.
unsafe extern "C" fn in_child() {
    interpose::switch_off();
    // SAFETY: ours, or -1, which the kernel refuses.
    unsafe { sys::close(SOCKET.swap(-1, Ordering::AcqRel)) };
    // SAFETY: by the contract above.
    unsafe { memory::abandon() };
}

/// A detached thread with all signals blocked.
fn start_thread() -> Option<()> {
    let function = |name| Some(elf::find(name)).filter(|found| !found.is_null());
    // SAFETY: functions of these names, which have these types.
    let (create, init, stack, detach) = unsafe {
        (
            transmute::<*mut c_void, Create>(function(c"pthread_create")?),
            transmute::<*mut c_void, OnAttributes>(function(c"pthread_attr_init")?),
            transmute::<*mut c_void, SetNumber>(function(c"pthread_attr_setstacksize")?),
            transmute::<*mut c_void, SetDetached>(function(c"pthread_attr_setdetachstate")?),
        )
    };
    // `pthread_attr_t` has 56 bytes, 64 on aarch64.
    let mut attributes = MaybeUninit::<[u64; 16]>::zeroed();
    let attributes = attributes.as_mut_ptr().cast();
    // `pthread_t` is a word.
    let mut thread = 0usize;
    let before = sys::block_signals(!SIGNALS_OF_LIBC);
    // SAFETY: there is room for both, and the function lives as long as the process. 1: detached.
    let good = unsafe {
        init(attributes) == 0
            && stack(attributes, STACK_LEN) == 0
            && detach(attributes, 1) == 0
            && create((&raw mut thread).cast(), attributes, run, ptr::null_mut()) == 0
    };
    sys::block_signals(before);
    good.then_some(())
}

/// The thread. It ends only when it has no socket any more.
extern "C" fn run(_: *mut c_void) -> *mut c_void {
    sys::name_thread(c"ckpt-agent");
    let mut hand_over = HandOver::new();
    loop {
        let socket = SOCKET.load(Ordering::Acquire);
        match datagram::receive(socket) {
            Ok(incoming) => {
                if is_from_supervisor(&incoming) {
                    hand_over.answer(socket, incoming);
                }
            }
            Err(sys::EINTR) => {}
            // The job closed all numbers that it did not know.
            Err(_) => match open_socket() {
                Some(socket) => SOCKET.store(socket, Ordering::Release),
                None => break,
            },
        }
    }
    // Nobody can ask for memory any more, so no more is covered.
    STAGE.store(FAILED, Ordering::Release);
    ptr::null_mut()
}

/// Root and the job's own user may ask; others are not answered.
fn is_from_supervisor(incoming: &Incoming) -> bool {
    is_trusted(incoming)
        && incoming
            .request()
            .is_some_and(|request: Request| request.magic == MAGIC)
}

/// Returns true if it comes from root or from the job's own user.
pub fn is_trusted(incoming: &Incoming) -> bool {
    // SAFETY: has no arguments.
    let own = unsafe { sys::geteuid() };
    incoming
        .sender
        .is_some_and(|sender| sender.uid == 0 || sender.uid == own)
}
