//! Notices: what happened in a run, for its observers. An observer learns of the run by notices and the present
//! [`Situation`] only.

use std::path::PathBuf;
use std::time::Duration;

use super::hooks::hook_command;
use super::observers::run_phase::State;
use super::policy::interval::Chosen;
use super::policy::restart::ExitStatus;
use super::preemption::announcement::Announcement;
use crate::config::HangAction;
use crate::restore::restore_image::Restored;
use crate::run::image_facts::Trigger;
use crate::snapshot::take_snapshot::Snapshotted;
use crate::store::ImageId;

#[derive(Debug)]
pub(crate) enum Notice {
    /// The supervisor begins its work on the run of this command.
    Opened {
        command: Vec<String>,
    },
    Started(Option<i32>),
    /// The run was begun by an earlier supervisor and has no image: the job is started.
    NoImageYet,
    /// No image could be restored: the job is started.
    NoImageLeft,
    /// A newer image cannot be read; this older one is restored instead.
    Unreadable {
        image: ImageId,
        instead: Option<ImageId>,
        reason: String,
    },
    /// `--interval auto` chose another interval.
    Interval(Chosen),
    /// Snapshots take too much of the job's time, in words.
    TooDear(String),
    /// A cloud takes this machine back: the last snapshot follows.
    Preempted(Announcement),
    SnapshotBegan(Trigger),
    /// The job computes again, the image is not durable yet.
    Computing {
        freeze: Duration,
        /// Time since the snapshot began.
        took: Duration,
    },
    Snapshot(Box<Snapshotted>),
    /// A snapshot produced no image.
    SnapshotFailed {
        kind: &'static str,
        reason: String,
        then: AfterSnapshotFailure,
    },
    /// The job could not be saved before the stop and gets SIGTERM.
    SentTerm,
    /// The job is paused in the state of this image.
    Paused(ImageId),
    /// The paused job computes again; its resumption took this time.
    Unpaused(Duration),
    /// The paused job did not continue.
    StaysPaused {
        /// The failure; `None` if the GPUs have no room.
        failure: Option<String>,
        /// True if the job was lost and is restored.
        lost: bool,
    },
    /// The paused job was killed.
    PausedJobCrashed(ExitStatus),
    RestoreBegan(ImageId),
    Restored {
        image: ImageId,
        restored: Box<Restored>,
    },
    RestoreFailed {
        image: ImageId,
        reason: String,
        then: AfterFailure,
    },
    /// Newer images than this one are abandoned.
    NewerAbandoned(ImageId),
    /// The abandoned images are taken up again.
    NewerTakenUp,
    Crashed(ExitStatus),
    /// The job is restored after this wait.
    RestoreDue(ExitStatus, Duration),
    /// The job is started from the beginning after this wait.
    RestartDue(ExitStatus, Duration),
    /// The job is not restarted any more.
    GaveUp {
        /// The job's end; `None` if the run ends with an error of ckpt-run.
        status: Option<ExitStatus>,
        code: u8,
        reason: String,
        newest: Option<ImageId>,
    },
    /// The run stops without another snapshot.
    StopsUnsaved {
        why: &'static str,
        /// The image from which the run continues, or the reason why the store cannot be read.
        newest: Result<Option<ImageId>, String>,
    },
    Hung {
        reason: String,
        silent: Duration,
        log: Option<PathBuf>,
        action: HangAction,
        newest: Option<ImageId>,
    },
    /// Images from the silence of a hung job are left out: this is the newest one now.
    SilenceLeftOut(ImageId),
    /// A suspected job ended, or is about to, before it was declared hung.
    SuspectEnded,
    HookEnded(hook_command::Ended),
    /// The supervisor was stopped for this time.
    Stopped(Duration),
    /// The run ended: `finished`, `failed`, `saved` or `error`.
    Ended {
        how: &'static str,
        code: u8,
    },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum AfterSnapshotFailure {
    /// The job has ended: this is no failure.
    Ended,
    /// A hook called the snapshot off: the job continues.
    Vetoed,
    /// The job continues; so many snapshots have failed in a row.
    Continues { failed: u32 },
    /// The job does not compute as before, and is killed.
    Killed,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum AfterFailure {
    /// The image is restored once more after this wait.
    Retry(Duration),
    /// An older image is restored, or the job is started.
    Older,
    /// The run ends, which reports the failure.
    RunEnds,
}

/// The present situation of a run.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Situation {
    pub state: State,
    pub computes: bool,
    /// True if the run will end, whatever happens.
    pub ends: bool,
    /// True if the work under way may take any time.
    pub is_slow: bool,
    /// The run in a few words; `None` while the job computes and no snapshot is taken.
    pub words: Option<String>,
}
