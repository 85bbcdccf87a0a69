//! Release of all device memory for a snapshot, and its return.
//!
//! ```text
//!          RELEASE: send descriptors → unmap all → release imported → release own → close descriptors
//! mapped ────────────────────────────────────────────────────────────────────────────────────────────▶ released
//!        ◀────────────────────────────────────────────────────────────────────────────────────────────
//!          MAP, once per batch: import → map → set access → keep the descriptor
//!          REMAKE, on another GPU: create → map → set access → send descriptors
//! ```
//! This module holds the lock while memory is released. A thread of the job that allocates memory meanwhile waits for
//! the lock before it calls the driver, so it never holds a lock of the driver that MAP needs. All other threads are
//! stopped during a request; if one of them holds the lock, the reply is BUSY.
//!
//! A failure before the last unmapping is undone with the handles, which are still held. Descriptors of imported memory
//! stay open until all imported memory is released. The process's own memory is released last. A failure there is
//! harmless: the driver's checkpoint saves own memory, but fails and loses the process if it holds imported memory
//! (driver 580).

use core::ffi::{c_int, c_void};
use core::sync::atomic::{AtomicBool, Ordering};
use core::{ptr, slice};

use super::datagram::{self, Incoming, NO_SEGMENT, Outgoing};
use super::driver::{self, check};
use super::gate;
use super::lock::Guard;
use super::memory::{self, BYTES, IMPORTED, SEGMENTS, STATE, State};
use super::probe::{enter, leave, probe_devices};
use super::remake::{self, MOVED};
use super::sys;
use super::table::Entry;
use super::transmission::{send_batch, send_holdings, send_origins};
use super::wire::{self, BATCH_MAX, MAGIC, Reply, Request, VERSION};

/// Set after the job shared the driver's own memory with another process.
pub static SHARES: AtomicBool = AtomicBool::new(false);
/// Set after the job mapped memory in a way that the agent does not follow.
pub static OPAQUE: AtomicBool = AtomicBool::new(false);
/// Set after the job shared the agent's memory with another process.
pub static LENDS: AtomicBool = AtomicBool::new(false);

/// Reason why a request failed.
pub enum Failure {
    Busy,
    Refused,
    /// The driver returned this code; all changes were undone.
    Driver(c_int),
    /// The driver returned this code; memory is missing.
    Lost(c_int),
}

/// State of the agent's thread between requests.
pub struct HandOver {
    /// Lock, held while memory is released.
    released: Option<Guard<'static, State>>,
}

impl HandOver {
    pub const fn new() -> Self {
        Self { released: None }
    }

    /// Carries out a request and sends the result.
    pub fn answer(&mut self, socket: c_int, mut incoming: Incoming) {
        let Some(request) = incoming.request() else {
            return;
        };
        let done = if request.version == VERSION {
            self.carry_out(socket, &request, &mut incoming)
        } else {
            Err(Failure::Refused)
        };
        leave();
        let (status, code) = match done {
            Ok(()) => (wire::OK, 0),
            Err(Failure::Busy) => (wire::BUSY, 0),
            Err(Failure::Refused) => (wire::REFUSED, 0),
            Err(Failure::Driver(code)) => (wire::DRIVER, code),
            Err(Failure::Lost(code)) => (wire::LOST, code),
        };
        let answer = self.outgoing(&request, status, code);
        datagram::send(socket, &incoming.from, &answer);
    }

    fn carry_out(
        &mut self,
        socket: c_int,
        request: &Request,
        incoming: &mut Incoming,
    ) -> Result<(), Failure> {
        match request.kind {
            wire::HELLO => Ok(()),
            wire::PROBE => self.probe(),
            wire::RELEASE => self.release(socket, request, incoming),
            wire::MAP => self.map(request, incoming),
            wire::REMAKE => self.remake(socket, request, incoming),
            wire::SHARE => self.share(socket, request, incoming),
            wire::ORIGINS => {
                let mut answer = self.outgoing(request, wire::MORE, 0);
                self.look(|state| {
                    send_origins(socket, incoming, state.table.entries(), &mut answer)
                })
            }
            wire::HOLDINGS => {
                let mut answer = self.outgoing(request, wire::MORE, 0);
                self.look(|state| send_holdings(socket, incoming, state, &mut answer))
            }
            wire::HOLD => {
                gate::close();
                Ok(())
            }
            wire::PASS => {
                gate::open();
                Ok(())
            }
            _ => Err(Failure::Refused),
        }
    }

    fn outgoing(&self, request: &Request, status: u32, code: c_int) -> Outgoing {
        let flag = |is_set: bool, flag| if is_set { flag } else { 0 };
        let total = SEGMENTS.load(Ordering::Relaxed);
        let released = self.released.is_some();
        let imported = released || IMPORTED.load(Ordering::Relaxed) != 0;
        Outgoing {
            reply: Reply {
                magic: MAGIC,
                version: VERSION,
                kind: request.kind,
                status,
                code,
                thread: sys::thread(),
                first: 0,
                count: 0,
                total: u32::try_from(total).unwrap_or(u32::MAX),
                flags: flag(released, wire::RELEASED)
                    | flag(imported, wire::IMPORTED)
                    | flag(SHARES.load(Ordering::Relaxed), wire::SHARES)
                    | flag(LENDS.load(Ordering::Relaxed), wire::LENDS)
                    | flag(OPAQUE.load(Ordering::Relaxed), wire::OPAQUE)
                    | flag(MOVED.load(Ordering::Relaxed), wire::MOVED),
                bytes: BYTES.load(Ordering::Relaxed),
                serial: request.serial,
            },
            segments: [NO_SEGMENT; BATCH_MAX],
            descriptors: [-1; BATCH_MAX],
        }
    }

    /// Tests whether the driver is callable. If a stopped thread is inside the driver, the call may block, and then
    /// there is no reply.
    fn probe(&mut self) -> Result<(), Failure> {
        if let Some(state) = &mut self.released {
            return probe_devices(state).map_err(Failure::Driver);
        }
        let mut state = STATE.try_lock().ok_or(Failure::Busy)?;
        probe_devices(&mut state).map_err(Failure::Driver)?;
        if MOVED.load(Ordering::Relaxed) {
            return Err(Failure::Refused);
        }
        Ok(())
    }

    fn release(
        &mut self,
        socket: c_int,
        request: &Request,
        incoming: &Incoming,
    ) -> Result<(), Failure> {
        if self.released.is_some() {
            return Ok(());
        }
        if MOVED.load(Ordering::Relaxed) {
            return Err(Failure::Refused);
        }
        let mut state = STATE.try_lock().ok_or(Failure::Busy)?;
        if state.table.entries().is_empty() {
            // Without memory there would be no MAP, and the lock would never be released.
            return Ok(());
        }
        self.send_all(&state, socket, request, incoming)?;
        unmap_all(&mut state)?;
        release_imported(&mut state)?;
        for entry in state.table.entries_mut() {
            if entry.descriptor < 0 {
                // SAFETY: owned by the agent, not mapped, and not used after this.
                unsafe { driver::release(entry.handle) };
            } else {
                // SAFETY: owned by the agent; the supervisor has its own copy.
                unsafe { sys::close(entry.descriptor) };
                entry.descriptor = -1;
                IMPORTED.fetch_sub(1, Ordering::Relaxed);
            }
        }
        self.released = Some(state);
        Ok(())
    }

    /// Sends all segments, each with a descriptor of its memory.
    fn send_all(
        &self,
        state: &State,
        socket: c_int,
        request: &Request,
        incoming: &Incoming,
    ) -> Result<(), Failure> {
        for (number, batch) in state.table.entries().chunks(BATCH_MAX).enumerate() {
            let mut answer = self.outgoing(request, wire::MORE, 0);
            answer.reply.first = u32::try_from(number * BATCH_MAX).unwrap_or(u32::MAX);
            send_batch(socket, incoming, batch, &mut answer)?;
        }
        Ok(())
    }

    /// Creates new memory in place of the released memory.
    fn remake(
        &mut self,
        socket: c_int,
        request: &Request,
        incoming: &Incoming,
    ) -> Result<(), Failure> {
        let Some(mut state) = self.released.take() else {
            let state = STATE.try_lock().ok_or(Failure::Busy)?;
            // The request was already carried out, or there is nothing to create.
            if MOVED.load(Ordering::Relaxed) || state.table.entries().is_empty() {
                return self.send_all(&state, socket, request, incoming);
            }
            return Err(Failure::Refused);
        };
        let made = remake::make_all(&mut state).and_then(|()| {
            let sent = self.send_all(&state, socket, request, incoming);
            sent.map_err(|failure| remake::undo(&mut state, failure))
        });
        match made {
            Ok(()) => MOVED.store(true, Ordering::Relaxed),
            Err(_) => self.released = Some(state),
        }
        made
    }

    /// Sends a segment that another process of the job opens. That process must wait while memory is released.
    fn share(
        &mut self,
        socket: c_int,
        request: &Request,
        incoming: &Incoming,
    ) -> Result<(), Failure> {
        if self.released.is_some() {
            return Err(Failure::Busy);
        }
        let state = STATE.try_lock().ok_or(Failure::Busy)?;
        let id = u64::from(request.count) << 32 | u64::from(request.first);
        let is_asked = |entry: &&Entry| entry.owner == 0 && entry.id == id;
        let entry = state.table.entries().iter().find(is_asked);
        let entry = entry.ok_or(Failure::Refused)?;
        let mut answer = self.outgoing(request, wire::MORE, 0);
        answer.reply.bytes = entry.asked;
        send_batch(socket, incoming, slice::from_ref(entry), &mut answer)
    }

    /// Reads the state, whether memory is released or not.
    fn look(&self, report: impl FnOnce(&State) -> Result<(), Failure>) -> Result<(), Failure> {
        match &self.released {
            Some(state) => report(state),
            None => report(&*STATE.try_lock().ok_or(Failure::Busy)?),
        }
    }

    fn map(&mut self, request: &Request, incoming: &mut Incoming) -> Result<(), Failure> {
        if incoming.is_cut {
            datagram::make_room();
            return Err(Failure::Busy);
        }
        let (first, count) = (request.first as usize, request.count as usize);
        let end = first.checked_add(count).ok_or(Failure::Refused)?;
        let total = SEGMENTS.load(Ordering::Relaxed);
        if count == 0 || count != incoming.count() || end > total {
            return Err(Failure::Refused);
        }
        // Memory that is not released is mapped: the request was already carried out.
        let Some(state) = &mut self.released else {
            return Ok(());
        };
        let was = core::array::from_fn::<bool, BATCH_MAX, _>(|index| {
            let entry = state.table.entries().get(first + index);
            entry.is_none_or(|entry| entry.mapped)
        });
        for index in (0..count).filter(|index| !was[*index]) {
            let position = first + index;
            if let Err(code) = take_back(state, position, incoming.take(index)) {
                for done in (0..index).filter(|done| !was[*done]) {
                    let_go(state, first + done);
                }
                return Err(Failure::Driver(code));
            }
        }
        if state.table.entries().iter().all(|entry| entry.mapped) {
            self.released = None;
        }
        Ok(())
    }
}

/// Unmaps all memory, or none.
fn unmap_all(state: &mut State) -> Result<(), Failure> {
    for position in 0..state.table.entries().len() {
        let mut entry = state.table.entries()[position];
        let done = enter(&entry).and_then(|()| memory::unmap(state, &mut entry));
        state.table.entries_mut()[position] = entry;
        if let Err(code) = done {
            return Err(undo(state, code));
        }
    }
    Ok(())
}

/// Releases all imported memory, or none.
fn release_imported(state: &mut State) -> Result<(), Failure> {
    for position in 0..state.table.entries().len() {
        let entry = &state.table.entries()[position];
        if entry.descriptor < 0 {
            continue;
        }
        // SAFETY: owned by the agent, not mapped, and not used after this.
        if let Err(code) = check(unsafe { driver::release(entry.handle) }) {
            for before in 0..position {
                if let Err(code) = import_again(&mut state.table.entries_mut()[before]) {
                    return Err(Failure::Lost(code));
                }
            }
            return Err(undo(state, code));
        }
    }
    Ok(())
}

fn import_again(entry: &mut Entry) -> Result<(), c_int> {
    if entry.descriptor < 0 {
        return Ok(());
    }
    enter(entry)?;
    entry.handle = import(entry.descriptor)?;
    Ok(())
}

/// Maps the unmapped memory again, by the handles that are still held.
fn undo(state: &mut State, code: c_int) -> Failure {
    for position in 0..state.table.entries().len() {
        let mut entry = state.table.entries()[position];
        if entry.mapped {
            continue;
        }
        if let Err(code) = enter(&entry).and_then(|()| memory::map(state, &mut entry)) {
            return Failure::Lost(code);
        }
        state.table.entries_mut()[position] = entry;
    }
    Failure::Driver(code)
}

pub fn import(descriptor: c_int) -> Result<u64, c_int> {
    let mut handle = 0;
    let value: *mut c_void =
        ptr::without_provenance_mut(usize::try_from(descriptor).unwrap_or(usize::MAX));
    // SAFETY: there is room for the result; the driver takes the descriptor by value.
    check(unsafe { driver::import(&raw mut handle, value, driver::DESCRIPTOR) })?;
    Ok(handle)
}

/// Maps the memory of a descriptor at the entry's address, and keeps the descriptor.
fn take_back(state: &mut State, position: usize, descriptor: c_int) -> Result<(), c_int> {
    let mut entry = state.table.entries()[position];
    let mapped = enter(&entry).and_then(|()| {
        entry.handle = import(descriptor)?;
        memory::map(state, &mut entry).inspect_err(|_| {
            // SAFETY: imported above, and not mapped.
            unsafe { driver::release(entry.handle) };
        })
    });
    if let Err(code) = mapped {
        // SAFETY: received and not taken out.
        unsafe { sys::close(descriptor) };
        return Err(code);
    }
    entry.descriptor = datagram::move_up(descriptor);
    state.table.entries_mut()[position] = entry;
    IMPORTED.fetch_add(1, Ordering::Relaxed);
    Ok(())
}

/// Undoes [`take_back`]. Memory that the driver fails to unmap stays marked as mapped.
fn let_go(state: &mut State, position: usize) {
    let mut entry = state.table.entries()[position];
    let done = enter(&entry).and_then(|()| memory::unmap(state, &mut entry));
    if done.is_ok() {
        // SAFETY: owned by the agent, not mapped, and not used after this.
        unsafe { driver::release(entry.handle) };
        // SAFETY: owned by the agent.
        unsafe { sys::close(entry.descriptor) };
        entry.descriptor = -1;
        IMPORTED.fetch_sub(1, Ordering::Relaxed);
    }
    state.table.entries_mut()[position] = entry;
}
