//! State of the job that CRIU would dump and could not restore, or would restore as something else.
//!
//! It is looked for before a snapshot freezes anything, and once more while the tasks are frozen: a process may have
//! come to it in between. Each obstacle names its process and a remedy.

mod covered;
mod hugetlb;
mod namespaces;
mod proc_files;

use std::fmt;
use std::fs;
use std::path::PathBuf;

use procfs::ProcError;

use super::tree::{self, Process};
pub use hugetlb::have_huge_pages;
pub(super) use proc_files::is_proc_file;

/// The reason why a snapshot of the job would not be worth anything.
#[derive(Debug, thiserror::Error)]
pub enum Obstacle {
    /// A process has a namespace that the job's first process does not have.
    #[error(
        "process {process} has {namespace}, which CRIU does not restore inside of the job (unshare, bwrap, a \
         container): start ckpt-run inside of it, or that process without it"
    )]
    Namespace {
        /// The process.
        process: ProcessName,
        /// The namespace, with an article.
        namespace: &'static str,
    },
    /// A file in `/proc` that does not exist yet when a restore opens the job's files, or leads to something else then.
    #[error(
        "process {process} has {} open, which {reason}: let the job close it before snapshots, and open it again when it \
         reads it", path.display()
    )]
    ProcFile {
        /// The process.
        process: ProcessName,
        /// The file, as the job sees it.
        path: PathBuf,
        /// Continues "which".
        reason: &'static str,
    },
    /// A file system was mounted over an open file or folder, or over a folder above it.
    #[error(
        "process {process} has {} open, over which a file system was mounted since: unmount it, or let the process open \
         the file again", path.display()
    )]
    Covered {
        /// The process.
        process: ProcessName,
        /// The file or folder.
        path: PathBuf,
    },
    /// The job's processes share private huge pages, and the kernel could not give each its own.
    #[error(
        "process {process} and others share huge pages of {kib} KiB (MAP_HUGETLB) since their fork; a restore gives each \
         its own and needs {needed}, and the machine has {pool}: raise vm.nr_hugepages, or use transparent huge pages \
         (glibc.malloc.hugetlb=1)"
    )]
    HugePages {
        /// The process whose pages are too many.
        process: ProcessName,
        /// Size of a page in KiB.
        kib: u64,
        /// Number of pages for all processes up to this one.
        needed: u64,
        /// Number of pages that the machine has or may make.
        pool: u64,
    },
}

/// A process as messages name it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProcessName {
    /// Pid as the job sees it.
    pub pid: i32,
    /// Name of its program, at most 15 bytes; empty if it cannot be read.
    pub name: String,
}

impl ProcessName {
    /// Names a process by both its pids.
    #[must_use]
    pub fn of(host_pid: i32, pid: i32) -> Self {
        let name = fs::read(format!("/proc/{host_pid}/comm")).unwrap_or_default();
        Self {
            pid,
            name: String::from_utf8_lossy(&name).trim_end().to_owned(),
        }
    }
}

impl fmt::Display for ProcessName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.pid)?;
        if self.name.is_empty() {
            return Ok(());
        }
        write!(f, " ({})", self.name.escape_debug())
    }
}

/// Looks for the first obstacle in the job's processes; the first of them is the root of the tree. A process that exits
/// meanwhile has none.
///
/// # Errors
/// The obstacle.
pub fn look_for_obstacles(processes: &[Process]) -> Result<(), Obstacle> {
    namespaces::look(processes)?;
    proc_files::look(processes)
}

/// Looks for obstacles as [`look_for_obstacles`] does, and for those that take longer to find than a job may be frozen.
///
/// # Errors
/// The obstacle.
pub fn look_ahead(processes: &[Process]) -> Result<(), Obstacle> {
    look_for_obstacles(processes)?;
    covered::look(processes)?;
    hugetlb::look(processes)
}

/// Returns the pid of a process in the PID namespace that has `depth` namespaces above it; the innermost pid if it has
/// none there.
fn pid_at_depth(process: &Process, depth: usize) -> Result<i32, ProcError> {
    let pids = tree::status(process.host_pid)?.nspid.unwrap_or_default();
    Ok(pids.get(depth).copied().unwrap_or(process.pid))
}
