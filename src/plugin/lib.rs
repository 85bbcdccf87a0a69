//! The CRIU plugin of `ckpt-run`, a shared library that `build.rs` compiles and the program carries.
//!
//! A child that a CUDA process forked and that never executes another program (a `PyTorch` `DataLoader` worker) keeps
//! the GPU's device files open and mapped, though it cannot use them. CRIU refuses such files. This plugin says at a
//! dump that they need no saving, and puts `/dev/null` and zeros in their place at a restore.
//!
//! Waits that CRIU would end with an interruption go on (`interrupted`). Restored threads make the system calls that only
//! they can make (`remote_calls`). While CRIU restores, other users cannot lead it elsewhere by links (`guard`). It asks the
//! supervisor at two moments (`question`).
//!
//! Preloaded into CRIU, it takes the place of some functions of the C library: `interposed` at a dump, `subreaper` at a
//! restore.
//!
//! It is loaded into CRIU, which runs as root, by whatever C library CRIU has: no standard library, nothing linked,
//! nothing allocated. Of devices it knows only the numbers; that nobody uses them is the supervisor's to find out.
//!
//! This file is the root of the library. The program shares `variables`; its tests share `hooks`, `interrupted` and `text`.

#![no_std]
#![allow(unsafe_code, reason = "called by CRIU through C")]

mod guard;
mod hooks;
mod interposed;
mod interrupted;
mod kernel;
mod question;
mod remote_calls;
mod subreaper;
mod text;
mod variables;

/// Ends CRIU. The plugin does not panic; if it ever does, it must not touch the process that CRIU dumps or restores.
#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    // SAFETY: takes no arguments and does not return.
    unsafe { abort() }
}

unsafe extern "C" {
    fn abort() -> !;
}
