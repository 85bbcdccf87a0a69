//! `cuMemAlloc` on memory that another process can keep, and what else belongs to the life of such a piece.
//!
//! ```text
//! cuMemAlloc   reserve → create → map → set access          any failure: undone, and the driver's own cuMemAlloc
//! cuMemFree    synchronise → unmap → release → free address
//! ```
//! The job sees no difference: what is not one of ours, and every error, is answered by the driver itself.

use core::ffi::c_int;
use core::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use super::devices::{DEVICES_MAX, Devices};
use super::driver::{self, Access, Properties, check};
use super::lock::{Guard, Lock};
use super::sys;
use super::table::{Entry, Table};
use super::talk;

/// Smaller pieces stay the driver's: it packs many into one of its granules.
const COVERED_MIN: usize = 2 << 20;
/// The rounding to whole granules may waste this part of what was asked for.
const WASTE_PARTS: usize = 8;

/// State of the agent.
pub struct State {
    pub table: Table,
    pub devices: Devices,
    /// 0: none was given yet.
    next_id: u64,
}

pub static STATE: Lock<State> = Lock::new(State {
    table: Table::new(),
    devices: Devices::new(),
    next_id: 0,
});
/// Pieces, bytes and pieces that came from elsewhere, for who cannot have the lock.
pub static SEGMENTS: AtomicUsize = AtomicUsize::new(0);
pub static BYTES: AtomicU64 = AtomicU64::new(0);
pub static IMPORTED: AtomicUsize = AtomicUsize::new(0);

/// # Safety
/// As `cuMemAlloc_v2`, which is `real`.
pub unsafe fn allocate(
    real: unsafe extern "C" fn(*mut u64, usize) -> c_int,
    out: *mut u64,
    len: usize,
) -> c_int {
    if len >= COVERED_MIN
        && !out.is_null()
        && let Some(address) = covered(len)
    {
        // SAFETY: by the contract above.
        unsafe { *out = address };
        return driver::SUCCESS;
    }
    // SAFETY: by the contract above.
    unsafe { real(out, len) }
}

/// A piece of our own, unless something speaks against it.
fn covered(asked: usize) -> Option<u64> {
    if !talk::is_ready() {
        return None;
    }
    let (context, device) = current()?;
    let mut state = STATE.lock();
    if state.table.is_full() {
        return None;
    }
    let (granularity, rdma) = state.devices.known(device)?;
    let len = asked.checked_next_multiple_of(granularity)?;
    if len - asked > asked / WASTE_PARTS {
        return None;
    }
    talk::start()?;
    let id = match state.next_id {
        // Also not the numbers of a process that had this one's pid before: memory is known by both.
        0 => sys::microseconds(),
        next => next,
    };
    let entry = Entry {
        len: len as u64,
        asked: asked as u64,
        context,
        id,
        device,
        ..Entry::NONE
    };
    let entry = make(&state, entry, |handle, len| {
        let properties = Properties::new(device, rdma);
        // SAFETY: there is room for the answer, and the properties are whole.
        check(unsafe { driver::create(handle, len, &raw const properties, 0) })
    })
    .ok()?;
    state.next_id = id + 1;
    state.insert(entry);
    Some(entry.address)
}

/// The context and the device that are current in this thread.
pub fn current() -> Option<(usize, c_int)> {
    let (mut context, mut device) = (0, 0);
    // SAFETY: there is room for the answer.
    check(unsafe { driver::context_current(&raw mut context) }).ok()?;
    if context == 0 {
        return None;
    }
    // SAFETY: there is room for the answer.
    check(unsafe { driver::context_device(&raw mut device) }).ok()?;
    Some((context, device))
}

/// Reserves, gets a handle and maps it; nothing is left when that fails.
pub fn make(
    state: &State,
    mut entry: Entry,
    get: impl FnOnce(*mut u64, usize) -> Result<(), c_int>,
) -> Result<Entry, c_int> {
    let len = length(&entry);
    // SAFETY: there is room for the answer.
    check(unsafe { driver::reserve(&raw mut entry.address, len, 0, 0, 0) })?;
    let made = get(&raw mut entry.handle, len).and_then(|()| {
        map(state, &mut entry).inspect_err(|_| {
            // SAFETY: the handle is ours and not mapped.
            unsafe { driver::release(entry.handle) };
        })
    });
    if let Err(code) = made {
        // SAFETY: nothing is mapped there.
        unsafe { driver::address_free(entry.address, len) };
        return Err(code);
    }
    Ok(entry)
}

/// Maps the entry's handle at its address, for its device and all that may use that one's memory.
pub fn map(state: &State, entry: &mut Entry) -> Result<(), c_int> {
    let len = length(entry);
    // SAFETY: the address is reserved for the entry, and nothing is mapped there.
    check(unsafe { driver::map(entry.address, len, 0, entry.handle, 0) })?;
    let peers = state.devices.peers(entry.device);
    let mut access = [const { Access::full(0) }; DEVICES_MAX];
    let mut count = 0;
    for device in (0..).take(DEVICES_MAX) {
        if device == entry.device || peers >> device & 1 == 1 {
            access[count] = Access::full(device);
            count += 1;
        }
    }
    // SAFETY: as many as are counted.
    let code = unsafe { driver::set_access(entry.address, len, access.as_ptr(), count) };
    check(code).inspect_err(|_| {
        // SAFETY: mapped above.
        unsafe { driver::unmap(entry.address, len) };
    })?;
    entry.mapped = true;
    Ok(())
}

/// # Safety
/// As `cuMemFree_v2`, which is `real`.
pub unsafe fn free(real: unsafe extern "C" fn(u64) -> c_int, address: u64) -> c_int {
    match free_ours(address) {
        Some(Ok(())) => driver::SUCCESS,
        Some(Err(code)) => code,
        // SAFETY: by the contract above.
        None => unsafe { real(address) },
    }
}

/// `None`: not one of ours.
fn free_ours(address: u64) -> Option<Result<(), c_int>> {
    if SEGMENTS.load(Ordering::Acquire) == 0 {
        return None;
    }
    let find = |state: &State| {
        let position = state.table.at(address)?;
        let entry = *state.table.entries().get(position)?;
        Some((position, entry))
    };
    let (_, entry) = find(&STATE.lock())?;
    if entry.owner != 0 {
        // As the driver: what was opened is closed.
        return Some(Err(driver::INVALID_VALUE));
    }
    // The driver's own waits too, and answers the error of a broken context, a driver that has ended or a capture.
    // Not under the lock: what the GPU waits for may need memory first.
    if let Err(code) = synchronize(entry.context) {
        return Some(Err(code));
    }
    let mut state = STATE.lock();
    // Another thread may have freed it meanwhile.
    let (position, entry) = find(&state).filter(|(_, now)| now.id == entry.id && now.owner == 0)?;
    Some(tear_down(&entry).map(|()| state.remove(position)))
}

/// Waits for all work of a context.
pub fn synchronize(context: usize) -> Result<(), c_int> {
    within(context, || {
        // SAFETY: has no arguments.
        check(unsafe { driver::context_synchronize() })
    })
}

/// Does something with the context current, and makes the one of before current again.
pub fn within<T>(context: usize, act: impl FnOnce() -> Result<T, c_int>) -> Result<T, c_int> {
    let mut before = 0;
    // SAFETY: there is room for the answer.
    check(unsafe { driver::context_current(&raw mut before) })?;
    if before == context {
        return act();
    }
    // SAFETY: the driver refuses a context that is none any more.
    check(unsafe { driver::context_push(context) })?;
    let result = act();
    // SAFETY: pushed above.
    unsafe { driver::context_pop(&raw mut before) };
    result
}

/// Gives the piece back to the driver. On failure it is as it was.
pub fn tear_down(entry: &Entry) -> Result<(), c_int> {
    let len = length(entry);
    if entry.mapped {
        // SAFETY: the entry is mapped there, and nothing uses it.
        check(unsafe { driver::unmap(entry.address, len) })?;
        // SAFETY: our handle, given up here.
        unsafe { driver::release(entry.handle) };
    }
    // SAFETY: nothing is mapped there any more.
    unsafe { driver::address_free(entry.address, len) };
    if entry.descriptor >= 0 {
        // SAFETY: ours alone.
        unsafe { sys::close(entry.descriptor) };
    }
    Ok(())
}

/// # Safety
/// As `cuMemGetAddressRange_v2`, which is `real`.
pub unsafe fn address_range(
    real: unsafe extern "C" fn(*mut u64, *mut usize, u64) -> c_int,
    base: *mut u64,
    len: *mut usize,
    address: u64,
) -> c_int {
    let ours = if SEGMENTS.load(Ordering::Acquire) == 0 {
        None
    } else {
        STATE.lock().table.around(address).copied()
    };
    let Some(entry) = ours else {
        // SAFETY: by the contract above.
        return unsafe { real(base, len, address) };
    };
    if !base.is_null() {
        // SAFETY: by the contract above.
        unsafe { *base = entry.address };
    }
    if !len.is_null() {
        // SAFETY: by the contract above.
        unsafe { *len = usize::try_from(entry.asked).unwrap_or(usize::MAX) };
    }
    driver::SUCCESS
}

/// Bytes of an entry: it was a `usize` once.
pub fn length(entry: &Entry) -> usize {
    usize::try_from(entry.len).unwrap_or(usize::MAX)
}

impl State {
    pub fn insert(&mut self, entry: Entry) {
        if self.table.insert(entry) {
            SEGMENTS.fetch_add(1, Ordering::Release);
            BYTES.fetch_add(entry.len, Ordering::Relaxed);
            if entry.descriptor >= 0 {
                IMPORTED.fetch_add(1, Ordering::Relaxed);
            }
        }
    }

    pub fn remove(&mut self, position: usize) {
        if let Some(entry) = self.table.entries().get(position) {
            SEGMENTS.fetch_sub(1, Ordering::Release);
            BYTES.fetch_sub(entry.len, Ordering::Relaxed);
            if entry.descriptor >= 0 {
                IMPORTED.fetch_sub(1, Ordering::Relaxed);
            }
        }
        self.table.remove(position);
    }

    /// Frees the pieces that went with their context.
    pub fn forget(&mut self, gone: impl Fn(&Entry) -> bool) {
        let mut position = 0;
        while let Some(entry) = self.table.entries().get(position) {
            if gone(entry) {
                // A piece that cannot be freed is the driver's to clean up: nobody can name it any more.
                let _ = tear_down(entry);
                self.remove(position);
            } else {
                position += 1;
            }
        }
    }
}

/// Switches the agent off in the child of a fork, where the driver cannot be used, and closes the descriptors of the
/// parent.
///
/// # Safety
/// Called in such a child, before anything else of the agent.
pub unsafe fn abandon() {
    // SAFETY: by the contract above. A thread of the parent may have been moving entries: one may be there twice, or
    // its descriptor not be closed, both without harm.
    let mut state: Guard<'_, State> = unsafe { STATE.seize() };
    for entry in state.table.entries() {
        if entry.descriptor >= 0 {
            // SAFETY: inherited from the parent, and used by nobody here.
            unsafe { sys::close(entry.descriptor) };
        }
    }
    state.table.clear();
    state.next_id = 0;
    SEGMENTS.store(0, Ordering::Release);
}
