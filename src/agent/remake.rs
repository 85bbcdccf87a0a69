//! Memory made anew for a process that the driver has restored onto another GPU.
//!
//! ```text
//! released ── create, map: all or nothing ──▶ mapped, the process's own ── descriptors ──▶ who fills it
//! ```
//! The driver in such a process knows the GPUs of its start, and imports no memory of others (580.159.04: error 3);
//! what it creates lies on the new GPU. Memory that is let go of there could not be given back in any other way, so
//! from then on the driver alone keeps it: [`MOVED`].

use core::ffi::c_int;
use core::sync::atomic::AtomicBool;

use super::driver::{self, Properties, check};
use super::hand_over::Failure;
use super::memory::{self, State, length};
use super::probe::enter;
use super::table::Entry;

/// Set when a GPU has taken the place of another.
pub static MOVED: AtomicBool = AtomicBool::new(false);

/// Makes memory for every entry, at its address. None has any.
pub fn make_all(state: &mut State) -> Result<(), Failure> {
    // What is another process's cannot be made here, and what was mapped from a descriptor is there.
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
    let properties = Properties::new(entry.device, rdma);
    let len = length(&entry);
    // SAFETY: there is room for the answer, and the properties are whole.
    check(unsafe { driver::create(&raw mut entry.handle, len, &raw const properties, 0) })?;
    memory::map(state, &mut entry).inspect_err(|_| {
        // SAFETY: created above, and not mapped.
        unsafe { driver::release(entry.handle) };
    })?;
    Ok(entry)
}

/// Gives back what was made; then the failure is as it was.
pub fn undo(state: &mut State, failure: Failure) -> Failure {
    for entry in state.table.entries_mut().iter_mut() {
        if !entry.mapped {
            continue;
        }
        // SAFETY: mapped there, and nothing used it yet.
        let unmap = || check(unsafe { driver::unmap(entry.address, length(entry)) });
        if let Err(code) = enter(entry).and_then(|()| unmap()) {
            return Failure::Lost(code);
        }
        // SAFETY: ours, not mapped, and given up here.
        unsafe { driver::release(entry.handle) };
        entry.mapped = false;
    }
    failure
}
