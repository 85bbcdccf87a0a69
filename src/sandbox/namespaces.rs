//! Namespaces that processes of the job have made for themselves. CRIU restores a process into those of the first
//! process of the tree, or fails.

use std::fs;
use std::path::PathBuf;

/// Files in `/proc/PID/ns` and the names of the namespaces; those of mounts and pids are looked at elsewhere.
const KINDS: [(&str, &str); 7] = [
    ("net", "network"),
    ("ipc", "IPC"),
    ("uts", "UTS"),
    ("user", "user"),
    ("cgroup", "cgroup"),
    ("time", "time"),
    // A process that is about to start others in a time namespace.
    ("time_for_children", "time"),
];

/// Returns the first of the processes that is not in all namespaces of `root`, and the name of the namespace. All
/// pids are the host's. A process that has exited is in none.
#[must_use]
pub fn own_namespace(
    root: i32,
    pids: impl IntoIterator<Item = i32>,
) -> Option<(i32, &'static str)> {
    let roots = KINDS.map(|(file, _)| namespace(root, file));
    pids.into_iter().find_map(|pid| {
        let mut kinds = KINDS.iter().zip(&roots);
        let other = kinds.find(|((file, _), root)| {
            let own = namespace(pid, file);
            own.is_some() && root.is_some() && own != **root
        });
        other.map(|((_, name), _)| (pid, *name))
    })
}

fn namespace(pid: i32, file: &str) -> Option<PathBuf> {
    fs::read_link(format!("/proc/{pid}/ns/{file}")).ok()
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::process::{Command, Stdio};

    use super::*;

    #[test]
    fn a_process_in_a_namespace_of_its_own_is_found() {
        if !nix::unistd::geteuid().is_root() {
            eprintln!("SKIPPED: namespaces need root");
            return;
        }
        let me = i32::try_from(std::process::id()).unwrap();
        assert_eq!(own_namespace(me, [me, i32::MAX]), None);
        for (option, name) in [
            ("--net", "network"),
            ("--ipc", "IPC"),
            ("--uts", "UTS"),
            ("--user", "user"),
            ("--cgroup", "cgroup"),
            ("--time", "time"),
        ] {
            let mut child = Command::new("unshare")
                .args([option, "sh", "-c", "echo; read end"])
                .stdin(Stdio::piped())
                .stdout(Stdio::piped())
                .spawn()
                .unwrap();
            // Once it answers, it has the namespace.
            child.stdout.as_mut().unwrap().read_exact(&mut [0]).unwrap();
            let pid = i32::try_from(child.id()).unwrap();
            assert_eq!(own_namespace(me, [me, pid]), Some((pid, name)));
            drop(child.stdin.take());
            child.wait().unwrap();
        }
    }
}
