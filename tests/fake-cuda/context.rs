//! The functions for `cuInit`, devices, contexts, streams and events. Work is complete when a call returns, so streams
//! and events never wait.

use std::cell::RefCell;
use std::ffi::{c_char, c_int, c_uint, c_void};
use std::sync::Mutex;

use super::c::{give, give_if_asked};
use super::card::{self, Memory};
use super::code::{Answer, Code, INVALID_CONTEXT, INVALID_VALUE, NOT_INITIALIZED, UNKNOWN};
use super::gate::{self, calls};
use super::process::{Context, Origin, process};

/// Memory of a context on its GPU in bytes (500 MiB on an H200). NVML finds computing processes by it.
const CONTEXT_BYTES: u64 = 1 << 20;
/// Handle of the first context. Handles look like invalid pointers; those of primary contexts come first, by GPU.
const FIRST_CONTEXT: usize = 0xC0DE_0000;
/// Handle of the first context that is not primary.
const FIRST_OTHER_CONTEXT: usize = FIRST_CONTEXT + 0x1000;
const NAME: &[u8] = b"Fake GPU\0";

thread_local! {
    static CURRENT: RefCell<Vec<usize>> = const { RefCell::new(Vec::new()) };
}

/// Returns the thread's context; 0 without one.
pub fn current() -> usize {
    CURRENT.with_borrow(|stack| stack.last().copied().unwrap_or(0))
}

/// Returns the GPU of the thread's context.
pub fn current_gpu() -> Result<usize, Code> {
    let process = process();
    let context = process.context(current())?;
    Ok(process.gpus[context.ordinal])
}

#[unsafe(no_mangle)]
pub extern "C" fn cuInit(flags: c_uint) -> c_int {
    if flags != 0 {
        return INVALID_VALUE;
    }
    initialize().err().unwrap_or(0)
}

/// Initializes CUDA. The restore thread comes first: a process inside `cuInit` already counts as a CUDA process.
fn initialize() -> Answer {
    static STARTED: Mutex<bool> = Mutex::new(false);
    if gate::is_of_parent() {
        return Err(NOT_INITIALIZED);
    }
    let mut started = STARTED.lock().map_err(|_| UNKNOWN)?;
    if gate::is_initialized() {
        return Ok(());
    }
    if !*started {
        super::restore::start()?;
        *started = true;
    }
    super::faults::meet("cuInit")?;
    gate::set_initialized();
    Ok(())
}

fn retain(ordinal: c_int) -> Result<usize, Code> {
    let mut process = process();
    let gpu = process.gpu(ordinal)?;
    let ordinal = ordinal as usize;
    let context = FIRST_CONTEXT + ordinal;
    if !process.contexts.contains_key(&context) {
        make(&mut process, context, ordinal, gpu)?;
    }
    let entry = process.contexts.get_mut(&context).ok_or(INVALID_CONTEXT)?;
    entry.users += 1;
    Ok(context)
}

fn make(
    process: &mut super::process::Process,
    context: usize,
    ordinal: usize,
    gpu: usize,
) -> Answer {
    let memory = Memory::create(gpu, CONTEXT_BYTES)?;
    let piece = Some(process.add(memory, Origin::Own, false));
    process.contexts.insert(
        context,
        Context {
            ordinal,
            users: 0,
            piece,
        },
    );
    Ok(())
}

/// Destroys a context, but keeps all its memory from `cuMemAlloc` (the driver frees that too; no job here depends on
/// it).
fn destroy(context: usize) -> Answer {
    let mut process = process();
    let gone = process.contexts.remove(&context).ok_or(INVALID_CONTEXT)?;
    if let Some(piece) = gone.piece {
        process.forget_unused(piece);
    }
    Ok(())
}

fn release(ordinal: c_int) -> Answer {
    let context = {
        let mut process = process();
        process.gpu(ordinal)?;
        let context = FIRST_CONTEXT + ordinal as usize;
        let entry = process.contexts.get_mut(&context).ok_or(INVALID_CONTEXT)?;
        entry.users -= 1;
        if entry.users > 0 {
            return Ok(());
        }
        context
    };
    destroy(context)
}

fn create(context: *mut usize, ordinal: c_int) -> Answer {
    let id = {
        let mut process = process();
        let gpu = process.gpu(ordinal)?;
        let id = FIRST_OTHER_CONTEXT + process.next() as usize;
        make(&mut process, id, ordinal as usize, gpu)?;
        id
    };
    CURRENT.with_borrow_mut(|stack| stack.push(id));
    give(context, id)
}

/// Returns the `CUdevice_attribute` values that jobs query, as on an H200; all others are 0.
fn attribute(number: c_int, gpu: usize) -> c_int {
    match number {
        // Virtual memory and POSIX descriptors of it, unified addresses, concurrent kernels; no managed memory.
        102 | 103 | 41 | 31 => 1,
        // Maximum threads per block, warp size, multiprocessors.
        1 => 1024,
        10 => 32,
        16 => 132,
        // Compute capability 9.0, position on the bus.
        75 => 9,
        33 => gpu as c_int + 1,
        _ => 0,
    }
}

calls! {
    2000 fn cuDeviceGetCount(count: *mut c_int) {
        give(count, process().gpus.len() as c_int)
    }
    2000 fn cuDeviceGet(device: *mut c_int, ordinal: c_int) {
        process().gpu(ordinal)?;
        give(device, ordinal)
    }
    2000 fn cuDeviceGetName(name: *mut c_char, room: c_int, device: c_int) {
        process().gpu(device)?;
        let room = usize::try_from(room).map_err(|_| INVALID_VALUE)?;
        if name.is_null() || room < NAME.len() {
            return Err(INVALID_VALUE);
        }
        // SAFETY: the caller guarantees the room.
        unsafe { name.copy_from_nonoverlapping(NAME.as_ptr().cast(), NAME.len()) };
        Ok(())
    }
    9020 fn cuDeviceGetUuid(uuid: *mut [u8; 16], device: c_int) {
        give(uuid, card::uuid(process().gpu(device)?))
    }
    11040 fn cuDeviceGetUuid_v2(uuid: *mut [u8; 16], device: c_int) {
        give(uuid, card::uuid(process().gpu(device)?))
    }
    2000 fn cuDeviceGetAttribute(value: *mut c_int, number: c_int, device: c_int) {
        let gpu = process().gpu(device)?;
        give(value, attribute(number, gpu))
    }
    3020 fn cuDeviceTotalMem_v2(bytes: *mut usize, device: c_int) {
        process().gpu(device)?;
        give(bytes, card::capacity() as usize)
    }
    4000 fn cuDeviceCanAccessPeer(can: *mut c_int, device: c_int, peer: c_int) {
        process().gpu(device)?;
        process().gpu(peer)?;
        give(can, c_int::from(device != peer))
    }
    7000 fn cuDevicePrimaryCtxRetain(context: *mut usize, device: c_int) {
        give(context, retain(device)?)
    }
    11000 fn cuDevicePrimaryCtxRelease_v2(device: c_int) {
        release(device)
    }
    11000 fn cuDevicePrimaryCtxReset_v2(device: c_int) {
        process().gpu(device)?;
        destroy(FIRST_CONTEXT + device as usize)
    }
    7000 fn cuDevicePrimaryCtxGetState(device: c_int, flags: *mut c_uint, active: *mut c_int) {
        process().gpu(device)?;
        give(flags, 0)?;
        let context = FIRST_CONTEXT + device as usize;
        give(active, c_int::from(process().contexts.contains_key(&context)))
    }
    3020 fn cuCtxCreate_v2(context: *mut usize, _flags: c_uint, device: c_int) {
        create(context, device)
    }
    12050 fn cuCtxCreate_v4(context: *mut usize, _how: *mut c_void, _flags: c_uint, device: c_int) {
        create(context, device)
    }
    4000 fn cuCtxDestroy_v2(context: usize) {
        CURRENT.with_borrow_mut(|stack| {
            if stack.last() == Some(&context) {
                stack.pop();
            }
        });
        destroy(context)
    }
    4000 fn cuCtxGetCurrent(context: *mut usize) {
        give(context, current())
    }
    4000 fn cuCtxSetCurrent(context: usize) {
        if context != 0 {
            process().context(context)?;
        }
        CURRENT.with_borrow_mut(|stack| {
            stack.pop();
            if context != 0 {
                stack.push(context);
            }
        });
        Ok(())
    }
    4000 fn cuCtxPushCurrent_v2(context: usize) {
        process().context(context)?;
        CURRENT.with_borrow_mut(|stack| stack.push(context));
        Ok(())
    }
    4000 fn cuCtxPopCurrent_v2(context: *mut usize) {
        let popped = CURRENT.with_borrow_mut(Vec::pop).ok_or(INVALID_CONTEXT)?;
        give_if_asked(context, popped);
        Ok(())
    }
    2000 fn cuCtxGetDevice(device: *mut c_int) {
        let ordinal = process().context(current())?.ordinal;
        give(device, ordinal as c_int)
    }
    2000 fn cuCtxSynchronize() {
        process().context(current()).map(|_| ())
    }
    4000 fn cuCtxEnablePeerAccess(context: usize, _flags: c_uint) {
        process().context(current())?;
        process().context(context).map(|_| ())
    }
    2000 fn cuStreamCreate(stream: *mut usize, _flags: c_uint) {
        process().context(current())?;
        let id = process().next();
        give(stream, id as usize)
    }
    5050 fn cuStreamCreateWithPriority(stream: *mut usize, _flags: c_uint, _priority: c_int) {
        process().context(current())?;
        let id = process().next();
        give(stream, id as usize)
    }
    4000 fn cuStreamDestroy_v2(_stream: usize) { Ok(()) }
    2000 fn cuStreamSynchronize(_stream: usize) { Ok(()) }
    2000 fn cuStreamQuery(_stream: usize) { Ok(()) }
    3020 fn cuStreamWaitEvent(_stream: usize, _event: usize, _flags: c_uint) { Ok(()) }
    2000 fn cuEventCreate(event: *mut usize, _flags: c_uint) {
        process().context(current())?;
        let id = process().next();
        give(event, id as usize)
    }
    4000 fn cuEventDestroy_v2(_event: usize) { Ok(()) }
    2000 fn cuEventRecord(_event: usize, _stream: usize) { Ok(()) }
    2000 fn cuEventQuery(_event: usize) { Ok(()) }
    2000 fn cuEventSynchronize(_event: usize) { Ok(()) }
}
