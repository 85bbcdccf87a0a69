//! The caller's terminal: in raw mode while a job reads its keys, in its own modes in between.
//!
//! ```text
//! job computes, we are in the foreground ──▶ raw: every key goes to the job's own terminal
//! else (restore, backoff, pause, stopped) ─▶ its own modes: Ctrl-C is a signal to us
//! ```
//! Must not know how the job's terminal is made.

use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::{Pid, getpgrp, getpid};
use procfs::process::Process;
use tokio::sync::mpsc::Sender;

use crate::job::CallersTerminal;
use crate::run::running_job::SharedStreams;
use crate::supervisor::inbox::{Message, is_ignored};
use crate::sync::locked;

/// Interval of checks for the foreground: a shell that moves a running job there notifies no one.
const LOOK_INTERVAL: Duration = Duration::from_millis(300);
/// Most ancestors in our own process group: scripts that called scripts.
const ANCESTORS_MAX: usize = 64;

/// The caller's terminal, if our stdin is one. Dropped, it has its own modes.
#[derive(Debug)]
pub(crate) struct Keyboard {
    terminal: Option<CallersTerminal>,
    /// Somebody may have changed its modes.
    doubtful: bool,
    /// The job waits for it, and we are in the background.
    wanted: bool,
}

impl Keyboard {
    /// Attaches to the terminal of stdin. Keys for ckpt-run become events.
    pub fn attach(streams: &SharedStreams, inbox: &Sender<Message>) -> Self {
        let inbox = inbox.clone();
        let streams = locked(streams);
        streams.stdin.on_key(move |key| {
            // The loop ends with the run only.
            let _ = inbox.blocking_send(Message::Typed(key));
        });
        Self {
            terminal: CallersTerminal::of_stdin(),
            doubtful: false,
            wanted: false,
        }
    }

    pub fn next_look(&self) -> Option<Duration> {
        self.wanted.then_some(LOOK_INTERVAL)
    }

    /// We were stopped, by whomever.
    pub fn continued(&mut self) {
        self.doubtful = true;
    }

    pub fn give_back(&mut self) {
        if let Some(terminal) = &mut self.terminal {
            terminal.give_back();
        }
    }

    pub fn is_attached(&self) -> bool {
        self.terminal.is_some()
    }

    /// Takes the terminal for the job, or gives it back. Returns true if it was just taken.
    pub fn attend(&mut self, by_job: bool) -> bool {
        let Some(terminal) = &mut self.terminal else {
            return false;
        };
        if !by_job {
            self.wanted = false;
            terminal.give_back();
            return false;
        }
        if terminal.is_taken() && !self.doubtful {
            return false;
        }
        self.doubtful = false;
        self.wanted = !terminal.take();
        !self.wanted
    }
}

/// Sends SIGTSTP to the caller's process group, as a terminal would at Ctrl-Z. It arrives here as a signal, which stops
/// the job. Without a process that continues this one, nothing happens.
pub(crate) fn suspend_group() {
    if is_ignored(Signal::SIGTSTP) || !somebody_continues_us() {
        tracing::debug!("not stopped: no process could continue ckpt-run");
    } else {
        let _ = kill(Pid::from_raw(0), Signal::SIGTSTP); // the group is our own
    }
}

/// Returns true if a shell watches this process group. A group whose first outside parent is not in this session is
/// orphaned, and no process is notified that it is stopped.
fn somebody_continues_us() -> bool {
    let about = |pid| Process::new(pid).and_then(|process| process.stat()).ok();
    let Some(us) = about(getpid().as_raw()) else {
        return false;
    };
    let mut parent = us.ppid;
    for _ in 0..ANCESTORS_MAX {
        match about(parent) {
            Some(stat) if stat.pgrp == getpgrp().as_raw() => parent = stat.ppid,
            Some(stat) => return stat.session == us.session,
            None => return false,
        }
    }
    false
}
