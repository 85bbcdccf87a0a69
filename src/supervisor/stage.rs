//! The stages of a run, with the data that is valid in each.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::oneshot;

use super::policy::restart::ExitStatus;
use super::policy::schedule::Now;
use crate::agent_client::Token;
use crate::run::image_facts::Trigger;
use crate::run::run_state::Progress;
use crate::run::running_job::Job;
use crate::sandbox::{Ended, JobPids, Sandbox};
use crate::snapshot::paused::{Paused, StillPaused};
use crate::snapshot::take_snapshot::Afterwards;
use crate::store::ImageId;

/// First step of a supervisor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Beginning {
    /// Start the job.
    Start,
    /// Restore the newest image from which the run may continue.
    Restore,
    /// Restore this image or fail.
    RestoreThis(ImageId),
}

/// Stage of the run.
#[derive(Debug)]
pub(super) enum Stage {
    /// The job has no processes.
    Idle,
    /// Pid 1 was asked to start the job.
    Starting(Arc<Sandbox>),
    /// The job computes, or a snapshot of it is taken.
    Running(Running),
    /// An image is becoming the job.
    Restoring(Restoring),
    /// The sandbox was killed; what comes next waits until everything is gone.
    Ending(AfterEnd),
    /// A restart or another try of a restore is due: after a backoff, or, without `until`, when a client unpauses the
    /// job, which was killed while it was paused.
    Waiting {
        until: Option<Instant>,
        then: AfterWait,
    },
}

/// The step after a wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum AfterWait {
    /// Restore the newest image but so many.
    Restore { skip_newest: usize },
    /// Restore this image once more; if that fails, an older one.
    Retry { id: ImageId, skip_newest: usize },
    /// Start the job from the beginning.
    StartAnew,
}

/// Limit on the time from the first sign of a job's exit to the sandbox's report: the first process may have much
/// memory to free.
const LEAVING_LIMIT: Duration = Duration::from_secs(10);

/// A job that runs.
#[derive(Debug)]
pub(super) struct Running {
    pub job: Arc<Job>,
    pub busy: Option<PendingSnapshot>,
    pub pause: Option<Pause>,
    /// Time of the first sign that the job exits. The report is due, and no snapshot begins.
    pub leaving: Option<Instant>,
    pub ended: Option<Ended>,
    pub gone: bool,
}

impl Running {
    /// Returns true if the report of its exit is due.
    pub fn is_leaving(&self) -> bool {
        self.leaving_for().is_some()
    }

    /// Returns the time left for the report. Without a report in that time, the job had not exited.
    pub fn leaving_for(&self) -> Option<Duration> {
        let left = LEAVING_LIMIT.checked_sub(self.leaving?.elapsed())?;
        (!left.is_zero()).then_some(left)
    }
}

/// The job stands still, as somebody asked.
#[derive(Debug)]
pub(super) enum Pause {
    /// The job is stopped in the state of this image.
    Paused(ImageId, Box<Paused>),
    /// The job is about to continue; the image is still its state.
    Ending(ImageId),
}

impl Pause {
    pub fn image(&self) -> ImageId {
        match self {
            Self::Paused(image, _) | Self::Ending(image) => *image,
        }
    }

    /// The job was killed.
    pub fn abandon(self) {
        match self {
            Self::Paused(_, paused) => paused.abandon(),
            Self::Ending(_) => {}
        }
    }
}

/// A restore under way.
#[derive(Debug)]
pub(super) struct Restoring {
    pub sandbox: Arc<Sandbox>,
    pub id: ImageId,
    pub pids: JobPids,
    pub token: Option<Token>,
    pub skip_newest: usize,
    pub ended: Option<Ended>,
    pub gone: bool,
}

/// The step after a sandbox is gone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum AfterEnd {
    /// Decide by how the job ended, which somebody may have paused.
    Decide { status: ExitStatus, paused: bool },
    /// Try the next older image.
    NextImage { skip_newest: usize },
    /// Exit with this code.
    Exit(u8, Progress),
}

/// A snapshot that was asked for, or is being taken.
#[derive(Debug)]
pub(super) struct PendingSnapshot {
    pub trigger: Trigger,
    pub afterwards: Afterwards,
    pub begun: Option<Now>,
    pub replies: Vec<Reply>,
}

/// Answer to a client that asked for a snapshot.
pub(super) type Reply = oneshot::Sender<Result<ImageId, String>>;

/// Answer to a client that asked for the end of a pause.
pub(super) type UnpauseReply = oneshot::Sender<Result<(), StillPaused>>;
