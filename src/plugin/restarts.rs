#![allow(unsafe_code, reason = "called by CRIU through C")]
//! Calls of threads that the kernel would restart after the dump's stop, or end if a signal arrives.
//!
//! The kernel decides that when the thread leaves the stop: a handler of a signal ends most waiting calls with `EINTR`. CRIU
//! (4.2) decides before: it sets the registers so that the thread makes the call again. Then a signal that arrives during
//! the freeze has its handler called, and the call waits on: `alarm` and `read` would wait forever. Therefore the registers
//! of the stop are noted in the file of the omitted state, and a thread has them again when it continues after the dump
//! or a restore.

use core::ffi::c_int;

use super::omitted_records::{Record, append, file};
use super::remote_calls::rest;
use super::tracing::{
    ORIG_RAX, RAX, RIP, Registers, SYSCALL_BYTES, ptrace, registers, set_registers,
};

/// Kind of a record with such a call: result, address behind the call and its number, eight bytes each.
pub const RESTART: u32 = 8;
/// Result of a call that is restarted unless a handler is called (`ERESTARTNOHAND`).
pub const RESTARTS_WITHOUT_HANDLER: u64 = 514_u64.wrapping_neg();
/// The same, but handlers may ask for a restart (`ERESTARTSYS`, `SA_RESTART`).
const RESTARTS: u64 = 512_u64.wrapping_neg();

/// Notes the call that a stopped thread is in, if the kernel would restart it.
pub fn note(thread: c_int, registers: &Registers) -> Option<()> {
    let [result, behind, number] = [RAX, RIP, ORIG_RAX].map(|place| registers[place]);
    if matches!(result, RESTARTS | RESTARTS_WITHOUT_HANDLER) && number.cast_signed() >= 0 {
        let words = [result, behind, number].map(u64::to_ne_bytes);
        append(file()?, RESTART, thread, &[words.as_flattened()])?;
    }
    Some(())
}

/// Gives a stopped thread the registers by which the kernel restarts its call, or ends it because of a signal.
pub fn let_kernel_decide(record: &Record<'_>) -> Option<()> {
    let (words, _) = record.content.as_chunks();
    let &[result, behind, number] = words else {
        return None;
    };
    let [result, behind, number] = [result, behind, number].map(u64::from_ne_bytes);
    let mut registers = registers(record.thread)?;
    // Otherwise CRIU has not set them, because the dump has failed before.
    if registers[RIP] == behind.checked_sub(SYSCALL_BYTES)? && registers[RAX] == number {
        [registers[RAX], registers[RIP], registers[ORIG_RAX]] = [result, behind, number];
        set_registers(record.thread, &registers).then_some(())?;
        if is_at_call(record.thread) {
            rest(record.thread);
        }
    }
    Some(())
}

/// Returns true for a thread that is stopped at the beginning or the end of a system call, where the kernel does not look at
/// its result when the thread continues. Kernels before 5.3 do not tell.
fn is_at_call(thread: c_int) -> bool {
    let mut operation = 0_u8;
    let into = &raw mut operation;
    // SAFETY: the kernel writes one byte.
    unsafe { ptrace(PTRACE_GET_SYSCALL_INFO, thread, 1, into) <= 0 || operation != 0 }
}

const PTRACE_GET_SYSCALL_INFO: c_int = 0x420e;
