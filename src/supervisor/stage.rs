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
    /// With the job's start.
    Start,
    /// From the newest image that may be gone on from.
    Restore,
    /// From this image, or not at all.
    RestoreThis(ImageId),
}

/// Stage of the run.
#[derive(Debug)]
pub(super) enum Stage {
    /// Nothing of the job exists.
    Idle,
    /// Pid 1 was asked to start the job.
    Starting(Arc<Sandbox>),
    /// The job computes, or a snapshot of it is taken.
    Running(Running),
    /// An image is becoming the job.
    Restoring(Restoring),
    /// The sandbox was killed; what comes next waits until everything is gone.
    Ending(AfterEnd),
    /// Before a restart: for a backoff, or without `until` until somebody unpauses the job, which was killed as it stood
    /// still.
    Waiting {
        until: Option<Instant>,
        skip_newest: Option<usize>,
    },
}

/// From the sight of a job's end to the word of it: its first process may have much memory to give back.
const LEAVING_LIMIT: Duration = Duration::from_secs(10);

/// A job that runs.
#[derive(Debug)]
pub(super) struct Running {
    pub job: Arc<Job>,
    pub busy: Option<PendingSnapshot>,
    pub pause: Option<Pause>,
    /// When it was seen that it ends, or has: the word of it is on its way, and no snapshot begins.
    pub leaving: Option<Instant>,
    pub ended: Option<Ended>,
    pub gone: bool,
}

impl Running {
    /// Whether the word of its end is still waited for.
    pub fn is_leaving(&self) -> bool {
        self.leaving_for().is_some()
    }

    /// For how long. Where none comes in that time, it had not ended.
    pub fn leaving_for(&self) -> Option<Duration> {
        let left = LEAVING_LIMIT.checked_sub(self.leaving?.elapsed())?;
        (!left.is_zero()).then_some(left)
    }
}

/// The job stands still, as somebody asked.
#[derive(Debug)]
pub(super) enum Pause {
    /// As it is in this image.
    Paused(ImageId, Box<Paused>),
    /// It is about to go on; the image is still what it is.
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

/// What happens once a sandbox is gone.
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
