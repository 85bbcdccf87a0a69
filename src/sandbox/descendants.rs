//! The processes below pid 1, where no PID namespace holds them together or not all are meant.
//!
//! Pid 1 is a subreaper: whatever loses its parent comes to it, so that
//! nothing below it can get away. Knows nothing of what the processes are.

use std::fs;

use nix::errno::Errno;
use nix::sys::signal::{Signal, kill};
use nix::sys::wait::waitpid;
use nix::unistd::Pid;

/// Sends a signal to every descendant of this process.
pub(super) fn signal_all(signal: Signal) {
    signal_all_but(&[], signal);
}

/// Signals all descendants as [`signal_all`] does, except these children and their descendants.
pub(super) fn signal_all_but(spared: &[Pid], signal: Signal) {
    for pid in all_but(spared) {
        // One that is gone by now needs no signal.
        let _ = kill(pid, signal);
    }
}

/// Kills and reaps every descendant of this process.
///
/// What is forked meanwhile comes to us when its parent is reaped, and is killed in the next round.
/// Waits as long as the kernel takes for a killed process to die, as the end of a PID namespace does.
pub(super) fn kill_all() {
    loop {
        signal_all(Signal::SIGKILL);
        match waitpid(None, None) {
            Ok(_) | Err(Errno::EINTR) => {}
            Err(_) => return,
        }
    }
}

/// Returns all descendants of this process except some children and their descendants, parents before children.
fn all_but(spared: &[Pid]) -> Vec<Pid> {
    let mut found = children("self");
    found.retain(|pid| !spared.contains(pid));
    let mut next = 0;
    while let Some(pid) = found.get(next) {
        let below = children(&pid.to_string());
        found.extend(below);
        next += 1;
    }
    found
}

/// Kills and reaps every descendant of this process as [`kill_all`] does, but one child.
pub(super) fn kill_all_but(spared: Pid) {
    loop {
        let others = all_but(&[spared]);
        if others.is_empty() {
            return;
        }
        for pid in others {
            let _ = kill(pid, Signal::SIGKILL);
        }
        // Whoever has died is a child of ours or of one that dies too. The spared one is not waited for.
        for child in children("self").into_iter().filter(|pid| *pid != spared) {
            let _ = waitpid(child, None);
        }
    }
}

fn children(process: &str) -> Vec<Pid> {
    // A process or thread that has ended has no children any more: they went to another one.
    let threads = fs::read_dir(format!("/proc/{process}/task"));
    let lists = threads.into_iter().flatten().flatten();
    lists
        .filter_map(|thread| fs::read_to_string(thread.path().join("children")).ok())
        .flat_map(|list| {
            list.split_whitespace()
                .filter_map(|pid| pid.parse().ok().map(Pid::from_raw))
                .collect::<Vec<_>>()
        })
        .collect()
}
