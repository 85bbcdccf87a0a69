//! The CRIU plugin of `ckpt-run`, a shared library that `build.rs` compiles and the program carries.
//!
//! A child forked by a CUDA process that executes no other program (a `PyTorch` `DataLoader` worker) keeps the GPU's
//! device files open and mapped, although it cannot use them. CRIU refuses such files. At a dump, this plugin reports
//! that they need no saving. At a restore, it replaces them by `/dev/null` and zeros.
//!
//! System calls that CRIU would interrupt or cut short continue (`interrupted`, `short_calls`). Restored threads make the
//! system calls that only they can make (`remote_calls`), and get state that CRIU omits (`omitted_state`). During a restore,
//! links of other users cannot redirect CRIU (`guard`). The plugin asks the supervisor for permission at several steps
//! (`question`).
//!
//! Preloaded into CRIU, it takes the place of some functions of the C library: `interposed` and `socket_names` at a dump, `exit_codes`,
//! `pages`, `reserved` and `subreaper` at a restore, `refused` where CRIU has no privileges on the machine.
//!
//! It is loaded into CRIU, which runs as root, with any C library: it uses no standard library, links nothing and
//! allocates nothing. It knows only device numbers. The supervisor checks that no process uses the devices.
//!
//! This file is the root of the library. The program shares `variables`; its tests share the files that are not entry
//! points.

#![no_std]
#![allow(unsafe_code, reason = "called by CRIU through C")]

mod call_dispatch;
mod connection;
mod exit_codes;
mod extended_registers;
mod faults;
mod filters;
mod frozen_files;
mod guard;
mod hooks;
mod inode;
mod interposed;
mod interrupted;
mod kernel;
mod last_pid;
mod late_signals;
mod listing;
mod mapping;
mod messages;
mod omitted_records;
mod omitted_state;
mod pages;
mod protection_keys;
mod question;
mod refused;
mod remote_calls;
mod reserved;
mod restarts;
mod settings;
mod short_calls;
mod socket_names;
mod stand_in;
mod subreaper;
mod system_call;
mod terminals;
mod text;
mod thread_timers;
mod tracing;
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
