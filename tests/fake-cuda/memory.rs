//! Plain allocations of device and host memory, and queries about addresses.

use std::ffi::{c_int, c_uint, c_void};

use super::c::{self, Access, PAGE, give, give_if_asked};
use super::card::{self, Memory};
use super::code::{Answer, Code, INVALID_VALUE};
use super::context::{current, current_gpu};
use super::gate::calls;
use super::process::{Kind, Mapping, Origin, process};
use super::virtual_memory::GRANULARITY;

/// `CUipcMemHandle`.
#[repr(C)]
struct IpcHandle {
    reserved: [u8; 64],
}

fn allocate(address: *mut u64, asked: u64) -> Answer {
    if asked == 0 || address.is_null() {
        return Err(INVALID_VALUE);
    }
    let len = asked.checked_next_multiple_of(PAGE).ok_or(INVALID_VALUE)?;
    let memory = Memory::create(current_gpu()?, len)?;
    let alignment = if len < GRANULARITY { PAGE } else { GRANULARITY };
    let at = c::reserve(len, alignment, 0)?;
    let mut process = process();
    let piece = process.add(memory, Origin::Own, false);
    let mapped = process.map(
        at,
        Mapping {
            asked,
            len,
            piece,
            access: Access::Both,
            kind: Kind::Private,
        },
    );
    if mapped.is_err() {
        process.forget_unused(piece);
        c::unmap(at, len);
    }
    mapped?;
    give(address, at)
}

fn free(address: u64) -> Answer {
    if address == 0 {
        return Ok(());
    }
    let mut process = process();
    let mapping = process
        .mappings
        .get(&address)
        .copied()
        .filter(|one| one.kind == Kind::Private);
    let mapping = mapping.ok_or(INVALID_VALUE)?;
    process.mappings.remove(&address);
    c::unmap(address, mapping.len);
    process.forget_unused(mapping.piece);
    Ok(())
}

fn pin(pointer: *mut *mut c_void, asked: usize) -> Answer {
    if asked == 0 || pointer.is_null() {
        return Err(INVALID_VALUE);
    }
    let len = (asked as u64)
        .checked_next_multiple_of(PAGE)
        .ok_or(INVALID_VALUE)?;
    let at = c::host_memory(len)?;
    process().pinned.insert(at, len);
    give(pointer, at as *mut c_void)
}

/// Kind of memory at an address.
enum Target {
    Device { at: u64, mapping: Mapping },
    Host { at: u64, len: u64 },
}

fn target(address: u64) -> Result<Target, Code> {
    let process = process();
    if let Some((at, mapping)) = process.mapping_at(address) {
        return Ok(Target::Device { at, mapping });
    }
    let before = process.pinned.range(..=address).next_back();
    let pinned = before
        .filter(|(at, len)| address < *at + *len)
        .ok_or(INVALID_VALUE)?;
    Ok(Target::Host {
        at: *pinned.0,
        len: *pinned.1,
    })
}

/// Returns the supported `CUpointer_attribute` values.
fn attribute(out: *mut c_void, number: c_int, address: u64) -> Answer {
    let target = target(address)?;
    let (is_device, from, len) = match &target {
        Target::Device { at, mapping } => (true, *at, mapping.asked),
        Target::Host { at, len } => (false, *at, *len),
    };
    match number {
        1 => give(out.cast(), current()),
        2 => give(out.cast(), if is_device { 2 } else { 1 }),
        4 if is_device => Err(INVALID_VALUE),
        3 | 4 => give(out.cast(), address),
        8 => give(out.cast(), false),
        9 => give(out.cast(), ordinal(&target)?),
        11 => give(out.cast(), from),
        12 => give(out.cast(), len),
        13 => give(out.cast(), true),
        _ => Err(INVALID_VALUE),
    }
}

fn ordinal(target: &Target) -> Result<c_int, Code> {
    match target {
        Target::Device { mapping, .. } => {
            let process = process();
            let gpu = process.memory(mapping.piece)?.device;
            Ok(process.ordinal(gpu).ok_or(INVALID_VALUE)? as c_int)
        }
        Target::Host { .. } => Ok(0),
    }
}

calls! {
    3020 fn cuMemAlloc_v2(address: *mut u64, len: usize) {
        allocate(address, len as u64)
    }
    3020 fn cuMemFree_v2(address: u64) {
        free(address)
    }
    3020 fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize) {
        let gpu = current_gpu()?;
        give(free, card::capacity().saturating_sub(card::used(gpu)) as usize)?;
        give(total, card::capacity() as usize)
    }
    3020 fn cuMemGetAddressRange_v2(base: *mut u64, len: *mut usize, address: u64) {
        let (at, mapping) = process().mapping_at(address).ok_or(INVALID_VALUE)?;
        give_if_asked(base, at);
        give_if_asked(len, mapping.asked as usize);
        Ok(())
    }
    4000 fn cuPointerGetAttribute(out: *mut c_void, number: c_int, address: u64) {
        attribute(out, number, address)
    }
    2020 fn cuMemHostAlloc(pointer: *mut *mut c_void, len: usize, _flags: c_uint) {
        pin(pointer, len)
    }
    3020 fn cuMemAllocHost_v2(pointer: *mut *mut c_void, len: usize) {
        pin(pointer, len)
    }
    2000 fn cuMemFreeHost(pointer: *mut c_void) {
        let len = process().pinned.remove(&(pointer as u64)).ok_or(INVALID_VALUE)?;
        c::unmap(pointer as u64, len);
        Ok(())
    }
    6050 fn cuMemHostRegister_v2(_pointer: *mut c_void, _len: usize, _flags: c_uint) { Ok(()) }
    4000 fn cuMemHostUnregister(_pointer: *mut c_void) { Ok(()) }
    3020 fn cuMemHostGetDevicePointer_v2(address: *mut u64, pointer: *mut c_void, _flags: c_uint) {
        give(address, pointer as u64)
    }
    4010 fn cuIpcGetMemHandle(_handle: *mut IpcHandle, _address: u64) {
        Err(INVALID_VALUE)
    }
    11000 fn cuIpcOpenMemHandle_v2(_address: *mut u64, _handle: IpcHandle, _flags: c_uint) {
        Err(INVALID_VALUE)
    }
    4010 fn cuIpcCloseMemHandle(_address: u64) {
        Err(INVALID_VALUE)
    }
}
