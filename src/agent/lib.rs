//! The agent of `ckpt-run`, a shared library that `build.rs` compiles, the program carries, and a job preloads.
//!
//! ```text
//! the job ── dlsym, cuGetProcAddress, symbols ──▶ interpose, hooks ──▶ memory, contexts ──▶ driver
//! the supervisor ── datagrams ──▶ talk, datagram ──▶ hand_over ───────────▶ memory ───────┘
//! ```
//! It backs large pieces of device memory by memory that another process can keep, so that a snapshot need not move
//! them through the host: the supervisor holds them on the GPU while the driver puts everything else away.
//!
//! It is loaded into every process of a job, whatever that is: no standard library, nothing linked, nothing allocated,
//! nothing done before a CUDA function is looked for, and nothing at all without the token in the environment.
//!
//! This file is the root of the library. The program shares `wire`; its tests share `table`.

#![no_std]
#![allow(
    unsafe_code,
    reason = "called by the job and calls the driver, both through C"
)]

mod contexts;
mod datagram;
mod devices;
mod driver;
mod elf;
mod hand_over;
mod hooks;
mod interpose;
mod lock;
mod memory;
mod probe;
mod remake;
mod share;
mod sys;
mod table;
mod talk;
mod tell;
#[allow(dead_code, reason = "the program uses the rest")]
mod wire;

/// Replaces the C library's function: returns the agent's functions, or continues as if the caller had jumped there,
/// because `RTLD_NEXT` and `RTLD_DEFAULT` depend on the caller.
///
/// # Safety
/// As `dlsym`, whose arguments it takes.
#[cfg(target_arch = "x86_64")]
#[unsafe(no_mangle)]
#[unsafe(naked)]
pub unsafe extern "C" fn dlsym() {
    core::arch::naked_asm!(
        "push rdi",
        "push rsi",
        "sub rsp, 8",
        "call {pick}",
        "add rsp, 8",
        "pop rsi",
        "pop rdi",
        "test rax, rax",
        "jnz 2f",
        "jmp rdx",
        "2:",
        "ret",
        pick = sym interpose::pick,
    )
}

/// See above.
///
/// # Safety
/// See above.
#[cfg(target_arch = "aarch64")]
#[unsafe(no_mangle)]
#[unsafe(naked)]
pub unsafe extern "C" fn dlsym() {
    core::arch::naked_asm!(
        "stp x29, x30, [sp, #-32]!",
        "mov x29, sp",
        "stp x0, x1, [sp, #16]",
        "bl {pick}",
        "mov x16, x0",
        "mov x17, x1",
        "ldp x0, x1, [sp, #16]",
        "ldp x29, x30, [sp], #32",
        "cbnz x16, 2f",
        "br x17",
        "2:",
        "mov x0, x16",
        "ret",
        pick = sym interpose::pick,
    )
}

/// Ends the process. The agent does not panic; if it ever does, the job must not continue with memory in an unknown
/// state.
#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    // SAFETY: takes no arguments and does not return.
    unsafe { sys::abort() }
}
