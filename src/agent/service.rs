//! Thread of the agent that receives the supervisor's requests on a socket and replies.
//!
//! ```text
//! first covered allocation ─▶ start ─▶ thread: receive ─▶ hand_over ─▶ answer ─▶ receive …
//! ```
//! The socket's name contains the run's token and cannot be guessed. Only requests of root and of the job's own user
//! are accepted. Nothing is ever printed. `hand_over` interprets the requests.

use core::ffi::{c_int, c_void};
use core::mem::{MaybeUninit, transmute};
use core::ptr;
use core::sync::atomic::{AtomicI32, AtomicU8, Ordering};

use super::datagram::{self, Incoming, Peer};
use super::hand_over::HandOver;
use super::sys::Piece;
use super::wire::{MAGIC, Request};
use super::{driver, elf, gate, interpose, memory, sys};

/// Stack size of the thread. The driver's calls need some 50 KiB; untouched pages cost nothing.
const STACK_LEN: usize = 512 << 10;
/// Time limit for sending a reply, in seconds, if the supervisor's queue is full.
const SEND_S: i64 = 5;
/// Signals that the C library sends to threads internally (32 and 33; musl also 34): if they were blocked, setuid would
/// hang.
const SIGNALS_OF_LIBC: u64 = 0b111 << 31;

/// Descriptor of the socket; -1 before it is opened and after it is closed.
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

/// Returns true if the driver has all required functions, and no error has occurred.
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

/// Starts the thread, once. Returns `None` if that fails; then the agent covers no allocation. Called under the lock.
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
        // SAFETY: owned by the agent, or -1, which the kernel refuses.
        unsafe { sys::close(SOCKET.swap(-1, Ordering::AcqRel)) };
    }
    let stage = if started.is_some() { STARTED } else { FAILED };
    STAGE.store(stage, Ordering::Release);
    started
}

/// Opens a socket with the agent's name, at a high descriptor number.
fn open_socket() -> Option<c_int> {
    // SAFETY: has no arguments.
    let pid = unsafe { sys::getpid() }.unsigned_abs();
    let name = datagram::agent(&interpose::token(), pid)?;
    new_socket(&name).map(datagram::move_up)
}

/// Creates a socket with a time limit for sending.
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
        // SAFETY: owned by the agent.
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

/// Registers `in_child` for every child of a fork.
fn watch_forks() -> Option<()> {
    // In glibc, `pthread_atfork` is linked statically into programs; it calls this function.
    let register = elf::find(c"__register_atfork");
    let register = if register.is_null() {
        elf::find(c"pthread_atfork")
    } else {
        register
    };
    if register.is_null() {
        return None;
    }
    // SAFETY: `pthread_atfork`, which ignores the last argument, or the internal function, whose last argument is the
    // library: none.
    let register: AtFork = unsafe { transmute(register) };
    // SAFETY: the agent is never unloaded.
    (unsafe { register(None, None, Some(in_child), ptr::null_mut()) } == 0).then_some(())
}

/// Switches the agent off in the child.
///
/// # Safety
/// Called by the C library in the child of a fork.
unsafe extern "C" fn in_child() {
    interpose::switch_off();
    gate::open();
    // SAFETY: owned by the agent, or -1, which the kernel refuses.
    unsafe { sys::close(SOCKET.swap(-1, Ordering::AcqRel)) };
    // SAFETY: by the contract above.
    unsafe { memory::abandon() };
}

/// Starts a detached thread with all signals blocked.
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

/// Body of the thread. Ends only if the socket is lost.
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
            // The job closed all descriptors that it does not know.
            Err(_) => match open_socket() {
                Some(socket) => SOCKET.store(socket, Ordering::Release),
                None => break,
            },
        }
    }
    // The supervisor cannot ask for memory any more, so no further allocation is covered.
    STAGE.store(FAILED, Ordering::Release);
    ptr::null_mut()
}

/// Returns true if root or the job's own user sent the request; others get no reply.
fn is_from_supervisor(incoming: &Incoming) -> bool {
    is_trusted(incoming)
        && incoming
            .request()
            .is_some_and(|request: Request| request.magic == MAGIC)
}

/// Returns true if the datagram comes from root or from the job's own user.
pub fn is_trusted(incoming: &Incoming) -> bool {
    // SAFETY: has no arguments.
    let own = unsafe { sys::geteuid() };
    incoming
        .sender
        .is_some_and(|sender| sender.uid == 0 || sender.uid == own)
}
