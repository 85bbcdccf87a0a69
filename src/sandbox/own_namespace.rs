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

/// The threads of each process that are looked at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Threads {
    /// The first one.
    First,
    /// All, which takes longer. CRIU restores them into the namespaces of the first one.
    All,
}

/// Returns the first of the processes that is not in all namespaces of `root`, and the name of the namespace. All
/// pids are the host's. A process that has exited is in none.
#[must_use]
pub fn own_namespace(
    root: i32,
    pids: impl IntoIterator<Item = i32>,
    threads: Threads,
) -> Option<(i32, &'static str)> {
    let roots = KINDS.map(|(file, _)| namespace(&format!("/proc/{root}"), file));
    let own = |task: String| {
        let mut kinds = KINDS.iter().zip(&roots);
        let other = kinds.find(|((file, _), root)| {
            let own = namespace(&task, file);
            own.is_some() && root.is_some() && own != **root
        });
        other.map(|((_, name), _)| *name)
    };
    pids.into_iter().find_map(|pid| {
        tasks(pid, threads)
            .into_iter()
            .find_map(own)
            .map(|name| (pid, name))
    })
}

/// Returns the folders of a process's threads.
fn tasks(pid: i32, threads: Threads) -> Vec<String> {
    let process = format!("/proc/{pid}");
    match threads {
        Threads::First => vec![process],
        Threads::All => {
            let listed = fs::read_dir(format!("{process}/task"))
                .into_iter()
                .flatten();
            let name = |entry: fs::DirEntry| entry.path().to_string_lossy().into_owned();
            listed.flatten().map(name).collect()
        }
    }
}

fn namespace(task: &str, file: &str) -> Option<PathBuf> {
    fs::read_link(format!("{task}/ns/{file}")).ok()
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
        for threads in [Threads::First, Threads::All] {
            assert_eq!(own_namespace(me, [i32::MAX], threads), None);
        }
        assert_eq!(own_namespace(me, [me], Threads::First), None);
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
            assert_eq!(
                own_namespace(me, [me, pid], Threads::First),
                Some((pid, name))
            );
            drop(child.stdin.take());
            child.wait().unwrap();
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
        let mut child = Command::new("python3")
            .args(["-c", script])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        child.stdout.as_mut().unwrap().read_exact(&mut [0]).unwrap();
        let pid = i32::try_from(child.id()).unwrap();
        assert_eq!(own_namespace(pid, [pid], Threads::First), None);
        assert_eq!(
            own_namespace(pid, [pid], Threads::All),
            Some((pid, "network"))
        );
        drop(child.stdin.take());
        child.wait().unwrap();
    }
}
