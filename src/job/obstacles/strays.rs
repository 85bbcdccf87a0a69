//! Processes of the sandbox that are outside the tree of its job.
//!
//! CRIU dumps the tree's first process and what is below it. That process adopts orphans, so everything is below it; if
//! it ever is not, an image would omit processes silently.

use super::{Finding, Obstacle, ProcessName};
use crate::job::tree::{self, Process, TreeError};

/// Looks for a process of the job that is not among `processes`, which are those below the tree's first one. `sandbox` is
/// pid 1 of the sandbox, as the host sees it.
///
/// Pid 1's own children (CRIU, the watcher) are in its session, which no process of the job can join.
///
/// # Errors
/// The processes cannot be read.
pub(super) fn find(sandbox: i32, processes: &[Process]) -> Result<Option<Obstacle>, TreeError> {
    let children = match tree::children(sandbox) {
        // A sandbox that is gone has no job, which the snapshot finds out by itself.
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

/// Returns true if a child of pid 1 is alive and not one of ckpt-run's own.
fn is_the_jobs(child: i32, sandbox: i32) -> bool {
    tree::is_alive(child) && tree::stat(child).is_ok_and(|stat| stat.session != sandbox)
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader};
    use std::process::{Command, Stdio};

    use super::*;

    /// Like pid 1 of a sandbox: a session leader with a child in its session (a tool) and one in another (the job).
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
    fn only_a_process_of_another_session_outside_the_tree_is_a_stray() {
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
        assert_eq!(left, None, "nobody is there any more");
    }
}
