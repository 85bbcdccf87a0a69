//! Open files and working directories in `/proc`.
//!
//! CRIU opens files by path at a time when all processes of the tree exist (also exited ones with open files in
//! `/proc`) but have no threads and descriptors yet. In a new sandbox, a path leads to the same file if it is global
//! (`/proc/stat`), or belongs to a process of the tree or to pid 1. CRIU seeks to the file's position before the
//! process has its memory, so a list of its mappings that it has begun to read would continue at any place.

use std::collections::HashSet;
use std::path::{Component, Path, PathBuf};

use nix::sys::stat::{fstat, lstat};
use nix::sys::statfs::{PROC_SUPER_MAGIC, fstatfs, statfs};

use super::{Finding, Obstacle};
use crate::job::descriptors::{Descriptor, Descriptors, Target};
use crate::job::tree::Process;

/// Mount point of procfs.
const PROC: &str = "/proc";
/// Files that list the mappings of a process.
const LISTS_OF_MAPPINGS: [&str; 3] = ["maps", "smaps", "numa_maps"];
/// Pid of the first process in every PID namespace.
const INIT: i32 = 1;

/// Returns true if the target of a link in `/proc/PID` is a file of `/proc`. Such files have no stored content: the
/// kernel generates it for each read.
pub(in crate::job) fn is_proc_file(link: &Path, target: &Path) -> bool {
    target.starts_with(PROC)
        && statfs(link).is_ok_and(|about| about.filesystem_type() == PROC_SUPER_MAGIC)
}

/// Searches for the first file that a restore could not open, or would replace by another one.
pub(super) fn find(processes: &[Process], open: &[Descriptors]) -> Option<Obstacle> {
    let pids: HashSet<i32> = processes.iter().map(|process| process.pid).collect();
    // The kernel reports paths relative to the root of the mount namespace, even for a process with another root.
    let top = processes.first().map_or(0, |root| root.host_pid);
    let top = PathBuf::from(format!("/proc/{top}/root"));
    for one in open {
        if let Some(list) = one.all.iter().find(|it| is_begun_list(it)) {
            let finding = Finding::ProcFile {
                path: list.target.clone(),
                reason: "the process has begun to read, and which a restored process would continue at another place",
            };
            return Some(Obstacle::of(&one.process, finding));
        }
        for (link, listed) in one.with_folders() {
            let Some(target) = listed
                .starts_with(PROC)
                .then(|| Target::of(&link))
                .flatten()
            else {
                continue;
            };
            let on = fstatfs(&target.held);
            if !on.is_ok_and(|about| about.filesystem_type() == PROC_SUPER_MAGIC) {
                continue;
            }
            if let Some(reason) = reason(&target.path, &pids, || Reached::by(&target, &top)) {
                let path = target.path;
                let finding = Finding::ProcFile { path, reason };
                return Some(Obstacle::of(&one.process, finding));
            }
        }
    }
    None
}

/// Returns true for a list of mappings that the process has begun to read. Its end is a place like any other: the next read
/// must find it again.
fn is_begun_list(descriptor: &Descriptor) -> bool {
    let path = &descriptor.target;
    let name = path.file_name().and_then(|name| name.to_str());
    path.starts_with(PROC)
        && name.is_some_and(|name| LISTS_OF_MAPPINGS.contains(&name))
        && descriptor.position().is_some_and(|position| position != 0)
}

/// Target of an open file's path in a restore.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Reached {
    Same,
    /// The pid in the path belongs to a later process.
    Other,
    /// The process has exited. CRIU creates a process with its pid to open the file.
    Nothing,
}

impl Reached {
    fn by(target: &Target, root: &Path) -> Self {
        let path = target.path.strip_prefix("/").unwrap_or(&target.path);
        match (fstat(&target.held), lstat(&root.join(path))) {
            (Ok(open), Ok(named)) if (open.st_dev, open.st_ino) == (named.st_dev, named.st_ino) => {
                Self::Same
            }
            (Ok(_), Ok(_)) => Self::Other,
            (Ok(_) | Err(_), Err(_)) | (Err(_), Ok(_)) => Self::Nothing,
        }
    }
}

/// Returns the reason why the file cannot be restored. `pids` are those of the tree.
fn reason(
    path: &Path,
    pids: &HashSet<i32>,
    reached: impl FnOnce() -> Reached,
) -> Option<&'static str> {
    let mut names = path.components().skip(2).map(|name| match name {
        Component::Normal(name) => name.to_str().unwrap_or_default(),
        _ => "",
    });
    let pid: i32 = names.next()?.parse().ok()?;
    let (below, number) = (names.next(), names.next());
    if below == Some("task") && number.is_some_and(|thread| thread.parse() != Ok(pid)) {
        return Some("belongs to a thread, and CRIU opens files before it creates threads");
    }
    if matches!(below, Some("fd" | "fdinfo" | "map_files")) && number.is_some() {
        return Some(
            "belongs to a descriptor or mapping, which may not exist when CRIU opens files",
        );
    }
    match reached() {
        // CRIU (4.2.1, check_path_remap) overwrites the end of this name in its buffer.
        Reached::Same if below.is_none() => {
            Some("is a folder that CRIU records under a wrong name")
        }
        Reached::Same if pid == INIT || pids.contains(&pid) => None,
        Reached::Same => Some("belongs to a process outside of the job"),
        Reached::Other => Some("belongs to an earlier process of that pid"),
        Reached::Nothing => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_that_a_restore_cannot_open_have_a_reason() {
        let pids = HashSet::from([300, 301]);
        for (path, reached, refused) in [
            ("/proc", Reached::Same, false),
            ("/proc/stat", Reached::Same, false),
            ("/proc/sys/kernel/pid_max", Reached::Same, false),
            ("/proc/301/status", Reached::Same, false),
            ("/proc/301/task", Reached::Same, false),
            ("/proc/301/task/301/status", Reached::Same, false),
            ("/proc/301/fd", Reached::Same, false),
            ("/proc/1/status", Reached::Same, false),
            ("/proc/302/status", Reached::Nothing, false),
            ("/proc/302 (deleted)", Reached::Nothing, false),
            ("/proc/301", Reached::Same, true),
            ("/proc/302/status", Reached::Same, true),
            ("/proc/301/status", Reached::Other, true),
            ("/proc/301/task/305/status", Reached::Same, true),
            ("/proc/301/fdinfo/4", Reached::Same, true),
        ] {
            let reason = reason(Path::new(path), &pids, || reached);
            assert_eq!(reason.is_some(), refused, "{path}: {reason:?}");
        }
    }
}
