//! The driver's functions for memory that a program creates and maps itself.

use core::ffi::{c_int, c_void};
use core::slice;
use core::sync::atomic::Ordering;

use super::super::driver::{self, Access, Properties, check};
use super::super::hand_over::{OPAQUE, SHARES};
use super::super::memory::{SEGMENTS, STATE};
use super::super::share::report;
use super::super::table::{Entry, HANDLE_MIN};
use super::super::{service, sys};

type Create = unsafe extern "C" fn(*mut u64, usize, *const Properties, u64) -> c_int;
type Release = unsafe extern "C" fn(u64) -> c_int;
type Map = unsafe extern "C" fn(u64, usize, usize, u64, u64) -> c_int;
type Unmap = unsafe extern "C" fn(u64, usize) -> c_int;
type SetAccess = unsafe extern "C" fn(u64, usize, *const Access, usize) -> c_int;
type Export = unsafe extern "C" fn(*mut c_void, u64, c_int, u64) -> c_int;
type Import = unsafe extern "C" fn(*mut u64, *mut c_void, c_int) -> c_int;
type GetProperties = unsafe extern "C" fn(*mut Properties, u64) -> c_int;
type Retain = unsafe extern "C" fn(*mut u64, *mut c_void) -> c_int;
type CreateMulticast = unsafe extern "C" fn(*mut u64, *const c_void) -> c_int;
type Bind = unsafe extern "C" fn(u64, usize, u64, usize, usize, u64) -> c_int;
type BindOf = unsafe extern "C" fn(u64, c_int, usize, u64, usize, usize, u64) -> c_int;

/// Implements `cuMemCreate`.
///
/// # Safety
/// The same as for `cuMemCreate`, which is `real`.
pub unsafe fn create(
    real: Create,
    out: *mut u64,
    len: usize,
    properties: *const Properties,
    flags: u64,
) -> c_int {
    // SAFETY: by the contract above.
    let asked = (!properties.is_null()).then(|| unsafe { *properties });
    if flags == 0
        && !out.is_null()
        && let Some(handle) = asked.and_then(|asked| covered(len, asked))
    {
        // SAFETY: by the contract above.
        unsafe { *out = handle };
        return driver::SUCCESS;
    }
    // SAFETY: by the contract above.
    let code = unsafe { real(out, len, properties, flags) };
    match asked {
        Some(asked) if asked.is_for_arrays() => report(&OPAQUE, code),
        _ => code,
    }
}

/// Creates a piece that can be held by others, if possible; returns the program's handle.
fn covered(len: usize, asked: Properties) -> Option<u64> {
    if !asked.is_plain() || !service::is_ready() {
        return None;
    }
    let device = asked.device();
    let mut state = STATE.lock();
    if state.table.is_full() {
        return None;
    }
    state.devices.known(device)?;
    service::start()?;
    let (handle_types, rdma) = asked.features();
    let mut properties = asked;
    properties.set_handle_types(driver::DESCRIPTOR);
    let mut handle = 0;
    // SAFETY: there is room for the result, and the properties are complete.
    check(unsafe { driver::create(&raw mut handle, len, &raw const properties, 0) }).ok()?;
    let (address, id) = (state.new_handle(len as u64), state.new_id());
    let entry = Entry {
        address,
        len: len as u64,
        asked: len as u64,
        handle,
        id,
        device,
        mapped: true,
        references: 1,
        handle_types,
        rdma,
        ..Entry::NONE
    };
    state.insert(entry);
    Some(entry.address)
}

/// Implements `cuMemRelease`.
///
/// # Safety
/// The same as for `cuMemRelease`, which is `real`.
pub unsafe fn release(real: Release, handle: u64) -> c_int {
    if handle < HANDLE_MIN {
        // SAFETY: by the contract above.
        return unsafe { real(handle) };
    }
    let mut state = STATE.lock();
    let Some(entry) = state.held(handle) else {
        return driver::INVALID_VALUE;
    };
    entry.references -= 1;
    state.drop_unused(handle);
    driver::SUCCESS
}

/// Returns a copy of the piece with a handle that the program has.
fn held(handle: u64) -> Option<Entry> {
    STATE.lock().held(handle).copied()
}

/// Implements `cuMemMap`.
///
/// # Safety
/// The same as for `cuMemMap`, which is `real`.
pub unsafe fn map(
    real: Map,
    address: u64,
    len: usize,
    offset: usize,
    handle: u64,
    flags: u64,
) -> c_int {
    if handle < HANDLE_MIN {
        // NCCL creates some memory of the host only to find out whether it could, and does not map it.
        let is_lost = is_on_host(handle);
        if is_lost {
            // A snapshot may begin at once when the memory is mapped.
            OPAQUE.store(true, Ordering::Relaxed);
        }
        // SAFETY: by the contract above.
        let code = unsafe { real(address, len, offset, handle, flags) };
        return if is_lost { report(&OPAQUE, code) } else { code };
    }
    let mut state = STATE.lock();
    let Some(entry) = state.held(handle) else {
        return driver::INVALID_VALUE;
    };
    // SAFETY: by the contract above, with the driver's handle.
    let code = unsafe { real(address, len, offset, entry.handle, flags) };
    if code == driver::SUCCESS {
        if state.mappings.is_full() {
            OPAQUE.store(true, Ordering::Relaxed);
        }
        state.add_mapping(address, len as u64, offset as u64, handle);
    }
    code
}

fn is_on_host(handle: u64) -> bool {
    let mut properties = Properties::new(0, false);
    // SAFETY: there is room for the result.
    let told = service::is_ready()
        .then(|| check(unsafe { driver::properties(&raw mut properties, handle) }));
    told.is_some_and(|told| told.is_ok()) && properties.is_on_host()
}

/// Implements `cuMemUnmap`.
///
/// # Safety
/// The same as for `cuMemUnmap`, which is `real`.
pub unsafe fn unmap(real: Unmap, address: u64, len: usize) -> c_int {
    if SEGMENTS.load(Ordering::Acquire) == 0 {
        // SAFETY: by the contract above.
        return unsafe { real(address, len) };
    }
    let mut state = STATE.lock();
    // SAFETY: by the contract above.
    let code = unsafe { real(address, len) };
    if code == driver::SUCCESS {
        state.remove_mappings(address, len as u64);
    }
    code
}

/// Implements `cuMemSetAccess`.
///
/// # Safety
/// The same as for `cuMemSetAccess`, which is `real`.
pub unsafe fn set_access(
    real: SetAccess,
    address: u64,
    len: usize,
    access: *const Access,
    count: usize,
) -> c_int {
    if SEGMENTS.load(Ordering::Acquire) == 0 {
        // SAFETY: by the contract above.
        return unsafe { real(address, len, access, count) };
    }
    let mut state = STATE.lock();
    // SAFETY: by the contract above.
    let code = unsafe { real(address, len, access, count) };
    if code == driver::SUCCESS && !access.is_null() {
        // SAFETY: by the contract above.
        let access = unsafe { slice::from_raw_parts(access, count) };
        if !state.set_access(address, len as u64, access) {
            OPAQUE.store(true, Ordering::Relaxed);
        }
    }
    code
}

/// Implements `cuMemExportToShareableHandle`.
///
/// # Safety
/// The same as for `cuMemExportToShareableHandle`, which is `real`.
pub unsafe fn export(
    real: Export,
    out: *mut c_void,
    handle: u64,
    kind: c_int,
    flags: u64,
) -> c_int {
    if handle < HANDLE_MIN {
        // SAFETY: by the contract above.
        return unsafe { real(out, handle, kind, flags) };
    }
    let Some(entry) = held(handle) else {
        return driver::INVALID_VALUE;
    };
    if entry.handle_types & kind == 0 || out.is_null() {
        return driver::INVALID_VALUE;
    }
    if entry.descriptor < 0 {
        // SAFETY: by the contract above, with the driver's handle.
        return report(&SHARES, unsafe { real(out, entry.handle, kind, flags) });
    }
    // Imported memory cannot be exported again.
    let copy = sys::duplicate_from(entry.descriptor, 0);
    if copy < 0 {
        return driver::OUT_OF_MEMORY;
    }
    // SAFETY: for this type of handle, the result is a descriptor.
    unsafe { out.cast::<c_int>().write(copy) };
    report(&SHARES, driver::SUCCESS)
}

/// Implements `cuMemImportFromShareableHandle`: the memory is another process's and stays the driver's.
///
/// # Safety
/// The same as for `cuMemImportFromShareableHandle`, which is `real`.
pub unsafe fn import(real: Import, out: *mut u64, handle: *mut c_void, kind: c_int) -> c_int {
    // SAFETY: by the contract above.
    report(&SHARES, unsafe { real(out, handle, kind) })
}

/// Implements `cuMemGetAllocationPropertiesFromHandle`.
///
/// # Safety
/// The same as for `cuMemGetAllocationPropertiesFromHandle`, which is `real`.
pub unsafe fn get_properties(real: GetProperties, out: *mut Properties, handle: u64) -> c_int {
    if handle < HANDLE_MIN {
        // SAFETY: by the contract above.
        return unsafe { real(out, handle) };
    }
    let Some(entry) = held(handle) else {
        return driver::INVALID_VALUE;
    };
    // SAFETY: by the contract above, with the driver's handle.
    let code = unsafe { real(out, entry.handle) };
    if code == driver::SUCCESS && !out.is_null() {
        // SAFETY: by the contract above.
        unsafe { (*out).set_handle_types(entry.handle_types) };
    }
    code
}

/// Implements `cuMemRetainAllocationHandle`.
///
/// # Safety
/// The same as for `cuMemRetainAllocationHandle`, which is `real`.
pub unsafe fn retain(real: Retain, out: *mut u64, address: *mut c_void) -> c_int {
    let retained = || {
        let mut state = STATE.lock();
        let piece = state.mappings.around(address.addr() as u64)?.piece;
        state.table.get_mut(piece)?.references += 1;
        Some(piece)
    };
    if SEGMENTS.load(Ordering::Acquire) != 0
        && !out.is_null()
        && let Some(handle) = retained()
    {
        // SAFETY: by the contract above.
        unsafe { *out = handle };
        return driver::SUCCESS;
    }
    // SAFETY: by the contract above.
    unsafe { real(out, address) }
}

/// Implements `cuMulticastCreate`: a process that uses multicast cannot be restored.
///
/// # Safety
/// The same as for `cuMulticastCreate`, which is `real`.
pub unsafe fn create_multicast(
    real: CreateMulticast,
    out: *mut u64,
    properties: *const c_void,
) -> c_int {
    // SAFETY: by the contract above.
    report(&OPAQUE, unsafe { real(out, properties) })
}

/// Returns the driver's handle of a piece, and any other handle unchanged.
fn drivers(handle: u64) -> u64 {
    if handle < HANDLE_MIN {
        return handle;
    }
    held(handle).map_or(handle, |entry| entry.handle)
}

/// Implements `cuMulticastBindMem`.
///
/// # Safety
/// The same as for `cuMulticastBindMem`, which is `real`.
pub unsafe fn bind_multicast(
    real: Bind,
    multicast: u64,
    at: usize,
    handle: u64,
    offset: usize,
    len: usize,
    flags: u64,
) -> c_int {
    // SAFETY: by the contract above, with the driver's handle.
    unsafe { real(multicast, at, drivers(handle), offset, len, flags) }
}

/// Implements `cuMulticastBindMem_v2`, which names the device.
///
/// # Safety
/// The same as for `cuMulticastBindMem_v2`, which is `real`.
#[allow(clippy::too_many_arguments, reason = "the driver's")]
pub unsafe fn bind_multicast_of(
    real: BindOf,
    multicast: u64,
    device: c_int,
    at: usize,
    handle: u64,
    offset: usize,
    len: usize,
    flags: u64,
) -> c_int {
    // SAFETY: by the contract above, with the driver's handle.
    unsafe { real(multicast, device, at, drivers(handle), offset, len, flags) }
}
