//! Actions that the machine requests; `effects` carries them out in order.

use std::time::Duration;

use super::event::Suspect;
use super::stage::{Reply, UnpauseReply};
use crate::restore::restore_image::Restored;
use crate::run::image_facts::Trigger;
use crate::snapshot::paused::StillPaused;
use crate::snapshot::take_snapshot::Afterwards;
use crate::store::ImageId;
use crate::supervisor::error::RunError;
use crate::supervisor::notice::Notice;

/// Action of the loop. The doc of an action with a result names the event that reports it.
#[derive(Debug)]
pub(crate) enum Action {
    /// Start the job from the beginning, in a new sandbox: `Started` or `Gone`.
    Start,
    /// Examine this image and prepare a sandbox for it: `Fit` or `Unfit`, before any other event.
    Examine(ImageId),
    /// Restore the examined image: `RestoreEnded`.
    BringBack,
    AdoptRestored(ImageId, Box<Restored>),
    /// Take a snapshot: `Leaving`, before any other event, or `SnapshotEnded`.
    Snapshot(SnapshotOrder),
    /// Limit the remaining time of a snapshot's hook, and let no snapshot wait for its upload.
    Hurry(Duration),
    /// Let the paused job continue from this image: `Unpaused`.
    Unpause(ImageId),
    /// The paused job was killed: nothing of it is resumed.
    AbandonPause,
    /// Compare the GPUs with the needs of this image: `Room`, before any other event.
    FindRoom(ImageId),
    SignalJob(i32),
    /// Kill every process of the sandbox: `Gone`.
    Kill,
    /// Deliver the output of the dead job: `Drained`.
    Drain,
    /// Prepare GPU memory or a copier for the restore of this image.
    PrepareStandby(ImageId),
    DismissStandby,
    /// Record the stacks of the job: `Diagnosed`.
    Diagnose(Suspect),
    WatchAnew,
    /// Stop the supervisor as the terminal requested, and the job if there is one: `Continued`.
    StopSelf {
        with_job: bool,
    },
    /// The supervisor was continued: the terminal may have changed.
    AttachTerminal,
    ResizeTerminal,
    AnswerSnapshot(Reply, Result<ImageId, String>),
    AnswerUnpause(UnpauseReply, Result<(), StillPaused>),
    /// Mark a damaged image: `SetAside`, before any other event.
    SetAside(ImageId, String),
    /// Save the run's state. If this fails, the run continues.
    Save,
    /// Save the run's state. If this fails, the run ends.
    SaveOrFail,
    Notify(Notice),
    /// End the run with this exit code.
    Exit(u8),
    /// End the run with this error.
    Fail(RunError),
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct SnapshotOrder {
    pub trigger: Trigger,
    /// The job's state after it.
    pub afterwards: Afterwards,
    /// Limit on the time of its hook, beside the hook's own.
    pub hook_limit: Option<Duration>,
}
