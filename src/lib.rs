//! Supervises a GPU job on Linux: takes snapshots of it on a schedule or a signal, restores it when it crashes, and
//! never changes the job.
//!
//! ```text
//! cli → rehearsal, report → supervisor → doctor, restore, snapshot → gpu → run
//!     → agent_client, config, copier, criu, history, job, sandbox, store → cuda
//! ```
//! A module uses modules to its right only; `clock`, `known_errors` and other small ones serve all. `ARCHITECTURE.md`
//! has the whole map.
//!
//! The command line is a thin layer over this library: [`supervisor::run`] does what `ckpt-run -- CMD` does. Only [`cli`]
//! prints. The library's messages are `tracing` events, which [`telemetry::to_stderr`] shows as the command does.
//!
//! A program that uses [`supervisor::run`] calls [`helper_main`] first: copies of the program itself do parts of the work,
//! inside the job's sandbox or beside it.
//!
//! ```no_run
//! use std::process::ExitCode;
//!
//! use ckpt_run::config::{self, Sources};
//! use ckpt_run::cuda::GpuMap;
//! use ckpt_run::run::{OURS, chain};
//! use ckpt_run::supervisor::{self, RunOptions, What};
//!
//! fn main() -> ExitCode {
//!     if let Some(code) = ckpt_run::helper_main() {
//!         return code;
//!     }
//!     // The settings of all places, as for the command.
//!     let loaded = Sources::from_process(None, vec![]).and_then(|sources| config::load(&sources));
//!     let config = match loaded {
//!         Ok(loaded) => loaded.config,
//!         Err(error) => {
//!             eprintln!("{}", chain(&error));
//!             return ExitCode::from(OURS);
//!         }
//!     };
//!     let line = vec!["python".into(), "train.py".into()];
//!     let what = What::Command { line, fresh: false };
//!     let gpu_map = GpuMap::default();
//!     match supervisor::run(RunOptions { config, what, gpu_map, take_over: false }) {
//!         Ok(code) => ExitCode::from(code), // the job's, or 75: saved, run me again
//!         Err(error) => {
//!             eprintln!("{}", chain(&error));
//!             ExitCode::from(error.exit_code())
//!         }
//!     }
//! }
//! ```
//! `examples/supervise.rs` is that program, and a test runs it. Other processes reach a supervisor through its store, by
//! [`supervisor::request_snapshot`] and [`supervisor::request_status`]. [`store::Store`] reads images without root and
//! without CRIU.

use std::path::PathBuf;
use std::process::ExitCode;

/// Files shared with the agent, a library of its own whose root is `src/agent/lib.rs`.
mod agent {
    #[cfg(test)]
    #[allow(dead_code, reason = "the agent uses the rest")]
    pub(crate) mod table;
    #[allow(dead_code, reason = "the agent uses the rest")]
    pub(crate) mod wire;
}
pub mod agent_client;
mod checked;
pub mod cli;
pub mod clock;
pub mod config;
pub mod copier;
pub mod criu;
pub mod cuda;
pub mod doctor;
mod fd_passing;
mod files;
#[cfg(any(fuzzing, test))]
#[doc(hidden)]
pub mod fuzzing;
pub mod gpu;
pub mod history;
pub mod job;
pub mod known_errors;
mod mount_table;
mod network_socket;
mod path_text;
/// Files shared with the CRIU plugin, a library of its own whose root is `src/plugin/lib.rs`.
mod plugin {
    #[cfg(test)]
    mod call_dispatch;
    #[cfg(test)]
    #[allow(dead_code, reason = "the plugin uses the rest")]
    mod connection;
    #[cfg(test)]
    mod extended_registers;
    #[cfg(test)]
    mod faults;
    #[cfg(test)]
    #[allow(dead_code, reason = "the plugin uses the rest")]
    mod filters;
    #[cfg(test)]
    pub(crate) mod guard;
    #[cfg(test)]
    pub(crate) mod hooks;
    #[cfg(test)]
    #[allow(dead_code, reason = "the plugin uses the rest")]
    pub(crate) mod inode;
    #[cfg(test)]
    pub(crate) mod interrupted;
    #[cfg(test)]
    #[allow(dead_code, reason = "the plugin uses the rest")]
    pub(crate) mod kernel;
    #[cfg(test)]
    #[allow(dead_code, reason = "the plugin uses the rest")]
    mod last_pid;
    #[cfg(test)]
    #[allow(dead_code, reason = "the plugin uses the rest")]
    mod late_signals;
    #[cfg(test)]
    #[allow(dead_code, reason = "the plugin uses the rest")]
    mod listing;
    #[cfg(test)]
    #[allow(dead_code, reason = "the plugin uses the rest")]
    mod mapping;
    #[cfg(test)]
    mod omitted_records;
    #[cfg(test)]
    mod omitted_state;
    #[cfg(test)]
    mod protection_keys;
    #[cfg(test)]
    mod question;
    #[cfg(test)]
    mod remote_calls;
    #[cfg(test)]
    mod restarts;
    #[cfg(test)]
    pub(crate) mod short_calls;
    #[cfg(test)]
    #[allow(dead_code, reason = "the plugin uses the rest")]
    mod system_call;
    #[cfg(test)]
    mod text;
    #[cfg(test)]
    #[allow(dead_code, reason = "the plugin uses the rest")]
    mod thread_timers;
    #[cfg(test)]
    mod tracing;
    pub(crate) mod variables;
}
mod path_walk;
mod printable;
pub mod rehearsal;
pub mod remote_run;
pub mod report;
pub mod restore;
pub mod run;
mod safe_path;
pub mod sandbox;
mod secret;
mod shared_memory;
pub mod snapshot;
mod sparse_file;
pub mod store;
pub mod supervisor;
mod sync;
pub mod telemetry;
mod trust;

/// Does the work of a helper if this process was started as one. Otherwise returns `None` at once.
///
/// `main` calls it first, while the process has one thread.
#[must_use]
pub fn helper_main() -> Option<ExitCode> {
    let mut arguments = std::env::args_os();
    let first = arguments.nth(1)?;
    if first == sandbox::INIT_ARGUMENT {
        return Some(sandbox::init_main(arguments.next()?.to_str()?));
    }
    if first == copier::ARGUMENT && copier::started_as_one() {
        return Some(copier::main());
    }
    if first == sandbox::KEEPER_ARGUMENT {
        return Some(sandbox::network_keeper_main(arguments));
    }
    if first == files::WATCHER_ARGUMENT {
        return Some(files::watcher_main(arguments.map(PathBuf::from).collect()));
    }
    None
}
