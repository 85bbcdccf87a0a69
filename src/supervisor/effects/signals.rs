//! Arrival of the signals that the supervisor handles.

use std::io;

use nix::sys::signal::Signal as Number;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc::Sender;

use crate::supervisor::decide::event::{Event, Signal};
use crate::supervisor::inbox::Message;

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
pub(crate) fn watch(inbox: &Sender<Message>) -> io::Result<()> {
    for (number, meaning) in MEANINGS {
        // What the caller has ignored for us (nohup, a shell's background job) stays ignored.
        if is_ignored(number) && matches!(meaning, Signal::Forward(_) | Signal::Suspend) {
            continue;
        }
        let mut arrivals = signal(SignalKind::from_raw(number as i32))?;
        let inbox = inbox.clone();
        tokio::spawn(async move {
            while arrivals.recv().await.is_some() {
                let event = Event::Signal(meaning);
                if inbox.send(Message::Event(event)).await.is_err() {
                    return;
                }
            }
        });
    }
    Ok(())
}

/// Returns true if the caller has set the signal to be ignored.
pub(crate) fn is_ignored(number: Number) -> bool {
    let mask = procfs::process::Process::myself()
        .and_then(|me| me.status())
        .map(|status| status.sigign);
    mask.is_ok_and(|mask| mask & (1 << (number as u32 - 1)) != 0)
}
