//! Stages of a run, with the data that is valid in each.

use std::time::{Duration, Instant};

use tokio::sync::oneshot;

use crate::run::image_facts::Trigger;
use crate::run::run_state::Progress;
use crate::sandbox::Ended;
use crate::snapshot::paused::StillPaused;
use crate::snapshot::take_snapshot::Afterwards;
use crate::store::ImageId;
use crate::supervisor::policy::restart::ExitStatus;
use crate::supervisor::policy::schedule::Moment;

/// First step of a supervisor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Beginning {
    Start,
    /// Restore the newest image from which the run may continue.
    Restore,
    /// Restore this image or fail.
    RestoreThis(ImageId),
}

#[derive(Debug)]
pub(crate) enum Stage {
    /// The job has no processes.
    Idle,
    Starting,
    /// The job computes, is snapshotted or is paused.
    Running(Running),
    Restoring(Restoring),
    /// The sandbox was killed; the next step waits until everything is gone.
    Ending(Ending),
    /// A restart or another attempt at a restore is due.
    Waiting {
        /// End of the wait; `None` if a client has to unpause the job, which was killed while it was paused.
        until: Option<Instant>,
        then: AfterWait,
    },
    Over,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AfterWait {
    /// Restore the newest image, without the first `skip_newest`.
    Restore {
        skip_newest: usize,
    },
    /// Restore this image once more; if that fails, an older one.
    Retry {
        id: ImageId,
        skip_newest: usize,
    },
    StartAnew,
}

/// Limit on the time from the first sign of a job's exit to the sandbox's report: the first process may have much
/// memory to free.
const LEAVING_LIMIT: Duration = Duration::from_secs(10);

#[derive(Debug, Default)]
pub(crate) struct Running {
    /// The snapshot under way.
    pub busy: Option<Snapshotting>,
    pub pause: Option<Pause>,
    /// Time of the first sign that the job exits. The report is due, and no snapshot begins.
    pub leaving: Option<Instant>,
    /// True once the supervisor has killed the job. The report is due, however long it takes.
    pub killed: bool,
    pub ended: Option<Ended>,
    pub gone: bool,
}

impl Running {
    /// Returns the time left for the report of an exit. Without a report in that time, the job had not exited.
    pub fn leaving_for(&self, now: Instant) -> Option<Duration> {
        let left = LEAVING_LIMIT.checked_sub(now.saturating_duration_since(self.leaving?))?;
        (!left.is_zero()).then_some(left)
    }

    /// Returns true if the job's processes permit a snapshot, as far as the supervisor knows.
    pub fn may_begin_snapshot(&self, now: Instant) -> bool {
        self.busy.is_none() && self.is_whole() && !self.killed && self.leaving_for(now).is_none()
    }

    /// Returns true if no part of the job has exited, as far as the supervisor knows.
    pub fn is_whole(&self) -> bool {
        self.ended.is_none() && !self.gone
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Pause {
    /// The job is stopped in the state of this image.
    Paused(ImageId),
    /// The job is about to continue; the image is still its state.
    Ending(ImageId),
}

impl Pause {
    pub fn image(self) -> ImageId {
        match self {
            Self::Paused(image) | Self::Ending(image) => image,
        }
    }
}

#[derive(Debug)]
pub(crate) struct Restoring {
    pub id: ImageId,
    pub skip_newest: usize,
    /// True from the examination's end until the restore's thread ends.
    pub at_work: bool,
    pub ended: Option<Ended>,
    pub gone: bool,
}

impl Restoring {
    /// A restore whose image is about to be examined.
    pub fn new(id: ImageId, skip_newest: usize) -> Self {
        Self {
            id,
            skip_newest,
            at_work: false,
            ended: None,
            gone: false,
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Ending {
    pub then: AfterEnd,
    pub gone: bool,
    /// True while the thread of a restore changes files and streams, or that of a pause resumes GPU state.
    pub at_work: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AfterEnd {
    Decide { status: ExitStatus, paused: bool },
    NextImage { skip_newest: usize },
    Exit(u8, Progress),
}

#[derive(Debug)]
pub(crate) struct Wanted {
    pub trigger: Trigger,
    pub afterwards: Afterwards,
    pub replies: Vec<Reply>,
}

#[derive(Debug)]
pub(crate) struct Snapshotting {
    pub wanted: Wanted,
    pub begun: Moment,
    /// True once the job computes again.
    pub released: bool,
}

pub(crate) type Reply = oneshot::Sender<Result<ImageId, String>>;

pub(crate) type UnpauseReply = oneshot::Sender<Result<(), StillPaused>>;
