//! Implementation of `cuMemAlloc` and related calls on memory that another process can hold.
//!
//! ```text
//! cuMemAlloc   reserve → create → map → set access          on failure: undo, call the driver's cuMemAlloc
//! cuMemFree    synchronise → unmap → release → free address
//! ```
//! The job sees no difference: the driver itself handles all other memory, and every error.

use core::ffi::c_int;
use core::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use super::devices::{DEVICES_MAX, Devices};
use super::driver::{self, Access, Properties, check};
use super::lock::{Guard, Lock};
use super::table::{Entry, HANDLE_MIN, Mapping, Table};
use super::{program_memory, service, sys};

/// Minimum length of a covered allocation: the driver packs many smaller ones into a granule.
const COVERED_MIN: usize = 2 << 20;
/// Maximum waste by rounding to granules, as a divisor of the requested length.
const WASTE_PARTS: usize = 8;

/// State of the agent.
pub struct State {
    /// All pieces.
    pub table: Table<Entry>,
    /// Mappings of the program's own pieces.
    pub mappings: Table<Mapping>,
    pub devices: Devices,
    /// Next segment number; 0 if none was assigned yet.
    next_id: u64,
    /// Sum of the lengths of all program's own pieces so far.
    handles: u64,
}

pub static STATE: Lock<State> = Lock::new(State {
    table: Table::new(Entry::ZEROS),
    mappings: Table::new(Mapping::ZEROS),
    devices: Devices::new(),
    next_id: 0,
    handles: 0,
});
/// Number of pieces, their bytes, and the number of imported pieces, readable without the lock.
pub static SEGMENTS: AtomicUsize = AtomicUsize::new(0);
pub static BYTES: AtomicU64 = AtomicU64::new(0);
pub static IMPORTED: AtomicUsize = AtomicUsize::new(0);

/// Implements `cuMemAlloc_v2`.
///
/// # Safety
/// The same as for `cuMemAlloc_v2`, which is `real`.
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

/// Allocates a piece of the agent's memory, if possible.
fn covered(asked: usize) -> Option<u64> {
    if !service::is_ready() {
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
    service::start()?;
    let id = state.new_id();
    let entry = Entry {
        len: len as u64,
        asked: asked as u64,
        context,
        id,
        device,
        ..Entry::NONE
    };
    let entry = make(&mut state, entry, |handle, len| {
        let properties = Properties::new(device, rdma);
        // SAFETY: there is room for the result, and the properties are complete.
        check(unsafe { driver::create(handle, len, &raw const properties, 0) })
    })
    .ok()?;
    state.insert(entry);
    Some(entry.address)
}

/// Returns the current context and device of this thread.
pub fn current() -> Option<(usize, c_int)> {
    let (mut context, mut device) = (0, 0);
    // SAFETY: there is room for the result.
    check(unsafe { driver::context_current(&raw mut context) }).ok()?;
    if context == 0 {
        return None;
    }
    // SAFETY: there is room for the result.
    check(unsafe { driver::context_device(&raw mut device) }).ok()?;
    Some((context, device))
}

/// Reserves an address range, gets a handle and maps it; a failure is undone.
pub fn make(
    state: &mut State,
    mut entry: Entry,
    get: impl FnOnce(*mut u64, usize) -> Result<(), c_int>,
) -> Result<Entry, c_int> {
    let len = length(&entry);
    // SAFETY: there is room for the result.
    check(unsafe { driver::reserve(&raw mut entry.address, len, 0, 0, 0) })?;
    let made = get(&raw mut entry.handle, len).and_then(|()| {
        map(state, &mut entry).inspect_err(|_| {
            // SAFETY: the handle is owned by the agent and not mapped.
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

/// Maps the entry's handle: at its address, for its device and all devices with access to its memory, or where the
/// program had it mapped.
pub fn map(state: &mut State, entry: &mut Entry) -> Result<(), c_int> {
    if entry.is_programs() {
        return program_memory::map_all(state, entry);
    }
    let devices = state.devices.users(entry.device);
    let mapping = Mapping {
        address: entry.address,
        len: entry.len,
        readers: devices,
        writers: devices,
        ..Mapping::ZEROS
    };
    map_at(entry.handle, &mapping)?;
    entry.mapped = true;
    Ok(())
}

/// Maps a handle at a reserved address, for the devices of the mapping; a failure is undone.
pub fn map_at(handle: u64, mapping: &Mapping) -> Result<(), c_int> {
    let (address, len) = (mapping.address, in_usize(mapping.len));
    // SAFETY: the address is reserved, and nothing is mapped there.
    check(unsafe { driver::map(address, len, in_usize(mapping.offset), handle, 0) })?;
    let mut access = [const { Access::full(0) }; DEVICES_MAX];
    let mut count = 0;
    for device in (0..).take(DEVICES_MAX) {
        let writes = mapping.writers >> device & 1 == 1;
        if writes || mapping.readers >> device & 1 == 1 {
            access[count] = Access::of(device, writes);
            count += 1;
        }
    }
    if count == 0 {
        return Ok(());
    }
    // SAFETY: the array has the given length.
    check(unsafe { driver::set_access(address, len, access.as_ptr(), count) }).inspect_err(|_| {
        // SAFETY: mapped above.
        unsafe { driver::unmap(address, len) };
    })
}

/// Unmaps the entry everywhere; its handle stays. After an error, [`map`] maps what is missing if the entry is not
/// `mapped`.
pub fn unmap(state: &mut State, entry: &mut Entry) -> Result<(), c_int> {
    if entry.is_programs() {
        return program_memory::unmap_all(state, entry);
    }
    // SAFETY: mapped there, and the GPU is idle.
    check(unsafe { driver::unmap(entry.address, length(entry)) })?;
    entry.mapped = false;
    Ok(())
}

/// Implements `cuMemFree_v2`.
///
/// # Safety
/// The same as for `cuMemFree_v2`, which is `real`.
pub unsafe fn free(real: unsafe extern "C" fn(u64) -> c_int, address: u64) -> c_int {
    match free_piece(address) {
        Some(Ok(())) => driver::SUCCESS,
        Some(Err(code)) => code,
        // SAFETY: by the contract above.
        None => unsafe { real(address) },
    }
}

/// Frees a piece of the agent's memory; `None` if it is not the agent's.
fn free_piece(address: u64) -> Option<Result<(), c_int>> {
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
        // Opened memory has to be closed instead; the driver returns the same error.
        return Some(Err(driver::INVALID_VALUE));
    }
    // The driver's own function waits, too, and reports the error of a broken context, an exited driver or a capture.
    // This call is outside the lock, because the GPU's pending work may need memory first.
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

/// Calls a function with the context current, and restores the previous context.
pub fn within<T>(context: usize, act: impl FnOnce() -> Result<T, c_int>) -> Result<T, c_int> {
    let mut before = 0;
    // SAFETY: there is room for the result.
    check(unsafe { driver::context_current(&raw mut before) })?;
    if before == context {
        return act();
    }
    // SAFETY: the driver refuses a context that no longer exists.
    check(unsafe { driver::context_push(context) })?;
    let result = act();
    // SAFETY: pushed above.
    unsafe { driver::context_pop(&raw mut before) };
    result
}

/// Returns the piece to the driver. A failure leaves it unchanged.
pub fn tear_down(entry: &Entry) -> Result<(), c_int> {
    let len = length(entry);
    if entry.mapped {
        // SAFETY: the entry is mapped there, and nothing uses it.
        check(unsafe { driver::unmap(entry.address, len) })?;
        // SAFETY: owned by the agent and not used after this.
        unsafe { driver::release(entry.handle) };
    }
    // SAFETY: nothing is mapped there any more.
    unsafe { driver::address_free(entry.address, len) };
    if entry.descriptor >= 0 {
        // SAFETY: owned by the agent.
        unsafe { sys::close(entry.descriptor) };
    }
    Ok(())
}

/// Implements `cuMemGetAddressRange_v2`.
///
/// # Safety
/// The same as for `cuMemGetAddressRange_v2`, which is `real`.
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

/// Returns the length of an entry.
pub fn length(entry: &Entry) -> usize {
    in_usize(entry.len)
}

/// Returns a length that was created from a `usize`.
pub fn in_usize(len: u64) -> usize {
    usize::try_from(len).unwrap_or(usize::MAX)
}

impl State {
    /// Returns a new segment number.
    pub fn new_id(&mut self) -> u64 {
        let id = match self.next_id {
            // The numbers must differ from those of an earlier process with the same pid: memory is identified by both.
            0 => sys::microseconds(),
            next => next,
        };
        self.next_id = id + 1;
        id
    }

    /// Returns a new handle for a program's own piece. Pieces do not overlap if handles are taken as addresses.
    pub fn new_handle(&mut self, len: u64) -> u64 {
        let handle = HANDLE_MIN + self.handles;
        self.handles += len;
        handle
    }

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

    /// Removes the pieces of a destroyed context.
    pub fn forget(&mut self, gone: impl Fn(&Entry) -> bool) {
        let mut position = 0;
        while let Some(entry) = self.table.entries().get(position) {
            if gone(entry) {
                // The driver has to clean up a piece that cannot be freed; nothing refers to it any more.
                let _ = tear_down(entry);
                self.remove(position);
            } else {
                position += 1;
            }
        }
    }
}

/// Switches the agent off in the child of a fork, where the driver is not usable, and closes the parent's descriptors.
///
/// # Safety
/// Called in such a child before any other code of the agent.
pub unsafe fn abandon() {
    // SAFETY: by the contract above. A thread of the parent may have been moving entries: an entry may exist twice, or
    // a descriptor may stay open; both are harmless.
    let mut state: Guard<'_, State> = unsafe { STATE.seize() };
    for entry in state.table.entries() {
        if entry.descriptor >= 0 {
            // SAFETY: inherited from the parent and not used here.
            unsafe { sys::close(entry.descriptor) };
        }
    }
    state.table.clear();
    state.mappings.clear();
    state.next_id = 0;
    SEGMENTS.store(0, Ordering::Release);
}
