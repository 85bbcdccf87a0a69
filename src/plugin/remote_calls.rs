#![allow(
    unsafe_code,
    reason = "called by CRIU through C, and traces the job's threads"
)]
//! System calls in restored threads before they run. They set attributes that only a thread itself can set and that
//! CRIU (4.2) does not restore: execution domain (`personality`) and memory policy (`set_mempolicy`).
//!
//! All threads are stopped and traced by CRIU, which runs this code, and have the registers with which they will
//! continue. A thread executes one instruction that is written over its own code, with all signals blocked, and then
//! has its former state again.

use core::ffi::{CStr, c_int, c_long, c_void};
use core::ptr;

use super::text::number;

/// Makes the calls of a list: entries `THREAD PERSONALITY MODE LOW HIGH`, in decimal, separated by semicolons. The last
/// two are the halves of the set of nodes. A personality or mode of [`NONE`] is not set. The supervisor detects
/// failures.
pub fn make_calls(list: &CStr) {
    for entry in list.to_bytes().split(|byte| *byte == b';') {
        let mut words = entry.split(|byte| *byte == b' ').map(number);
        let mut next = || words.next().flatten();
        let (Some(thread), Some(personality), Some(mode), Some(low), Some(high)) =
            (next(), next(), next(), next(), next())
        else {
            continue;
        };
        let Ok(thread) = c_int::try_from(thread) else {
            continue;
        };
        if cfg!(target_arch = "x86_64") {
            let nodes = u64::from(high) << 32 | u64::from(low);
            if personality != NONE {
                call(thread, SYS_PERSONALITY, [personality.into(), 0, 0], None);
            }
            if mode != NONE {
                call(
                    thread,
                    SYS_SET_MEMPOLICY,
                    [mode.into(), 0, NODES],
                    Some(nodes),
                );
            }
        }
    }
}

/// Number that stands for no value.
pub const NONE: u32 = u32::MAX;

/// Makes a system call in a thread. `pointed` is the value that its second argument points to.
fn call(thread: c_int, number: u64, mut arguments: [u64; 3], pointed: Option<u64>) {
    let mut saved: Registers = [0; REGISTERS];
    let mut mask: u64 = 0;
    let (size, all) = (size_of::<u64>(), u64::MAX);
    // SAFETY: the kernel writes as many registers as there are.
    if unsafe { ptrace(PTRACE_GETREGS, thread, 0_u64, &raw mut saved) } != 0
        || saved[CS] != NATIVE_CODE
        // SAFETY: the kernel writes a mask of this size.
        || unsafe { ptrace(PTRACE_GETSIGMASK, thread, size, &raw mut mask) } != 0
    {
        return;
    }
    // The address is below the area that functions may use without moving the stack pointer.
    let place = saved[RSP].wrapping_sub(RED_ZONE) & !7;
    let code = saved[RIP] & !7;
    let (before, instructions) = (peek(thread, place), peek(thread, code));
    if let Some(pointed) = pointed {
        arguments[1] = if pointed == 0 { 0 } else { place };
        if !poke(thread, place, pointed) {
            return;
        }
    }
    let mut registers = saved;
    registers[RIP] = code;
    registers[RAX] = number;
    // No system call is in progress that the kernel would restart.
    registers[ORIG_RAX] = u64::MAX;
    [registers[RDI], registers[RSI], registers[RDX]] = arguments;
    if poke(thread, code, instructions & !SYSCALL_MASK | SYSCALL) {
        // SAFETY: reads the values given; the thread is stopped.
        unsafe {
            ptrace(PTRACE_SETSIGMASK, thread, size, &raw const all);
            ptrace(PTRACE_SETREGS, thread, 0_u64, &raw const registers);
        }
        let was_stopped = step(thread);
        poke(thread, code, instructions);
        // SAFETY: as above.
        unsafe {
            ptrace(PTRACE_SETREGS, thread, 0_u64, &raw const saved);
            ptrace(PTRACE_SETSIGMASK, thread, size, &raw const mask);
            if was_stopped {
                // Reaches the thread's process, as CRIU's signal did.
                kill(thread, SIGSTOP);
            }
        }
    }
    if pointed.is_some() {
        poke(thread, place, before);
    }
}

/// Lets a thread execute one instruction. Returns true if that has taken away a stop signal, which no mask blocks: CRIU
/// sends it to a process that is to be restored as stopped.
fn step(thread: c_int) -> bool {
    let mut was_stopped = false;
    loop {
        let mut status = 0;
        // SAFETY: the thread is stopped, and there is room for the status.
        let has_moved = unsafe {
            ptrace(PTRACE_SINGLESTEP, thread, 0_u64, 0_u64) == 0
                && waitpid(thread, &raw mut status, WALL) == thread
        };
        if !has_moved || status != SIGSTOP << 8 | STOPPED {
            return was_stopped;
        }
        was_stopped = true;
    }
}

fn peek(thread: c_int, place: u64) -> u64 {
    // SAFETY: reads a word of a stopped thread; the C library returns it.
    let word = unsafe { ptrace(PTRACE_PEEKDATA, thread, place, ptr::null_mut::<c_void>()) };
    word.cast_unsigned()
}

fn poke(thread: c_int, place: u64, word: u64) -> bool {
    // SAFETY: writes a word of a stopped thread.
    unsafe { ptrace(PTRACE_POKEDATA, thread, place, word) == 0 }
}

/// The instruction `syscall` at the beginning of a word.
const SYSCALL: u64 = 0x050f;
const SYSCALL_MASK: u64 = 0xffff;
const RED_ZONE: u64 = 256;
/// Bits of a set of nodes, and one more, by the convention of the call.
const NODES: u64 = 65;
const SYS_PERSONALITY: u64 = 135;
const SYS_SET_MEMPOLICY: u64 = 238;
const PTRACE_PEEKDATA: c_int = 2;
const PTRACE_POKEDATA: c_int = 5;
const PTRACE_SINGLESTEP: c_int = 9;
const PTRACE_GETREGS: c_int = 12;
const PTRACE_SETREGS: c_int = 13;
const PTRACE_GETSIGMASK: c_int = 0x420a;
const PTRACE_SETSIGMASK: c_int = 0x420b;
const SIGSTOP: c_int = 19;
/// Low byte of the status of a stopped thread. The next byte is the signal.
const STOPPED: c_int = 0x7f;
/// `__WALL`: also threads.
const WALL: c_int = 0x4000_0000;

/// `struct user_regs_struct` (x86-64) and the places in it.
type Registers = [u64; REGISTERS];
const REGISTERS: usize = 27;
const RAX: usize = 10;
const RDX: usize = 12;
const RSI: usize = 13;
const RDI: usize = 14;
const ORIG_RAX: usize = 15;
const RIP: usize = 16;
const CS: usize = 17;
const RSP: usize = 19;
/// Selector of 64-bit code (`__USER_CS`).
const NATIVE_CODE: u64 = 0x33;

// Of the C library that CRIU runs with; none is linked.
unsafe extern "C" {
    fn ptrace(request: c_int, ...) -> c_long;
    fn waitpid(pid: c_int, status: *mut c_int, options: c_int) -> c_int;
    fn kill(pid: c_int, signal: c_int) -> c_int;
}
