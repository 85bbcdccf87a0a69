//! Creation of new memory for a process that the driver has restored onto another GPU.
//!
//! ```text
//! released ── create, map: all or nothing ──▶ mapped, the process's own ── descriptors ──▶ copier
//! ```
//! The driver in such a process still refers to the GPUs at its start and cannot import memory of others (580.159.04:
//! error 3), but memory that it creates is on the new GPU. Released memory could not be returned in any other way, so
//! from then on only the driver saves it: [`MOVED`].

use core::ffi::c_int;
use core::sync::atomic::AtomicBool;

use super::driver::{self, Properties, check};
use super::hand_over::Failure;
use super::memory::{self, State, length};
use super::probe::enter;
use super::table::Entry;

/// Set after another GPU has replaced one of the process's.
pub static MOVED: AtomicBool = AtomicBool::new(false);

/// Creates memory for every entry at its address. No entry may have memory.
pub fn make_all(state: &mut State) -> Result<(), Failure> {
    // Another process's memory cannot be created here, and memory that was mapped from a descriptor exists already.
    let cannot = |entry: &Entry| entry.mapped || entry.owner != 0;
    if state.table.entries().iter().any(cannot) {
        return Err(Failure::Refused);
    }
    state.devices.ask_anew();
    for position in 0..state.table.entries().len() {
        let entry = state.table.entries()[position];
        match make(state, entry) {
            Ok(entry) => state.table.entries_mut()[position] = entry,
            Err(code) => return Err(undo(state, Failure::Driver(code))),
        }
    }
    Ok(())
}

fn make(state: &mut State, mut entry: Entry) -> Result<Entry, c_int> {
    enter(&entry)?;
    let (_, rdma) = state
        .devices
        .known(entry.device)
        .ok_or(driver::INVALID_VALUE)?;
    let rdma = if entry.is_programs() {
        entry.rdma
    } else {
        rdma
    };
    let properties = Properties::new(entry.device, rdma);
    let len = length(&entry);
    // SAFETY: there is room for the result, and the properties are complete.
    check(unsafe { driver::create(&raw mut entry.handle, len, &raw const properties, 0) })?;
    memory::map(state, &mut entry).inspect_err(|_| {
        // SAFETY: created above, and not mapped.
        unsafe { driver::release(entry.handle) };
    })?;
    Ok(entry)
}

/// Releases the created memory and returns the failure.
pub fn undo(state: &mut State, failure: Failure) -> Failure {
    for position in 0..state.table.entries().len() {
        let mut entry = state.table.entries()[position];
        if !entry.mapped {
            continue;
        }
        if let Err(code) = enter(&entry).and_then(|()| memory::unmap(state, &mut entry)) {
            return Failure::Lost(code);
        }
        // SAFETY: owned by the agent, not mapped, and not used after this.
        unsafe { driver::release(entry.handle) };
        state.table.entries_mut()[position] = entry;
    }
    failure
}
