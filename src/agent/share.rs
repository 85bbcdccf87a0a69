//! CUDA IPC for the agent's memory, which the driver's own IPC does not support. The agent creates a handle, and the
//! agent of the other process exchanges it for a descriptor.
//!
//! ```text
//! cuIpcGetMemHandle ─▶ handle: run, process, number ─▶ the job passes it to another process
//! cuIpcOpenMemHandle ─▶ SHARE to the agent of that process ─▶ descriptor ─▶ import, map
//! cuIpcCloseMemHandle ─▶ unmap, release, on the last close
//! ```
//! A process that shares memory reports the shared pieces to the supervisor (ORIGINS). An image contains each piece
//! once, and a restore returns it to all processes.

use core::ffi::{c_int, c_uint, c_void};
use core::sync::atomic::{AtomicBool, Ordering};

use super::datagram::{self, Incoming, Peer};
use super::driver::{self, Properties, check};
use super::hand_over::{LENDS, SHARES, import};
use super::memory::{self, SEGMENTS, STATE, State, current, synchronize, tear_down};
use super::sys::{self, Address};
use super::table::Entry;
use super::wire::{self, MAGIC, Reply, Request, Segment, VERSION};
use super::{interpose, service};

/// First word of the agent's handles. The driver's handles start with different values, and the run's token follows in
/// any case.
const HANDLE_MAGIC: u64 = u64::from_ne_bytes(*b"ckpt-ipc");
/// Time limit for a reply, in seconds: the other agent may be carrying out a request.
const ANSWER_S: i64 = 5;
/// Maximum number of attempts, 2 ms apart, while the other process's memory is released or it is allocating: 2 minutes.
const TRIES_MAX: u32 = 60_000;
/// `CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS`, the only flag.
const LAZY_PEERS: c_uint = 1;
/// `CUDA_ERROR_MAP_FAILED`.
const MAP_FAILED: c_int = 205;

/// `CUipcMemHandle`: 64 bytes without alignment.
#[derive(Clone, Copy)]
#[repr(C, packed)]
pub struct IpcHandle {
    magic: u64,
    token: [u8; 32],
    id: u64,
    owner: u32,
    reserved: [u32; 3],
}

const _: () = assert!(size_of::<IpcHandle>() == 64);

type Get = unsafe extern "C" fn(*mut IpcHandle, u64) -> c_int;
type Open = unsafe extern "C" fn(*mut u64, IpcHandle, c_uint) -> c_int;
type Close = unsafe extern "C" fn(u64) -> c_int;
type ExportPool = unsafe extern "C" fn(*mut c_void, usize, c_int, u64) -> c_int;
type ImportPool = unsafe extern "C" fn(*mut usize, *mut c_void, c_int, u64) -> c_int;

/// Implements `cuIpcGetMemHandle`.
///
/// # Safety
/// The same as for `cuIpcGetMemHandle`, which is `real`.
pub unsafe fn get_handle(real: Get, handle: *mut IpcHandle, address: u64) -> c_int {
    let entry = match SEGMENTS.load(Ordering::Acquire) {
        _ if handle.is_null() => None,
        0 => None,
        _ => lend(address),
    };
    let Some(entry) = entry else {
        // SAFETY: by the contract above.
        return report(&SHARES, unsafe { real(handle, address) });
    };
    let ours = IpcHandle {
        magic: HANDLE_MAGIC,
        token: interpose::token(),
        id: entry.id,
        // SAFETY: has no arguments.
        owner: unsafe { sys::getpid() }.unsigned_abs(),
        reserved: [0; 3],
    };
    // SAFETY: by the contract above.
    unsafe { handle.write(ours) };
    driver::SUCCESS
}

/// Returns the piece that contains the address, and marks it as shared.
fn lend(address: u64) -> Option<Entry> {
    let mut state = STATE.lock();
    let start = state.table.around(address)?.address;
    let position = state.table.at(start)?;
    let entry = state.table.entries_mut().get_mut(position)?;
    // Opened memory cannot be shared again, as with the driver's own IPC.
    if entry.owner != 0 {
        return None;
    }
    entry.lent = true;
    LENDS.store(true, Ordering::Relaxed);
    Some(*entry)
}

/// Sets a flag about memory that the agent does not follow, if the call succeeded, and informs the supervisor.
pub fn report(flag: &AtomicBool, code: c_int) -> c_int {
    if code == driver::SUCCESS && service::is_ready() {
        flag.store(true, Ordering::Relaxed);
        let _state = STATE.lock();
        // Without the thread the supervisor is not informed, and the job continues as without the agent.
        let _ = service::start();
    }
    code
}

/// Implements `cuIpcOpenMemHandle_v2`.
///
/// # Safety
/// The same as for `cuIpcOpenMemHandle_v2`, which is `real`.
pub unsafe fn open_handle(real: Open, out: *mut u64, handle: IpcHandle, flags: c_uint) -> c_int {
    if handle.magic != HANDLE_MAGIC || handle.token != interpose::token() {
        // SAFETY: by the contract above.
        return report(&SHARES, unsafe { real(out, handle, flags) });
    }
    if out.is_null() || flags != LAZY_PEERS {
        return driver::INVALID_VALUE;
    }
    match open(&handle) {
        Ok(address) => {
            // SAFETY: by the contract above.
            unsafe { *out = address };
            driver::SUCCESS
        }
        Err(code) => code,
    }
}

fn open(handle: &IpcHandle) -> Result<u64, c_int> {
    // SAFETY: has no arguments.
    let itself = unsafe { sys::getpid() }.unsigned_abs();
    if handle.owner == itself || !service::is_ready() {
        return Err(driver::INVALID_CONTEXT);
    }
    let (context, device) = current().ok_or(driver::INVALID_CONTEXT)?;
    if let Some(address) = open_again(handle, context) {
        return Ok(address);
    }
    // Not under the lock, because the other process may be sending a request to this one.
    let (mut incoming, reply, segment) = ask(handle)?;
    let entry = Entry {
        len: segment.len,
        asked: reply.bytes.min(segment.len),
        context,
        id: handle.id,
        owner: handle.owner.cast_signed(),
        opened: 1,
        ..Entry::NONE
    };
    let descriptor = incoming.take(0);
    let mut state = STATE.lock();
    let made = open_now(&mut state, entry, device, descriptor);
    if made.is_err() {
        // SAFETY: received and not taken out.
        unsafe { sys::close(descriptor) };
    }
    made
}

/// Returns the existing mapping if this context has opened the handle before.
fn open_again(handle: &IpcHandle, context: usize) -> Option<u64> {
    let mut state = STATE.lock();
    let owner = handle.owner.cast_signed();
    let is_it = |entry: &&mut Entry| {
        entry.owner == owner && entry.id == handle.id && entry.context == context
    };
    let entry = state.table.entries_mut().iter_mut().find(is_it)?;
    entry.opened += 1;
    Some(entry.address)
}

/// Imports and maps the memory. The descriptor is kept, because imported memory cannot be exported.
fn open_now(
    state: &mut State,
    mut entry: Entry,
    device: c_int,
    descriptor: c_int,
) -> Result<u64, c_int> {
    service::start().ok_or(MAP_FAILED)?;
    if state.table.is_full() {
        return Err(driver::OUT_OF_MEMORY);
    }
    let imported = import(descriptor)?;
    let mut properties = Properties::new(device, false);
    // SAFETY: there is room for the result. If the device is not reported, the current one is assumed.
    let told = check(unsafe { driver::properties(&raw mut properties, imported) });
    entry.device = told.map_or(device, |()| properties.device());
    let owner = entry.device;
    let is_new_peer = owner != device && state.devices.add_peer(owner, device);
    let mut is_given = false;
    let made = memory::make(state, entry, |handle, _| {
        is_given = true;
        // SAFETY: there is room for it.
        unsafe { *handle = imported };
        Ok(())
    });
    if !is_given {
        // SAFETY: imported above; if `make` failed, it has released the handle.
        unsafe { driver::release(imported) };
    }
    if made.is_err() && is_new_peer {
        // If the driver refuses this access, it would also refuse it for all later allocations there.
        state.devices.remove_peer(owner, device);
    }
    let mut entry = made?;
    entry.descriptor = datagram::move_up(descriptor);
    LENDS.store(true, Ordering::Relaxed);
    state.insert(entry);
    Ok(entry.address)
}

/// Asks the process that owns the memory until it replies.
fn ask(handle: &IpcHandle) -> Result<(Incoming, Reply, Segment), c_int> {
    let to = datagram::agent(&handle.token, handle.owner).ok_or(driver::INVALID_VALUE)?;
    // Without a path, the kernel chooses a name.
    let nameless = Peer {
        address: Address {
            family: u16::try_from(sys::AF_UNIX).unwrap_or(0),
            path: [0; 108],
        },
        len: 2,
    };
    let socket = service::new_socket(&nameless).ok_or(MAP_FAILED)?;
    service::set(socket, sys::SO_RCVTIMEO, &[ANSWER_S, 0]);
    let mut result = Err(MAP_FAILED);
    for serial in 0..TRIES_MAX {
        result = ask_once(socket, &to, handle, u64::from(serial));
        if !matches!(
            result,
            Ok((
                _,
                Reply {
                    status: wire::BUSY,
                    ..
                },
                _
            ))
        ) {
            break;
        }
        sys::pause_ms(2);
    }
    // SAFETY: owned by the agent.
    unsafe { sys::close(socket) };
    let (incoming, reply, segment) = result?;
    let is_whole = reply.status == wire::MORE && incoming.count() == 1 && segment.len != 0;
    if is_whole {
        Ok((incoming, reply, segment))
    } else {
        Err(driver::INVALID_VALUE)
    }
}

fn ask_once(
    socket: c_int,
    to: &Peer,
    handle: &IpcHandle,
    serial: u64,
) -> Result<(Incoming, Reply, Segment), c_int> {
    let request = Request {
        magic: MAGIC,
        version: VERSION,
        kind: wire::SHARE,
        first: u32::try_from(handle.id & u64::from(u32::MAX)).unwrap_or(0),
        count: u32::try_from(handle.id >> 32).unwrap_or(0),
        reserved: 0,
        serial,
    };
    if !datagram::send_request(socket, to, &request) {
        return Err(driver::INVALID_VALUE);
    }
    loop {
        let incoming = match datagram::receive(socket) {
            Ok(incoming) => incoming,
            Err(sys::EINTR) => continue,
            Err(_) => return Err(MAP_FAILED),
        };
        let Some((reply, segment)) = incoming.shared() else {
            continue;
        };
        let is_answer = reply.magic == MAGIC && reply.version == VERSION && reply.serial == serial;
        // The final OK after a segment carries no information.
        if is_answer && service::is_trusted(&incoming) && reply.kind == wire::SHARE {
            return Ok((incoming, reply, segment));
        }
    }
}

/// Implements `cuIpcCloseMemHandle`.
///
/// # Safety
/// The same as for `cuIpcCloseMemHandle`, which is `real`.
pub unsafe fn close_handle(real: Close, address: u64) -> c_int {
    match close(address) {
        Some(Ok(())) => driver::SUCCESS,
        Some(Err(code)) => code,
        // SAFETY: by the contract above.
        None => unsafe { real(address) },
    }
}

/// Closes memory that was opened here; `None` if it was not.
fn close(address: u64) -> Option<Result<(), c_int>> {
    if SEGMENTS.load(Ordering::Acquire) == 0 {
        return None;
    }
    let find = |state: &State| {
        let position = state.table.at(address)?;
        let entry = *state.table.entries().get(position)?;
        (entry.owner != 0).then_some((position, entry))
    };
    let (_, entry) = find(&STATE.lock())?;
    // Outside the lock, as in `free`.
    if let Err(code) = synchronize(entry.context) {
        return Some(Err(code));
    }
    let mut state = STATE.lock();
    let (position, entry) = find(&state)?;
    if entry.opened > 1 {
        state.table.entries_mut()[position].opened -= 1;
        return Some(Ok(()));
    }
    Some(tear_down(&entry).map(|()| state.remove(position)))
}

/// Implements `cuMemPoolExportToShareableHandle`: the memory of pools stays the driver's.
///
/// # Safety
/// The same as for `cuMemPoolExportToShareableHandle`, which is `real`.
pub unsafe fn export_pool(
    real: ExportPool,
    out: *mut c_void,
    pool: usize,
    kind: c_int,
    flags: u64,
) -> c_int {
    // SAFETY: by the contract above.
    report(&SHARES, unsafe { real(out, pool, kind, flags) })
}

/// Implements `cuMemPoolImportFromShareableHandle`: the pool is another process's.
///
/// # Safety
/// The same as for `cuMemPoolImportFromShareableHandle`, which is `real`.
pub unsafe fn import_pool(
    real: ImportPool,
    out: *mut usize,
    handle: *mut c_void,
    kind: c_int,
    flags: u64,
) -> c_int {
    // SAFETY: by the contract above.
    report(&SHARES, unsafe { real(out, handle, kind, flags) })
}
