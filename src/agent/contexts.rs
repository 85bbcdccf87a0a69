//! Context operations of the job that concern the agent's memory: destruction, and access of one GPU to another's
//! memory.

use core::ffi::{c_int, c_uint};
use core::sync::atomic::Ordering;

use super::driver::{self, Access, check};
use super::memory::{SEGMENTS, STATE, current, length, within};

type OnContext = unsafe extern "C" fn(usize) -> c_int;
type OnDevice = unsafe extern "C" fn(c_int) -> c_int;
type EnablePeer = unsafe extern "C" fn(usize, c_uint) -> c_int;

/// Implements `cuCtxDestroy`, which also frees the context's allocations.
///
/// # Safety
/// The same as for `cuCtxDestroy_v2`, which is `real`.
pub unsafe fn destroy(real: OnContext, context: usize) -> c_int {
    // SAFETY: by the contract above.
    let code = unsafe { real(context) };
    if code == driver::SUCCESS && SEGMENTS.load(Ordering::Acquire) != 0 {
        STATE.lock().forget(|entry| entry.context == context);
    }
    code
}

/// Implements `cuDevicePrimaryCtxReset` and `cuDevicePrimaryCtxRelease`; the latter ends the context with its last
/// user.
///
/// # Safety
/// The same as for the driver's function, which is `real`.
pub unsafe fn reset(real: OnDevice, device: c_int) -> c_int {
    let context = primary_with_memory(device);
    // SAFETY: by the contract above.
    let code = unsafe { real(device) };
    if code == driver::SUCCESS
        && let Some(context) = context
        && !is_active(device)
    {
        STATE.lock().forget(|entry| entry.context == context);
    }
    code
}

/// Returns the device's primary context if the agent's memory may be in it.
fn primary_with_memory(device: c_int) -> Option<usize> {
    if SEGMENTS.load(Ordering::Acquire) == 0 || !is_active(device) {
        return None;
    }
    let is_here = |entry: &super::table::Entry| entry.device == device;
    if !STATE.lock().table.entries().iter().any(is_here) {
        return None;
    }
    let mut context = 0;
    // SAFETY: there is room for the result. The context is active, so nothing is initialized.
    check(unsafe { driver::primary_retain(&raw mut context, device) }).ok()?;
    // SAFETY: retained above.
    unsafe { driver::primary_release(device) };
    Some(context)
}

fn is_active(device: c_int) -> bool {
    let (mut flags, mut active) = (0, 0);
    // SAFETY: there is room for both results.
    let code = unsafe { driver::primary_state(device, &raw mut flags, &raw mut active) };
    code == driver::SUCCESS && active != 0
}

/// Implements `cuCtxEnablePeerAccess`, which gives the current device access to the peer's memory. If this succeeds for
/// the driver's own memory but not for the agent's, the job gets an error and copies in another way.
///
/// # Safety
/// The same as for the driver's function, which is `real`.
pub unsafe fn enable_peer(real: EnablePeer, peer: usize, flags: c_uint) -> c_int {
    // SAFETY: by the contract above.
    let code = unsafe { real(peer, flags) };
    if code == driver::SUCCESS && super::service::is_ready() && open_to_current(peer).is_err() {
        return driver::PEER_ACCESS_UNSUPPORTED;
    }
    code
}

fn open_to_current(peer: usize) -> Result<(), c_int> {
    let (_, device) = current().ok_or(driver::INVALID_VALUE)?;
    let (_, owner) = within(peer, || current().ok_or(driver::INVALID_VALUE))?;
    let mut state = STATE.lock();
    let access = Access::full(device);
    for entry in state.table.entries() {
        // A program gives access to its own pieces itself.
        if entry.device == owner && entry.mapped && !entry.is_programs() {
            // SAFETY: the entry is mapped there.
            check(unsafe {
                driver::set_access(entry.address, length(entry), &raw const access, 1)
            })?;
        }
    }
    state.devices.add_peer(owner, device);
    Ok(())
}
