//! The signals that mean something to the supervisor.

use std::io;

use nix::sys::signal::Signal as Number;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc::Sender;

use super::event::Event;

/// A signal, by its meaning.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Signal {
    /// SIGUSR1: snapshot, go on.
    Snapshot,
    /// SIGUSR2: snapshot, stop.
    SaveAndStop,
    /// SIGTERM: snapshot and stop within the grace period; a second one stops at once.
    Terminate,
    /// SIGINT, SIGQUIT, SIGHUP: for the job.
    Forward(Number),
    /// SIGTSTP: stop the job and ourselves.
    Suspend,
    /// SIGCONT: go on.
    Continue,
    /// SIGWINCH: the terminal's window has another size.
    Resize,
}

const MEANINGS: [(Number, Signal); 9] = [
    (Number::SIGUSR1, Signal::Snapshot),
    (Number::SIGUSR2, Signal::SaveAndStop),
    (Number::SIGTERM, Signal::Terminate),
    (Number::SIGINT, Signal::Forward(Number::SIGINT)),
    (Number::SIGQUIT, Signal::Forward(Number::SIGQUIT)),
    (Number::SIGHUP, Signal::Forward(Number::SIGHUP)),
    (Number::SIGTSTP, Signal::Suspend),
    (Number::SIGCONT, Signal::Continue),
    (Number::SIGWINCH, Signal::Resize),
];

/// Sends every signal as an event, from now on.
pub(super) fn watch(events: &Sender<Event>) -> io::Result<()> {
    for (number, meaning) in MEANINGS {
        // What the caller has ignored for us (nohup, a shell's background job) stays ignored.
        if is_ignored(number) && matches!(meaning, Signal::Forward(_) | Signal::Suspend) {
            continue;
        }
        let mut arrivals = signal(SignalKind::from_raw(number as i32))?;
        let events = events.clone();
        tokio::spawn(async move {
            while arrivals.recv().await.is_some() {
                if events.send(Event::Signal(meaning)).await.is_err() {
                    return;
                }
            }
        });
    }
    Ok(())
}

/// Whether the caller has ignored it for us.
pub(super) fn is_ignored(number: Number) -> bool {
    let mask = procfs::process::Process::myself()
        .and_then(|me| me.status())
        .map(|status| status.sigign);
    mask.is_ok_and(|mask| mask & (1 << (number as u32 - 1)) != 0)
}
