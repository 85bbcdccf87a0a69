#![allow(
    unsafe_code,
    reason = "called by CRIU through C, and traces the job's threads"
)]
//! Registers, memory and signals of threads that this process traces and has stopped.

use core::ffi::{c_int, c_long};

use super::kernel::read_some;
use super::listing::with_file;
use super::system_call::{address, system_call};
use super::text::hexadecimal;

/// `struct user_regs_struct` (x86-64) and the places in it.
pub type Registers = [u64; REGISTERS];
const REGISTERS: usize = 27;
pub const R10: usize = 7;
pub const R9: usize = 8;
pub const R8: usize = 9;
pub const RAX: usize = 10;
pub const RDX: usize = 12;
pub const RSI: usize = 13;
pub const RDI: usize = 14;
pub const ORIG_RAX: usize = 15;
pub const RIP: usize = 16;
pub const FLAGS: usize = 18;
pub const RSP: usize = 19;
const CS: usize = 17;
/// Selector of 64-bit code (`__USER_CS`).
const NATIVE_CODE: u64 = 0x33;

/// The instruction `syscall`, and its bytes.
pub const SYSCALL: u64 = 0x050f;
pub const SYSCALL_BYTES: u64 = 2;
/// Bytes below the stack that a function may use (System V ABI).
const UNTOUCHED: u64 = 128;

/// Makes a request about a thread. Returns its result, or an error's number, negative. The C library's function is not used:
/// `interposed` takes what goes through it for CRIU's.
///
/// # Safety
/// `data` is valid for the request.
pub unsafe fn ptrace<T>(request: c_int, thread: c_int, place: u64, data: *const T) -> c_long {
    let (place, data) = (place.cast_signed() as c_long, address(data));
    let arguments = [request.into(), thread.into(), place, data, 0, 0];
    // SAFETY: by the contract above.
    unsafe { system_call(PTRACE, arguments) }
}

/// Makes a request without further arguments.
pub fn request(request: c_int, thread: c_int) -> bool {
    // SAFETY: takes numbers only.
    unsafe { ptrace::<u8>(request, thread, 0, core::ptr::null()) == 0 }
}

/// Returns the registers of a thread; `None` if it has exited.
pub fn registers(thread: c_int) -> Option<Registers> {
    let mut registers: Registers = [0; REGISTERS];
    let into = &raw mut registers;
    // SAFETY: the kernel writes as many registers as there are.
    (unsafe { ptrace(PTRACE_GETREGS, thread, 0, into) } == 0).then_some(registers)
}

/// Gives a thread its registers.
pub fn set_registers(thread: c_int, registers: &Registers) -> bool {
    // SAFETY: reads the registers.
    unsafe { ptrace(PTRACE_SETREGS, thread, 0, &raw const *registers) == 0 }
}

/// Returns true for the registers of a thread that is in 64-bit code of this machine.
pub fn is_native(registers: &Registers) -> bool {
    cfg!(target_arch = "x86_64") && registers[CS] == NATIVE_CODE
}

/// Reads a word of a thread's memory.
pub fn peek(thread: c_int, place: u64) -> Option<u64> {
    let mut word = 0_u64;
    let into = &raw mut word;
    // SAFETY: the kernel writes a word.
    (unsafe { ptrace(PTRACE_PEEKDATA, thread, place, into) } == 0).then_some(word)
}

/// Writes a word of a thread's memory, also where the thread itself may not write.
pub fn poke(thread: c_int, place: u64, word: u64) -> bool {
    let (place, word) = (place.cast_signed() as c_long, word.cast_signed() as c_long);
    let arguments = [PTRACE_POKEDATA, thread.into(), place, word, 0, 0];
    // SAFETY: takes numbers only.
    unsafe { system_call(PTRACE, arguments) == 0 }
}

/// Writes words one after another, as [`poke`] does.
pub fn poke_all(thread: c_int, begin: u64, words: &[u64]) -> Option<()> {
    let mut places = (begin..).step_by(8).zip(words);
    let are_written = places.all(|(place, word)| poke(thread, place, *word));
    are_written.then_some(())
}

/// Returns a place for so many bytes below the stack and what a function may use there.
pub fn below_stack(registers: &Registers, bytes: u64) -> Option<u64> {
    Some(registers[RSP].checked_sub(UNTOUCHED + bytes)? & !15)
}

/// Returns the mask of the signals that wait for a thread or its process.
pub fn waiting_signals(thread: c_int) -> Option<u64> {
    let mut status = [0; STATUS_BYTES];
    let read = |file| read_some(file, &mut status);
    let read = with_file(thread, b"/status", 0, read)?.ok()?;
    let text = status.get(..read)?;
    let own = hexadecimal(text, b"\nSigPnd:\t")?;
    Some(own | hexadecimal(text, b"\nShdPnd:\t")?)
}

/// Most bytes of `/proc/TID/status` that are read: the masks are within the first 2 KiB.
const STATUS_BYTES: usize = 4096;
#[cfg(target_arch = "x86_64")]
pub const PTRACE: c_long = 101;
#[cfg(target_arch = "aarch64")]
pub const PTRACE: c_long = 117;
const PTRACE_PEEKDATA: c_int = 2;
const PTRACE_POKEDATA: c_long = 5;
pub const PTRACE_CONT: c_int = 7;
pub const PTRACE_INTERRUPT: c_int = 0x4207;
const PTRACE_GETREGS: c_int = 12;
const PTRACE_SETREGS: c_int = 13;
