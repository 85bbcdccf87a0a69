//! NVML: the GPUs, their memory, and the processes on them, with pids in the caller's namespace.
//!
//! A process is on a GPU if it has some of its memory mapped, as a context does. A checkpointed process has none and is
//! not listed, and neither is one without a context yet (580.159.04). The reported memory is that created by the
//! process; imported memory is not counted anywhere (`memSharedDuped` in NVIDIA's kernel module).
//!
//! `FAKE_CUDA_PERSISTENCE` 0 turns persistence mode off. A file `utilization` in the GPUs' folder sets their
//! utilization in percent; without it they are idle. With a file `mig` there, all are in MIG mode.

use std::collections::HashMap;
use std::ffi::{CStr, c_char, c_int, c_uint, c_ulonglong};
use std::fs;
use std::path::Path;

use super::c::give;
use super::card;

/// `nvmlReturn_t`.
type Answer = c_int;
const INVALID_ARGUMENT: Answer = 2;
const NOT_SUPPORTED: Answer = 3;
const INSUFFICIENT_SIZE: Answer = 7;
/// Driver release of the measurements.
const RELEASE: &str = "580.159.04";

/// `nvmlDevice_t`: the index, starting at 1.
type Handle = usize;

/// `nvmlMemory_v2_t`.
#[repr(C)]
struct MemoryInfo {
    version: c_uint,
    total: c_ulonglong,
    reserved: c_ulonglong,
    free: c_ulonglong,
    used: c_ulonglong,
}

const _: () = assert!(size_of::<MemoryInfo>() == 40);

/// `nvmlProcessInfo_t`.
#[repr(C)]
struct ProcessInfo {
    pid: c_uint,
    used: c_ulonglong,
    gpu_instance: c_uint,
    compute_instance: c_uint,
}

const _: () = assert!(size_of::<ProcessInfo>() == 24);

/// `nvmlUtilization_t`.
#[repr(C)]
struct Utilization {
    gpu: c_uint,
    memory: c_uint,
}

fn number(result: Result<(), Answer>) -> Answer {
    result.err().unwrap_or(0)
}

fn put<T>(at: *mut T, value: T) -> Result<(), Answer> {
    give(at, value).map_err(|_| INVALID_ARGUMENT)
}

fn gpu(handle: Handle) -> Result<usize, Answer> {
    let index = handle
        .checked_sub(1)
        .filter(|index| *index < card::devices());
    index.ok_or(INVALID_ARGUMENT)
}

fn text(buffer: *mut c_char, room: c_uint, text: &str) -> Answer {
    if buffer.is_null() {
        return INVALID_ARGUMENT;
    }
    if text.len() >= room as usize {
        return INSUFFICIENT_SIZE;
    }
    // SAFETY: the caller guarantees the room.
    unsafe { buffer.copy_from_nonoverlapping(text.as_ptr().cast(), text.len()) };
    // SAFETY: as above.
    unsafe { buffer.add(text.len()).write(0) };
    0
}

#[unsafe(no_mangle)]
extern "C" fn nvmlInit_v2() -> Answer {
    0
}

#[unsafe(no_mangle)]
extern "C" fn nvmlShutdown() -> Answer {
    0
}

#[unsafe(no_mangle)]
extern "C" fn nvmlErrorString(answer: Answer) -> *const c_char {
    let text: &'static CStr = match answer {
        0 => c"Success",
        INVALID_ARGUMENT => c"Invalid Argument",
        NOT_SUPPORTED => c"Not Supported",
        INSUFFICIENT_SIZE => c"Insufficient Size",
        _ => c"Unknown Error",
    };
    text.as_ptr()
}

#[unsafe(no_mangle)]
extern "C" fn nvmlSystemGetDriverVersion(buffer: *mut c_char, room: c_uint) -> Answer {
    text(buffer, room, RELEASE)
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetCount_v2(count: *mut c_uint) -> Answer {
    number(put(count, card::devices() as c_uint))
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetHandleByIndex_v2(index: c_uint, handle: *mut Handle) -> Answer {
    let found = index as Handle + 1;
    number(gpu(found).and_then(|_| put(handle, found)))
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetName(handle: Handle, buffer: *mut c_char, room: c_uint) -> Answer {
    gpu(handle).map_or_else(|error| error, |_| text(buffer, room, "Fake GPU"))
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetUUID(handle: Handle, buffer: *mut c_char, room: c_uint) -> Answer {
    gpu(handle).map_or_else(
        |error| error,
        |gpu| text(buffer, room, &card::uuid_text(gpu)),
    )
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetMemoryInfo_v2(handle: Handle, memory: *mut MemoryInfo) -> Answer {
    number(gpu(handle).and_then(|gpu| {
        let (total, used) = (card::capacity(), card::used(gpu));
        put(
            memory,
            MemoryInfo {
                version: 0,
                total,
                reserved: 0,
                free: total.saturating_sub(used),
                used,
            },
        )
    }))
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetUtilizationRates(handle: Handle, rates: *mut Utilization) -> Answer {
    let told = fs::read_to_string(card::folder().join("utilization")).unwrap_or_default();
    let busy = told.trim().parse().unwrap_or(0);
    number(gpu(handle).and_then(|_| {
        put(
            rates,
            Utilization {
                gpu: busy,
                memory: 0,
            },
        )
    }))
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetPersistenceMode(handle: Handle, mode: *mut c_uint) -> Answer {
    let off = std::env::var("FAKE_CUDA_PERSISTENCE").is_ok_and(|value| value == "0");
    number(gpu(handle).and_then(|_| put(mode, c_uint::from(!off))))
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetMigMode(
    handle: Handle,
    current: *mut c_uint,
    pending: *mut c_uint,
) -> Answer {
    let mode = c_uint::from(card::folder().join("mig").exists());
    number(gpu(handle).and_then(|_| put(current, mode).and(put(pending, mode))))
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetComputeMode(handle: Handle, mode: *mut c_uint) -> Answer {
    number(gpu(handle).and_then(|_| put(mode, 0)))
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetComputeRunningProcesses_v3(
    handle: Handle,
    count: *mut c_uint,
    found: *mut ProcessInfo,
) -> Answer {
    number(gpu(handle).and_then(|gpu| list(&processes(gpu), count, found)))
}

#[unsafe(no_mangle)]
extern "C" fn nvmlDeviceGetMPSComputeRunningProcesses_v3(
    handle: Handle,
    count: *mut c_uint,
    found: *mut ProcessInfo,
) -> Answer {
    number(gpu(handle).and_then(|_| list(&[], count, found)))
}

fn list(
    processes: &[(u32, u64)],
    count: *mut c_uint,
    found: *mut ProcessInfo,
) -> Result<(), Answer> {
    let room = super::c::read(count).map_err(|_| INVALID_ARGUMENT)? as usize;
    put(count, processes.len() as c_uint)?;
    if processes.len() > room {
        return Err(INSUFFICIENT_SIZE);
    }
    for (number, &(pid, used)) in processes.iter().enumerate() {
        let info = ProcessInfo {
            pid,
            used,
            gpu_instance: c_uint::MAX,
            compute_instance: c_uint::MAX,
        };
        // SAFETY: there is room for as many as `count` states.
        put(unsafe { found.add(number) }, info)?;
    }
    Ok(())
}

/// Returns the processes that have memory of the GPU mapped, with the amount of the process's own memory.
fn processes(gpu: usize) -> Vec<(u32, u64)> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    let used = entries.filter_map(|entry| {
        let pid: u32 = entry.file_name().to_str()?.parse().ok()?;
        let maps = fs::read_to_string(entry.path().join("maps")).ok()?;
        let pieces = || maps.lines().filter_map(|line| piece(line, gpu));
        let own: HashMap<&str, u64> = pieces()
            .filter(|(_, is_own, _)| *is_own)
            .map(|(name, _, len)| (name, len))
            .collect();
        pieces().next().map(|_| (pid, own.values().sum()))
    });
    used.collect()
}

/// Parses a line of `/proc/PID/maps`: the piece of memory, and true if it is the process's own. Its mount may be
/// elsewhere in the process's namespace.
fn piece(line: &str, gpu: usize) -> Option<(&str, bool, u64)> {
    let path = Path::new(line.get(line.find('/')?..)?);
    if path.parent()?.file_name() != card::folder().file_name() {
        return None;
    }
    let name = path.file_name()?.to_str()?;
    card::parse(name)
        .filter(|(of, _)| *of == gpu)
        .map(|(_, len)| (name, line.contains(" ---"), len))
}
