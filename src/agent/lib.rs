//! The agent of `ckpt-run`: a shared library that `build.rs` compiles, the program embeds, and each process of a job
//! preloads.
//!
//! ```text
//! the job ── dlsym, cuGetProcAddress, symbols ──▶ interpose, hooks ──▶ memory, program_memory, contexts ──▶ driver
//! the supervisor ── datagrams ──▶ service, datagram ──▶ hand_over ────────▶ memory ───────┘
//! ```
//! It allocates large pieces of device memory in a form that another process can hold. During a snapshot the supervisor
//! holds them on the GPU while the driver saves everything else, so they need not be moved through the host.
//!
//! It is loaded into every process of a job, CUDA or not. So it uses no standard library, links nothing, allocates no
//! memory, does nothing before a CUDA function is looked up, and nothing at all without the token in the environment.
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
mod gate;
mod hand_over;
mod hooks;
mod interpose;
mod lock;
mod memory;
mod probe;
mod program_memory;
mod remake;
mod service;
mod share;
mod sys;
mod table;
mod transmission;
#[allow(dead_code, reason = "the program uses the rest")]
mod wire;

/// Replaces the C library's function: returns the agent's functions, or continues as if the caller had jumped there,
/// because `RTLD_NEXT` and `RTLD_DEFAULT` depend on the caller.
///
/// # Safety
/// The same as for `dlsym`, whose arguments it takes.
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

/// Variant for the other architecture; see above.
///
/// # Safety
/// The same as above.
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

/// Aborts the process. The agent does not panic; if it ever does, the job must not continue with memory in an unknown
/// state.
#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    // SAFETY: takes no arguments and does not return.
    unsafe { sys::abort() }
}
