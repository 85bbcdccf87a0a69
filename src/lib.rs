//! Supervises a GPU job on Linux: snapshots it on a schedule or a signal,
//! restores it when it crashes, and never changes the job.
//!
//! ```text
//! cli ──▶ rehearsal, report ──▶ supervisor
//! cli ──▶ supervisor ──▶ sandbox, job, cuda, criu, store, resident; copier ──▶ cuda
//! ```
//! Those six know nothing of each other; what two of them must agree on is
//! handed over by the supervisor; `clock` and `causes` are for all. `copier` is a process of its own that copies GPU
//! memory, `resident` speaks to the agent in the job's processes. The command line is a thin layer over this
//! library: [`supervisor::run`] does what `ckpt-run -- CMD` does.
//!
//! A program that uses [`supervisor::run`] calls [`helper_main`] first: parts of
//! the work are done by copies of the program itself, inside the job's sandbox or beside it.

use std::ffi::OsStr;
use std::path::Path;
use std::process::ExitCode;

pub mod causes;
pub mod cli;
pub mod clock;
pub mod config;
pub mod copier;
pub mod criu;
pub mod cuda;
#[cfg(any(fuzzing, test))]
#[doc(hidden)]
pub mod fuzzing;
pub mod history;
pub mod job;
mod passing;
pub mod rehearsal;
pub mod report;
pub mod resident;
pub mod sandbox;
pub mod store;
pub mod supervisor;
pub mod telemetry;

/// Does the work of a helper, when this process was started as one; otherwise `None`, at once.
///
/// To be called first thing in `main`, while the process has one thread.
#[must_use]
pub fn helper_main() -> Option<ExitCode> {
    let mut arguments = std::env::args_os();
    let name = arguments.next()?;
    if Path::new(&name).file_name() == Some(OsStr::new(criu::HOLD_PROGRAM)) {
        return Some(criu::hold_main());
    }
    let first = arguments.next()?;
    if first == sandbox::INIT_ARGUMENT {
        return Some(sandbox::init_main(arguments.next()?.to_str()?));
    }
    if first == copier::ARGUMENT && copier::started_as_one() {
        return Some(copier::main());
    }
    None
}
