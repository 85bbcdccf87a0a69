//! Messages to the loop. One queue holds them, and the loop is its only consumer.

use std::sync::Arc;

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
