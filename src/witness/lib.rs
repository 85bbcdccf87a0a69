//! The witness: a shared library that `build.rs` compiles, the program embeds, and a job preloads where ckpt-run may not
//! use fanotify. It reports which names of files the job's programs change.
//!
//! ```text
//! the job ── open, rename, … ──▶ calls ──▶ the C library
//!                                  └──▶ report ── symlink(change and path, STORE/writes/HASH) ──▶ the supervisor
//! ```
//! A report is a symbolic link that leads nowhere: its text has the change and the path. One system call makes it, so the
//! job has no descriptor of the store open at a snapshot, and a change that was reported before costs only a look-up. It
//! is removed again if the call fails.
//!
//! Programs that are linked statically or make system calls themselves (Go) report nothing. A file that changes without a
//! report was changed by an unknown program, and the restore is refused.
//!
//! The library is loaded into every process of a job. It uses no standard library, links nothing, allocates no memory,
//! and does nothing without the variable in the environment.

#![no_std]
#![allow(
    unsafe_code,
    reason = "called by the job and calls the C library, both through C"
)]

mod calls;
#[path = "../agent/elf.rs"]
mod elf;
mod report;
mod sys;
#[path = "../plugin/system_call.rs"]
mod system_call;

/// Aborts the process. The library does not panic.
#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    // SAFETY: takes no arguments and does not return.
    unsafe { sys::abort() }
}
