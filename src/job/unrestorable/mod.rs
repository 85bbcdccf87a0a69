//! Detection of what CRIU dumps and cannot restore, and of what a snapshot would omit or harm. Each check runs before
//! the freeze, so that the job does not wait for a refusal, and again while the tasks are frozen.

mod leases;
mod sessions;
mod strays;

use std::fs;
use std::path::PathBuf;

use super::tree::{Process, TreeError};

/// The reason why an image would not contain all of the job, or could not be restored. The job computes.
#[derive(Debug, thiserror::Error)]
pub enum UnrestorableError {
    /// The processes could not be read.
    #[error("cannot read the job's process tree")]
    Tree(#[from] TreeError),
    /// A process of the sandbox is outside the tree that CRIU dumps.
    #[error(
        "process {pid} ({name}) is not below the job's first process, so that an image would not contain it: end it, or \
         start the program that it belongs to again"
    )]
    Stray {
        /// Pid as the job sees it.
        pid: i32,
        /// The kernel's name for the process.
        name: String,
    },
    /// A process is in the session of a process that is not its ancestor.
    #[error(
        "process {pid} ({name}) is in the session of process {leader}, which is not above it, because process {parent} \
         ({parent_name}) adopted it as a subreaper, and CRIU cannot restore such a session: start the program in the \
         foreground, or with setsid, or without the subreaper"
    )]
    Session {
        /// Pid as the job sees it.
        pid: i32,
        /// The kernel's name for the process.
        name: String,
        /// Pid of the session's leader, which may have exited.
        leader: i32,
        /// Pid of the parent, as the job sees it.
        parent: i32,
        /// The kernel's name for the parent.
        parent_name: String,
    },
    /// A process has a lease that a snapshot would break.
    #[error(
        "process {pid} ({name}) has a write lease on {} (F_SETLEASE), which a snapshot would break: let it release the \
         lease before snapshots, or run it without leases (in Samba: kernel oplocks = no)", .path.display()
    )]
    Lease {
        /// Pid as the job sees it.
        pid: i32,
        /// The kernel's name for the process.
        name: String,
        /// The file.
        path: PathBuf,
    },
}

/// Checks that an image of `processes`, the tree's first process and all below it, contains the whole job of the sandbox
/// and can be restored. `sandbox` is pid 1 of the sandbox, as the host sees it.
///
/// # Errors
/// See [`UnrestorableError`].
pub fn check_restorable(sandbox: i32, processes: &[Process]) -> Result<(), UnrestorableError> {
    strays::no_strays(sandbox, processes)?;
    sessions::sessions_come_back(processes)?;
    leases::no_write_leases(processes)
}

/// Returns the kernel's name for a process (a host pid).
fn name(pid: i32) -> String {
    let name = fs::read(format!("/proc/{pid}/comm")).unwrap_or_default();
    let name = String::from_utf8_lossy(&name);
    name.trim_end().escape_default().to_string()
}
