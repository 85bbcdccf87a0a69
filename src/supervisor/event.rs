//! Events of a run. One queue holds them, and the loop is its only consumer.

use std::time::Duration;

use tokio::sync::oneshot;

use super::handlers::background::News;
use super::handlers::signals::Signal;
use super::observers::run_status::Status;
use super::stage::{Reply, UnpauseReply};
use crate::job::Key;
use crate::restore::error::RestoreError;
use crate::restore::restore_image::Restored;
use crate::sandbox;
use crate::snapshot::error::SnapshotError;
use crate::snapshot::paused::{Paused, Refused};
use crate::snapshot::take_snapshot::{Afterwards, Snapshotted};

/// Events that may wait for the loop. Senders wait when it is full; nothing is dropped.
pub(super) const EVENTS_MAX: usize = 256;

/// Something that happened.
#[derive(Debug)]
pub(super) enum Event {
    /// A signal arrived.
    Signal(Signal),
    /// A key with a meaning for us was typed at the job's terminal.
    Typed(Key),
    /// A client asks for a snapshot, and says what the job does then.
    SnapshotRequest(Afterwards, Reply),
    /// A client asks that the paused job goes on.
    UnpauseRequest(UnpauseReply),
    /// A client asks how the run is.
    StatusRequest(oneshot::Sender<Box<Status>>),
    /// The job goes on, or stays paused.
    Unpaused(Box<Result<Duration, Refused>>, UnpauseReply),
    /// News from the sandbox of this number; `None` when every process of it is gone.
    Sandbox(u64, Option<sandbox::Event>),
    /// The job computes again after this freeze; the image is not durable yet.
    Computing(Duration),
    /// A snapshot ended; with a job that is paused now, if it was to be.
    SnapshotEnded(Box<Result<(Snapshotted, Option<Paused>), SnapshotError>>),
    /// A restore ended.
    RestoreEnded(Box<Result<Restored, RestoreError>>),
    /// The output of a dead job is delivered.
    Drained,
    /// News from a part beside the job.
    Background(Box<News>),
    /// A timer ran out.
    Timer(Timer),
}

/// Purpose of a timer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Timer {
    /// The next scheduled snapshot may be due.
    Schedule,
    /// The wait before a restart is over.
    Backoff,
    /// The grace period after a request to stop is over.
    Grace,
    /// The word of an end that was seen did not come: the job goes on.
    Left,
    /// We may be in the foreground of the terminal by now.
    Foreground,
    /// A part beside the job wants to look.
    Background,
}
