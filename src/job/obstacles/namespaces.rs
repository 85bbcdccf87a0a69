//! Namespaces that only some of the job's processes have.
//!
//! CRIU (4.2.1) restores a namespace only if the tree's first process has it. It refuses to dump some kinds, and dumps
//! others but fails to restore them. A process that has called `unshare(CLONE_NEWPID)` and has no child yet is dumped,
//! and would be restored without the namespace.

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};

use super::{Finding, Obstacle, ProcessName};
use crate::job::tree::{self, Process};

/// Kinds of namespaces: names of their links in `/proc/PID/ns`, and names for messages.
const KINDS: [(&str, &str); 10] = [
    ("mnt", "a mount namespace of its own"),
    ("pid", "a PID namespace of its own"),
    ("pid_for_children", "a PID namespace for its children"),
    ("net", "a network namespace of its own"),
    ("ipc", "an IPC namespace of its own"),
    ("uts", "a UTS namespace of its own"),
    ("user", "a user namespace of its own"),
    ("cgroup", "a cgroup namespace of its own"),
    ("time", "a time namespace of its own"),
    ("time_for_children", "a time namespace for its children"),
];

/// Searches for the first thread whose namespaces differ from those of the first process.
pub(super) fn find(processes: &[Process]) -> Option<Obstacle> {
    let (root, others) = processes.split_first()?;
    let folder = PathBuf::from(format!("/proc/{}", root.host_pid));
    // If the root has exited, the caller detects it.
    namespace(&folder, KINDS[0].0)?;
    let common = KINDS.map(|(link, _)| namespace(&folder, link));
    others.iter().find_map(|process| {
        let threads = fs::read_dir(format!("/proc/{}/task", process.host_pid));
        let mut threads = threads.into_iter().flatten().flatten();
        let kind = threads.find_map(|thread| own_kind(&thread.path(), &common))?;
        // A zombie has no namespaces.
        tree::is_alive(process.host_pid).then(|| Obstacle {
            process: name(root, process),
            finding: Finding::Namespace(kind),
        })
    })
}

/// Returns the first kind of namespace that a thread does not share; `None` if the thread has exited.
fn own_kind(thread: &Path, common: &[Option<OsString>]) -> Option<&'static str> {
    let mut kinds = KINDS.iter().zip(common);
    let (kind, _) = kinds.find(|((link, _), common)| namespace(thread, link) != **common)?;
    namespace(thread, KINDS[0].0)?;
    Some(kind.1)
}

/// Identifies a namespace of a thread. Returns `None` if the thread has exited, if it has no child yet in the namespace
/// for its children, or if the kernel does not support such namespaces.
fn namespace(thread: &Path, link: &str) -> Option<OsString> {
    let target = fs::read_link(thread.join("ns").join(link)).ok()?;
    Some(target.into_os_string())
}

/// Names a process by its pid in the first process's namespace.
fn name(root: &Process, process: &Process) -> ProcessName {
    let pids = |pid| tree::status(pid).ok()?.nspid;
    let depth = pids(root.host_pid).map_or(0, |pids| pids.len().saturating_sub(1));
    let pid = pids(process.host_pid).and_then(|pids| pids.get(depth).copied());
    ProcessName::of(process.host_pid, pid.unwrap_or(process.pid))
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::process::{Child, Command, Stdio};

    use super::*;

    /// Starts a program, waits until it writes a byte, and returns its first namespace that this process does not
    /// share.
    fn found_in(command: &mut Command) -> Option<&'static str> {
        let mut child: Child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        child.stdout.as_mut().unwrap().read_exact(&mut [0]).unwrap();
        let pids = [std::process::id(), child.id()];
        let processes = pids.map(|pid| tree::describe(i32::try_from(pid).unwrap()).unwrap());
        let found = find(&processes);
        drop(child.stdin.take());
        child.wait().unwrap();
        found.map(|obstacle| {
            assert_eq!(obstacle.process.pid, processes[1].pid);
            match obstacle.finding {
                Finding::Namespace(kind) => kind,
                other => panic!("{other}"),
            }
        })
    }

    #[test]
    fn a_process_in_a_namespace_of_its_own_is_found() {
        if !nix::unistd::geteuid().is_root() {
            eprintln!("SKIPPED: namespaces need root");
            return;
        }
        assert_eq!(
            found_in(Command::new("sh").args(["-c", "echo; read end"])),
            None
        );
        for (option, kind) in [
            ("--mount", "a mount namespace"),
            ("--net", "a network namespace"),
            ("--ipc", "an IPC namespace"),
            ("--uts", "a UTS namespace"),
            ("--user", "a user namespace"),
            ("--cgroup", "a cgroup namespace"),
            ("--time", "a time namespace"),
        ] {
            let found =
                found_in(Command::new("unshare").args([option, "sh", "-c", "echo; read end"]));
            assert!(
                found.is_some_and(|found| found.starts_with(kind)),
                "{option}: {found:?}"
            );
        }
    }

    #[test]
    fn a_thread_in_a_namespace_of_its_own_is_found() {
        if !nix::unistd::geteuid().is_root() {
            eprintln!("SKIPPED: namespaces need root");
            return;
        }
        let script = "import ctypes, threading\n\
            def apart():\n    ctypes.CDLL(None).unshare(0x40000000); print('x', flush=True); input()\n\
            threading.Thread(target=apart).start()";
        let found = found_in(Command::new("python3").args(["-c", script]));
        assert_eq!(found, Some("a network namespace of its own"));
    }
}
