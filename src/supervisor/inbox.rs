//! Messages to the loop, and the arrival of signals. One queue holds the messages, and the loop is its only consumer.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use nix::sys::signal::Signal;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc::Sender;
use tokio::sync::oneshot;

use super::decide::event::Event;
use super::hang::detector::Sample;
use super::hooks::hook_command;
use super::observers::run_status::Status;
use crate::job::Key;
use crate::run::running_job::Job;
use crate::sandbox;

/// Limit on the messages that wait for the loop. Senders wait when it is reached; no message is dropped.
pub(super) const MESSAGES_MAX: usize = 256;
/// Limit on the measurement of the disk for a status, less than a scraper's exchange with the endpoint (5 s). A status
/// without it is better than none.
const DISK_LIMIT: Duration = Duration::from_secs(4);

/// A message to the loop.
#[derive(Debug)]
pub(crate) enum Message {
    /// Something that the machine decides about.
    Event(Event),
    /// A key with a meaning for ckpt-run was typed at the job's terminal.
    Typed(Key),
    /// A client requests the status.
    StatusRequest(oneshot::Sender<Box<Status>>),
    /// Report of the sandbox with this number; `None` when every process of it is gone.
    Sandbox(u64, Option<sandbox::Event>),
    /// A sample of this job was taken; `None` if the job was ending.
    Sampled(Arc<Job>, Option<Sample>),
    HookEnded(hook_command::Ended),
}

/// Signals that the supervisor handles: the first three are requests of the user, the next three are for the job, the rest
/// is about the terminal.
const SIGNALS: [Signal; 9] = [
    Signal::SIGUSR1,
    Signal::SIGUSR2,
    Signal::SIGTERM,
    Signal::SIGINT,
    Signal::SIGQUIT,
    Signal::SIGHUP,
    Signal::SIGTSTP,
    Signal::SIGCONT,
    Signal::SIGWINCH,
];
/// Signals that stay ignored if the caller has set them to be ignored, as nohup and a shell's background jobs do.
const IGNORABLE: [Signal; 4] = [
    Signal::SIGINT,
    Signal::SIGQUIT,
    Signal::SIGHUP,
    Signal::SIGTSTP,
];

/// Sends every signal as an event, from now on.
pub(super) fn watch_signals(inbox: &Sender<Message>) -> io::Result<()> {
    for number in SIGNALS {
        if IGNORABLE.contains(&number) && is_ignored(number) {
            continue;
        }
        let mut arrivals = signal(SignalKind::from_raw(number as i32))?;
        let inbox = inbox.clone();
        tokio::spawn(async move {
            while arrivals.recv().await.is_some() {
                let event = Event::Signal(number);
                if inbox.send(Message::Event(event)).await.is_err() {
                    return;
                }
            }
        });
    }
    Ok(())
}

/// Asks the loop; `None` if the run ends before it answers.
pub(super) async fn ask<T>(
    inbox: &Sender<Message>,
    message: impl FnOnce(oneshot::Sender<T>) -> Message,
) -> Option<T> {
    let (reply, replied) = oneshot::channel();
    inbox.send(message(reply)).await.ok()?;
    replied.await.ok()
}

/// Asks the loop for the status, and adds the disk usage: the loop itself must not wait for a slow disk.
pub(super) async fn ask_status(inbox: &Sender<Message>) -> Option<Box<Status>> {
    let status = ask(inbox, Message::StatusRequest).await?;
    let unmeasured = status.clone();
    let measured = tokio::task::spawn_blocking(move || status.measured());
    let measured = tokio::time::timeout(DISK_LIMIT, measured).await;
    Some(
        measured
            .ok()
            .and_then(Result::ok)
            .map_or(unmeasured, Box::new),
    )
}

/// Returns true if the caller has set the signal to be ignored.
pub(crate) fn is_ignored(number: Signal) -> bool {
    let mask = procfs::process::Process::myself()
        .and_then(|me| me.status())
        .map(|status| status.sigign);
    mask.is_ok_and(|mask| mask & (1 << (number as u32 - 1)) != 0)
}
