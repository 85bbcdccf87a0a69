//! Processes of the sandbox that are outside the tree of its job.
//!
//! CRIU dumps the tree's first process and what is below it. That process adopts orphans, so everything is below it; if
//! it ever is not, an image would omit processes silently.

use super::{UnrestorableError, name};
use crate::job::tree::{self, Process};

/// Checks that every process of the job is among `processes`, which are those below the tree's first one. `sandbox` is
/// pid 1 of the sandbox, as the host sees it.
///
/// Pid 1's own children (CRIU, the watcher) are in its session, which no process of the job can join.
///
/// # Errors
/// [`UnrestorableError::Stray`] names a process that is not; [`UnrestorableError::Tree`] if that cannot be determined.
pub(super) fn no_strays(sandbox: i32, processes: &[Process]) -> Result<(), UnrestorableError> {
    let children = match tree::children(sandbox) {
        // A sandbox that is gone has no job, which the snapshot finds out by itself.
        Err(error) if tree::is_gone(&error) => return Ok(()),
        children => children?,
    };
    let is_in_tree = |child| processes.iter().any(|process| process.host_pid == child);
    let is_stray = |child: &i32| !is_in_tree(*child) && is_the_jobs(*child, sandbox);
    match children.into_iter().find(is_stray) {
        Some(stray) => Err(UnrestorableError::Stray {
            pid: tree::describe(stray).map_or(stray, |process| process.pid),
            name: name(stray),
        }),
        None => Ok(()),
    }
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
        assert!(no_strays(pid, &[job]).is_ok());
        let stray = no_strays(pid, &[tool]).unwrap_err();
        assert!(matches!(stray, UnrestorableError::Stray { pid, .. } if pid == job.pid));
        drop(sandbox.stdin.take());
        sandbox.wait().unwrap();
        assert!(no_strays(pid, &[tool]).is_ok(), "nobody is there any more");
    }
}
