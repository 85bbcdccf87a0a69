//! Namespaces that only some of the job's processes have.
//!
//! CRIU (4.2.1) restores a namespace only if the tree's first process has it. It refuses to dump some kinds, dumps
//! others and fails at the restore. A process that has called `unshare(CLONE_NEWPID)` and has no child yet is dumped
//! and would be restored without the namespace.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};

use super::{Obstacle, ProcessName, pid_at_depth};
use crate::job::tree::{self, Process};

/// Kinds that are looked at: the names of their links in `/proc/PID/ns`, and their names in messages.
const KINDS: [(&str, &str); 3] = [
    ("mnt", "a mount namespace of its own"),
    ("pid", "a PID namespace of its own"),
    ("pid_for_children", "a PID namespace for its children"),
];

/// Looks for the first thread whose namespaces are not those of the first process.
pub(super) fn look(processes: &[Process]) -> Result<(), Obstacle> {
    let Some((root, others)) = processes.split_first() else {
        return Ok(());
    };
    let folder = PathBuf::from(format!("/proc/{}", root.host_pid));
    let common = KINDS.map(|(link, _)| namespace(&folder, link));
    if common.iter().any(Option::is_none) {
        // A root that has exited; the caller finds that out.
        return Ok(());
    }
    for process in others {
        let threads = fs::read_dir(format!("/proc/{}/task", process.host_pid));
        for thread in threads.into_iter().flatten().flatten() {
            let differs = KINDS
                .iter()
                .zip(&common)
                .find(|((link, _), common)| namespace(&thread.path(), link) != **common);
            let Some(((_, kind), _)) = differs else {
                continue;
            };
            // A zombie has no namespaces any more.
            if thread.path().join("ns/mnt").read_link().is_ok() && tree::is_alive(process.host_pid)
            {
                let namespace = *kind;
                return Err(Obstacle::Namespace {
                    process: name(root, process),
                    namespace,
                });
            }
        }
    }
    Ok(())
}

/// Identifies a namespace of a thread. `None` if the thread has exited, or has no child yet in the namespace of its
/// children.
fn namespace(thread: &Path, link: &str) -> Option<OsString> {
    let target = fs::read_link(thread.join("ns").join(link)).ok()?;
    Some(target.into_os_string())
}

/// Names a process by its pid in the first process's namespace.
fn name(root: &Process, process: &Process) -> ProcessName {
    let depth = tree::status(root.host_pid)
        .ok()
        .and_then(|status| status.nspid)
        .map_or(0, |pids| pids.len().saturating_sub(1));
    let pid = pid_at_depth(process, depth).unwrap_or(process.pid);
    ProcessName::of(process.host_pid, pid)
}
