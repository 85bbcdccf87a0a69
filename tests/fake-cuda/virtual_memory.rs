//! Virtual memory management: addresses, handles, and mappings (`cuMemCreate` and related functions).

use std::ffi::{c_int, c_ulonglong, c_void};
use std::os::fd::{BorrowedFd, IntoRawFd};

use super::c::{self, Access, give, read};
use super::card::Memory;
use super::code::{Answer, Code, INVALID_VALUE, NOT_INITIALIZED, NOT_SUPPORTED};
use super::gate::calls;
use super::process::{Id, Kind, Mapping, Origin, Piece, process};

/// Granularity of addresses and memory, in bytes.
pub const GRANULARITY: u64 = 2 << 20;
/// `CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR`.
const POSIX_DESCRIPTOR: c_int = 1;
/// `CU_MEM_ALLOCATION_TYPE_PINNED`.
const PINNED: c_int = 1;
/// `CU_MEM_LOCATION_TYPE_DEVICE`.
const DEVICE: c_int = 1;
/// `CU_MEM_LOCATION_TYPE_HOST_NUMA`. The fake takes such memory from the first GPU.
const HOST: c_int = 3;
/// `CU_MEM_ACCESS_FLAGS_PROT_READWRITE`.
const READ_WRITE: c_int = 3;

/// `CUmemLocation`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Location {
    kind: c_int,
    id: c_int,
}

/// `CUmemAllocationProp`.
#[repr(C)]
#[derive(Clone, Copy)]
struct Properties {
    kind: c_int,
    handle_types: c_int,
    location: Location,
    win32: *mut c_void,
    flags: [u8; 8],
}

/// `CUmemAccessDesc`.
#[repr(C)]
#[derive(Clone, Copy)]
struct AccessDescription {
    location: Location,
    flags: c_int,
}

const _: () = assert!(size_of::<Properties>() == 32);
const _: () = assert!(size_of::<AccessDescription>() == 12);

/// Returns the GPU that properties name.
fn gpu_of(properties: &Properties) -> Result<usize, Code> {
    if properties.kind != PINNED || ![DEVICE, HOST].contains(&properties.location.kind) {
        return Err(INVALID_VALUE);
    }
    if properties.handle_types & !POSIX_DESCRIPTOR != 0 {
        return Err(NOT_SUPPORTED);
    }
    process()
        .gpu(properties.location.id)
        .map_err(|_| INVALID_VALUE)
}

fn in_units(len: usize) -> Result<u64, Code> {
    let len = len as u64;
    if len == 0 || !len.is_multiple_of(GRANULARITY) {
        Err(INVALID_VALUE)
    } else {
        Ok(len)
    }
}

fn new_handle(memory: Memory, origin: Origin, exportable: bool) -> Id {
    let mut process = process();
    let piece = process.add(memory, origin, exportable);
    process.handles.insert(piece, 1);
    piece
}

fn export(descriptor: *mut c_int, handle: Id) -> Answer {
    let process = process();
    let piece = process.piece_of(handle)?;
    let exportable = process
        .pieces
        .get(&piece)
        .is_some_and(|one| one.exportable && one.origin == Origin::Own);
    if !exportable || descriptor.is_null() {
        return Err(INVALID_VALUE);
    }
    give(descriptor, process.memory(piece)?.open()?.into_raw_fd())
}

fn map(at: u64, len: u64, handle: Id) -> Answer {
    let mut process = process();
    let piece = process.piece_of(handle)?;
    let fits = at.is_multiple_of(GRANULARITY) && len <= process.memory(piece)?.len;
    if !fits || !process.is_reserved(at, len) || !process.is_vacant(at, len) {
        return Err(INVALID_VALUE);
    }
    process.map(
        at,
        Mapping {
            asked: len,
            len,
            piece,
            access: Access::None,
            kind: Kind::Virtual,
        },
    )
}

/// Unmaps a range, which may contain several mappings, each completely.
fn unmap(at: u64, len: u64) -> Answer {
    let mut process = process();
    let end = at.checked_add(len).ok_or(INVALID_VALUE)?;
    let whole: Vec<(u64, Mapping)> = process
        .mappings
        .range(at..end)
        .map(|(at, one)| (*at, *one))
        .collect();
    let is_virtual = whole.iter().all(|(_, one)| one.kind == Kind::Virtual);
    if !is_virtual || whole.iter().map(|(_, one)| one.len).sum::<u64>() != len {
        return Err(INVALID_VALUE);
    }
    for (from, mapping) in whole {
        c::vacate(from, mapping.len)?;
        process.mappings.remove(&from);
        process.forget_unused(mapping.piece);
    }
    Ok(())
}

fn set_access(at: u64, len: u64, how: &AccessDescription) -> Answer {
    let mut process = process();
    process.gpu(how.location.id).map_err(|_| INVALID_VALUE)?;
    let end = at.checked_add(len).ok_or(INVALID_VALUE)?;
    let access = if how.flags == READ_WRITE {
        Access::Both
    } else {
        Access::None
    };
    let covered: u64 = process
        .mappings
        .range(at..end)
        .map(|(_, one)| one.len)
        .sum();
    if covered != len {
        return Err(INVALID_VALUE);
    }
    for (from, mapping) in process.mappings.range_mut(at..end) {
        mapping.access = access;
        c::set_access(*from, mapping.len, access);
    }
    Ok(())
}

fn release(handle: Id) -> Answer {
    let mut process = process();
    let count = process.handles.get_mut(&handle).ok_or(INVALID_VALUE)?;
    *count -= 1;
    if *count == 0 {
        process.handles.remove(&handle);
        process.forget_unused(handle);
    }
    Ok(())
}

/// Returns the handle of the memory mapped at an address.
fn retain(address: u64) -> Result<Id, Code> {
    let mut process = process();
    let (_, mapping) = process.mapping_at(address).ok_or(INVALID_VALUE)?;
    if mapping.kind == Kind::Private {
        return Err(INVALID_VALUE);
    }
    *process.handles.entry(mapping.piece).or_insert(0) += 1;
    Ok(mapping.piece)
}

fn properties_of(handle: Id) -> Result<Properties, Code> {
    let process = process();
    let piece = process.piece_of(handle)?;
    let ordinal = process.ordinal(process.memory(piece)?.device).unwrap_or(0);
    let exportable = process.pieces.get(&piece).is_some_and(|one| one.exportable);
    let is_host = |one: &Piece| one.origin == Origin::Host;
    let on_host = process.pieces.get(&piece).is_some_and(is_host);
    Ok(Properties {
        kind: PINNED,
        handle_types: c_int::from(exportable),
        location: Location {
            kind: if on_host { HOST } else { DEVICE },
            id: ordinal as c_int,
        },
        win32: std::ptr::null_mut(),
        flags: [0; 8],
    })
}

calls! {
    10020 fn cuMemGetAllocationGranularity(granularity: *mut usize, properties: *const Properties, _option: c_int) {
        gpu_of(&read(properties)?)?;
        give(granularity, GRANULARITY as usize)
    }
    10020 fn cuMemAddressReserve(address: *mut u64, len: usize, alignment: usize, hint: u64, flags: c_ulonglong) {
        let (len, alignment) = (in_units(len)?, (alignment as u64).max(GRANULARITY));
        if flags != 0 || !alignment.is_power_of_two() || address.is_null() {
            return Err(INVALID_VALUE);
        }
        let hint = if hint.is_multiple_of(alignment) { hint } else { 0 };
        let at = c::reserve(len, alignment, hint)?;
        process().reservations.insert(at, len);
        give(address, at)
    }
    10020 fn cuMemAddressFree(address: u64, len: usize) {
        let mut process = process();
        let len = len as u64;
        if process.reservations.get(&address) != Some(&len) || !process.is_vacant(address, len) {
            return Err(INVALID_VALUE);
        }
        process.reservations.remove(&address);
        c::unmap(address, len);
        Ok(())
    }
    10020 fn cuMemCreate(handle: *mut Id, len: usize, properties: *const Properties, flags: c_ulonglong) {
        let (len, properties) = (in_units(len)?, read(properties)?);
        let gpu = gpu_of(&properties)?;
        if flags != 0 || handle.is_null() {
            return Err(INVALID_VALUE);
        }
        let exportable = properties.handle_types & POSIX_DESCRIPTOR != 0;
        let origin = if properties.location.kind == HOST { Origin::Host } else { Origin::Own };
        give(handle, new_handle(Memory::create(gpu, len)?, origin, exportable))
    }
    10020 fn cuMemRelease(handle: Id) {
        release(handle)
    }
    10020 fn cuMemMap(address: u64, len: usize, offset: usize, handle: Id, flags: c_ulonglong) {
        let len = in_units(len)?;
        if offset != 0 || flags != 0 {
            return Err(INVALID_VALUE);
        }
        map(address, len, handle)
    }
    10020 fn cuMemUnmap(address: u64, len: usize) {
        unmap(address, in_units(len)?)
    }
    10020 fn cuMemSetAccess(address: u64, len: usize, descriptions: *const AccessDescription, count: usize) {
        let len = in_units(len)?;
        if descriptions.is_null() || count == 0 {
            return Err(INVALID_VALUE);
        }
        // SAFETY: the caller guarantees the counted number.
        let descriptions = unsafe { std::slice::from_raw_parts(descriptions, count) };
        descriptions.iter().try_for_each(|one| set_access(address, len, one))
    }
    10020 fn cuMemGetAccess(flags: *mut c_ulonglong, _location: *const Location, address: u64) {
        let (_, mapping) = process().mapping_at(address).ok_or(INVALID_VALUE)?;
        give(flags, if mapping.access == Access::Both { READ_WRITE as c_ulonglong } else { 0 })
    }
    10020 fn cuMemExportToShareableHandle(out: *mut c_void, handle: Id, kind: c_int, flags: c_ulonglong) {
        if kind != POSIX_DESCRIPTOR || flags != 0 {
            return Err(INVALID_VALUE);
        }
        export(out.cast(), handle)
    }
    10020 fn cuMemImportFromShareableHandle(handle: *mut Id, descriptor: *mut c_void, kind: c_int) {
        if kind != POSIX_DESCRIPTOR || handle.is_null() {
            return Err(INVALID_VALUE);
        }
        let descriptor = c_int::try_from(descriptor as isize).ok().filter(|fd| *fd >= 0).ok_or(INVALID_VALUE)?;
        // SAFETY: the caller guarantees that it is open during the call; the kernel refuses an invalid one.
        let descriptor = unsafe { BorrowedFd::borrow_raw(descriptor) };
        let memory = Memory::import(descriptor)?;
        if !process().imports_from(memory.device) {
            return Err(NOT_INITIALIZED);
        }
        give(handle, new_handle(memory, Origin::Imported, true))
    }
    11000 fn cuMemRetainAllocationHandle(handle: *mut Id, address: *mut c_void) {
        if handle.is_null() {
            return Err(INVALID_VALUE);
        }
        give(handle, retain(address as u64)?)
    }
    10020 fn cuMemGetAllocationPropertiesFromHandle(properties: *mut Properties, handle: Id) {
        give(properties, properties_of(handle)?)
    }
}
