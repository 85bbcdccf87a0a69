//! Processes of the sandbox outside of the job's tree.
//!
//! CRIU dumps the tree's first process and its descendants. That process adopts orphans, so every process should be its
//! descendant. If one were not, an image would omit it silently.

use super::{Finding, Obstacle, ProcessName};
use crate::job::tree::{self, Process, TreeError};

/// Searches for a process of the job that is not among `processes`, the descendants of the tree's first process.
/// `sandbox` is the host pid of the sandbox's pid 1.
///
/// Pid 1's other children (CRIU, the watcher) are in its session, which no process of the job can join.
///
/// # Errors
/// The processes cannot be read.
pub(super) fn find(sandbox: i32, processes: &[Process]) -> Result<Option<Obstacle>, TreeError> {
    let children = match tree::children(sandbox) {
        // A sandbox that has exited has no job. The snapshot detects that.
        Err(error) if tree::is_gone(&error) => return Ok(None),
        children => children?,
    };
    let is_in_tree = |child| processes.iter().any(|process| process.host_pid == child);
    let is_stray = |child: &i32| !is_in_tree(*child) && is_the_jobs(*child, sandbox);
    let stray = children.into_iter().find(is_stray);
    Ok(stray.map(|stray| {
        let pid = tree::describe(stray).map_or(stray, |process| process.pid);
        Obstacle {
            process: ProcessName::of(stray, pid),
            finding: Finding::Stray,
        }
    }))
}

/// Returns true if a child of pid 1 is alive and does not belong to ckpt-run.
fn is_the_jobs(child: i32, sandbox: i32) -> bool {
    tree::is_alive(child) && tree::stat(child).is_ok_and(|stat| stat.session != sandbox)
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader};
    use std::process::{Command, Stdio};

    use super::*;

    /// A program like pid 1 of a sandbox: a session leader with a child in its session (a tool) and one in another (the
    /// job).
    const SANDBOX: &str = "
import os, signal, sys
os.setsid()
children = []
for leads in False, True:
    ready = os.pipe()
    children.append(os.fork())
    if children[-1] == 0:
        if leads: os.setsid()
        os.close(0)
        os.write(ready[1], b'x')
        signal.pause()
    os.read(ready[0], 1)
print(*children, flush=True)
sys.stdin.read()
for child in children: os.kill(child, signal.SIGKILL)";

    #[test]
    fn only_a_foreign_session_outside_the_tree_is_a_stray() {
        let mut sandbox = Command::new("python3")
            .args(["-c", SANDBOX])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        let mut stdout = BufReader::new(sandbox.stdout.take().unwrap());
        stdout.read_line(&mut line).unwrap();
        let pids: Vec<i32> = line
            .split_whitespace()
            .map(|pid| pid.parse().unwrap())
            .collect();
        let pid = i32::try_from(sandbox.id()).unwrap();
        let [tool, job] = [pids[0], pids[1]].map(|pid| tree::describe(pid).unwrap());
        assert_eq!(find(pid, &[job]).unwrap(), None);
        let stray = find(pid, &[tool]).unwrap();
        assert_eq!(stray, Some(Obstacle::of(&job, Finding::Stray)));
        drop(sandbox.stdin.take());
        sandbox.wait().unwrap();
        let left = find(pid, &[tool]).unwrap();
        assert_eq!(left, None, "all processes have exited");
    }
}
