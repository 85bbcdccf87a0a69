//! Use of the driver by the agent's thread: its current context, and a test whether the driver is callable.

use core::ffi::c_int;
use core::sync::atomic::{AtomicBool, Ordering};

use super::driver::{self, Access, Properties, check};
use super::memory::{State, length};
use super::remake::MOVED;
use super::table::Entry;

/// True if a context of the job is current in the agent's thread.
static ENTERED: AtomicBool = AtomicBool::new(false);

/// Makes the entry's context current. Switching is cheap, and most processes have one context.
pub fn enter(entry: &Entry) -> Result<(), c_int> {
    ENTERED.store(true, Ordering::Relaxed);
    // SAFETY: the driver refuses a context that no longer exists.
    check(unsafe { driver::context_set(entry.context) })
}

/// Detaches the thread from its context. Calls the driver only if it was called before, because the call may block.
pub fn leave() {
    if ENTERED.swap(false, Ordering::Relaxed) {
        // SAFETY: makes no context current.
        unsafe { driver::context_set(0) };
    }
}

/// Calls the same driver functions as a release and a mapping, for a granule on each device that has memory of the
/// agent, and checks whether the device is still the same.
pub fn probe_devices(state: &mut State) -> Result<(), c_int> {
    let mut seen = 0u64;
    for position in 0..state.table.entries().len() {
        let entry = state.table.entries()[position];
        if seen >> entry.device & 1 == 0 {
            seen |= 1 << entry.device;
            enter(&entry)?;
            probe_device(state, &entry)?;
            if state.devices.has_moved(entry.device)? {
                MOVED.store(true, Ordering::Relaxed);
            }
        }
    }
    Ok(())
}

fn probe_device(state: &mut State, entry: &Entry) -> Result<(), c_int> {
    let Some((granule, rdma)) = state.devices.known(entry.device) else {
        return Ok(());
    };
    let (mut address, mut handle) = (0, 0);
    // SAFETY: there is room for the result.
    check(unsafe { driver::reserve(&raw mut address, granule, 0, 0, 0) })?;
    let properties = Properties::new(entry.device, rdma);
    // SAFETY: there is room for the result, and the properties are complete.
    let mut code = unsafe { driver::create(&raw mut handle, granule, &raw const properties, 0) };
    if code == driver::SUCCESS {
        // SAFETY: reserved and created above.
        code = unsafe { driver::map(address, granule, 0, handle, 0) };
        if code == driver::SUCCESS {
            // SAFETY: mapped above.
            code = unsafe { driver::unmap(address, granule) };
        }
        // SAFETY: created above.
        unsafe { driver::release(handle) };
    } else if code == driver::OUT_OF_MEMORY {
        // The GPU is full: instead, an existing mapping gets the access that it already has.
        code = driver::SUCCESS;
        if entry.mapped && !entry.is_programs() {
            let access = Access::full(entry.device);
            // SAFETY: mapped there.
            code =
                unsafe { driver::set_access(entry.address, length(entry), &raw const access, 1) };
        }
    }
    // SAFETY: nothing is mapped there any more.
    unsafe { driver::address_free(address, granule) };
    check(code)
}
