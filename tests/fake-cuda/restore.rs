//! Restore thread, which carries out the `cuCheckpointProcess...` calls of another process.
//!
//! ```text
//! running ──lock──▶ locked ──checkpoint──▶ checkpointed
//!    ▲                │ ▲                       │
//!    └────unlock──────┘ └────────restore────────┘          a wrong state returns 401
//! ```
//! The thread locks the process's state but never takes the driver's lock, which a stopped thread may hold.

use std::fs::File;
use std::os::unix::net::UnixDatagram;
use std::sync::Mutex;
use std::sync::atomic::{AtomicI32, Ordering};
use std::time::Duration;

use super::code::{Code, ILLEGAL_STATE, NOT_INITIALIZED, NOT_READY, UNKNOWN};
use super::link::{self, REQUEST_MAX, Request, Verb};
use super::{c, gate, suspend};

/// Device file that a process on a GPU has open, and a checkpointed one has not. A test may put any file there.
const DEVICE: &str = "/dev/nvidiactl";

const RUNNING: i32 = 0;
const LOCKED: i32 = 1;
const CHECKPOINTED: i32 = 2;

static STATE: AtomicI32 = AtomicI32::new(RUNNING);
static DEVICE_FILE: Mutex<Option<File>> = Mutex::new(None);

/// Starts the thread. Signals are for the job's threads.
pub fn start() -> Result<(), Code> {
    let socket = link::listen().map_err(|_| UNKNOWN)?;
    hold_device();
    let builder = std::thread::Builder::new().name("fake-restore".to_owned());
    let started = c::without_signals(|| builder.spawn(move || serve(&socket)));
    started.map(|_| ()).map_err(|_| UNKNOWN)
}

fn serve(socket: &UnixDatagram) {
    let mut bytes = [0; REQUEST_MAX];
    loop {
        let Ok((len, from)) = socket.recv_from(&mut bytes) else {
            continue;
        };
        let Some(request) = Request::decode(&bytes[..len]) else {
            continue;
        };
        // A caller that has exited does not listen.
        let _ = socket.send_to_addr(&link::encode_reply(answer(&request)), &from);
    }
}

fn answer(request: &Request) -> Result<i32, Code> {
    match request.verb {
        Verb::State => Ok(STATE.load(Ordering::Acquire)),
        // SAFETY: has no arguments.
        Verb::Thread => Ok(unsafe { c::gettid() }),
        Verb::Lock => step(RUNNING, LOCKED, || lock(request.timeout_ms)),
        Verb::Checkpoint => step(LOCKED, CHECKPOINTED, || {
            suspend::to_host()?;
            release_device();
            Ok(())
        }),
        Verb::Restore => step(CHECKPOINTED, LOCKED, || {
            suspend::to_device(&request.pairs)?;
            hold_device();
            Ok(())
        }),
        Verb::Unlock => step(LOCKED, RUNNING, || {
            gate::open();
            Ok(())
        }),
    }
}

fn step(from: i32, to: i32, work: impl FnOnce() -> Result<(), Code>) -> Result<i32, Code> {
    if STATE.load(Ordering::Acquire) != from {
        return Err(ILLEGAL_STATE);
    }
    work()?;
    STATE.store(to, Ordering::Release);
    Ok(0)
}

/// Locks the process. A process inside `cuInit` counts as running and cannot be locked (580.159.04).
fn lock(timeout_ms: u32) -> Result<(), Code> {
    if !gate::is_initialized() {
        return Err(NOT_INITIALIZED);
    }
    let timeout = (timeout_ms > 0).then(|| Duration::from_millis(timeout_ms.into()));
    if gate::close(timeout) {
        Ok(())
    } else {
        Err(NOT_READY)
    }
}

fn hold_device() {
    if let Ok(mut file) = DEVICE_FILE.lock() {
        *file = File::open(DEVICE).ok();
    }
}

fn release_device() {
    if let Ok(mut file) = DEVICE_FILE.lock() {
        *file = None;
    }
}
