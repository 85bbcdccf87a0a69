//! Messages to the loop, and the arrival of signals. One queue holds the messages, and the loop is its only consumer.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use nix::sys::signal::Signal as Number;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc::Sender;
use tokio::sync::oneshot;

use super::decide::event::{Event, Signal};
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
    /// A hook of the queue has ended.
    HookEnded(hook_command::Ended),
    /// The hook of a snapshot that begins has ended.
    BeforeSnapshotEnded(hook_command::Ended),
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
pub(super) fn watch_signals(inbox: &Sender<Message>) -> io::Result<()> {
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
pub(crate) fn is_ignored(number: Number) -> bool {
    let mask = procfs::process::Process::myself()
        .and_then(|me| me.status())
        .map(|status| status.sigign);
    mask.is_ok_and(|mask| mask & (1 << (number as u32 - 1)) != 0)
}
