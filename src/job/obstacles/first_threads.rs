//! Processes whose first thread has ended while others run, which CRIU (4.2.1) cannot dump.
//!
//! A process with several threads is in this state for a moment when it exits. A program stays in it if its `main` calls
//! `pthread_exit`.

use super::{Finding, Obstacle};
use crate::job::tree::{Process, has_lost_first_thread};

/// Searches for the first such process.
pub(super) fn find(processes: &[Process]) -> Option<Obstacle> {
    let mut processes = processes.iter();
    let process = processes.find(|process| has_lost_first_thread(process.host_pid))?;
    Some(Obstacle::of(process, Finding::FirstThread))
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::process::{Command, Stdio};

    use super::*;
    use crate::job::tree::{is_alive, tree};

    #[test]
    fn a_process_without_its_first_thread_runs_and_is_found() {
        let text = "
import ctypes, sys, threading
threading.Thread(target=lambda: (print(flush=True), sys.stdin.read())).start()
ctypes.CDLL(None).pthread_exit(None)";
        let mut child = Command::new("python3")
            .args(["-c", text])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let pid = i32::try_from(child.id()).unwrap();
        let processes = tree(pid).unwrap();
        Read::read_exact(child.stdout.as_mut().unwrap(), &mut [0]).unwrap();
        while find(&processes).is_none() {
            std::thread::yield_now();
        }
        assert!(is_alive(pid));
        let me = tree(i32::try_from(std::process::id()).unwrap()).unwrap();
        assert_eq!(find(&me[..1]), None);
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(!is_alive(pid));
        assert_eq!(find(&processes), None);
    }
}
