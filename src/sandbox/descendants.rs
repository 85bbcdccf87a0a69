//! Descendants of pid 1, for a sandbox without a PID namespace and for signals that spare some processes.
//!
//! Pid 1 is a subreaper and adopts orphans, so that no descendant can leave. This module does not depend on the purpose
//! of the processes.

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
        // A process that has exited needs no signal.
        let _ = kill(pid, signal);
    }
}

/// Kills and reaps every descendant of this process.
///
/// A process forked meanwhile is adopted by this process when its parent is reaped, and is killed in the next round.
/// Waits until the kernel has destroyed the killed processes, like the end of a PID namespace.
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

/// Kills and reaps every descendant of this process like [`kill_all`], except one child and its descendants.
pub(super) fn kill_all_but(spared: Pid) {
    loop {
        signal_all_but(&[spared], Signal::SIGKILL);
        let mut ours = children("self");
        ours.retain(|pid| *pid != spared);
        if ours.is_empty() {
            return;
        }
        for child in ours {
            // It may have been forked, and adopted here, after the signals above. One that nobody kills may never end.
            let _ = kill(child, Signal::SIGKILL);
            let _ = waitpid(child, None);
        }
    }
}

fn children(process: &str) -> Vec<Pid> {
    // A process or thread that has exited has no children: another one has adopted them.
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
