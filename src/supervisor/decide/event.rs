//! Events that the machine decides about, and the facts of their moment.

use std::cell::OnceCell;
use std::fmt;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;

use super::stage::{Beginning, Reply, UnpauseReply};
use crate::restore::error::RestoreError;
use crate::restore::restore_image::Restored;
use crate::sandbox::Ended;
use crate::snapshot::error::SnapshotError;
use crate::snapshot::paused::StillPaused;
use crate::snapshot::take_snapshot::{Afterwards, Snapshotted};
use crate::store::{ImageEntry, ReadError};
use crate::supervisor::hang::detector::Finding;
use crate::supervisor::policy::schedule::Moment;
use crate::supervisor::preemption::announcement::Announcement;

/// Facts of the moment of an event.
#[derive(Debug)]
pub(crate) struct Now {
    pub at: Moment,
    pub images: StoreImages,
}

impl Now {
    pub fn monotonic(&self) -> Instant {
        self.at.monotonic
    }
}

/// The images of the store, oldest first. The store is read when a decision first needs the list, and at most once for
/// an event: most events need none, and a store with many images or on a slow disk takes its time.
pub(crate) struct StoreImages {
    read: Box<dyn Fn() -> Result<Vec<ImageEntry>, ReadError>>,
    list: OnceCell<Result<Vec<ImageEntry>, ReadError>>,
}

impl StoreImages {
    pub fn new(read: impl Fn() -> Result<Vec<ImageEntry>, ReadError> + 'static) -> Self {
        Self {
            read: Box::new(read),
            list: OnceCell::new(),
        }
    }

    pub fn list(&self) -> Result<&[ImageEntry], &ReadError> {
        let list = self.list.get_or_init(&self.read);
        list.as_deref()
    }

    /// Returns the list, and none if it cannot be read.
    pub fn list_or_none(&self) -> &[ImageEntry] {
        self.list().unwrap_or_default()
    }

    /// Returns the reason why the store cannot be read, to end the run with it.
    pub fn take_error(&mut self) -> Option<ReadError> {
        self.list().err()?;
        self.list.take()?.err()
    }
}

impl fmt::Debug for StoreImages {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.list.fmt(f)
    }
}

#[derive(Debug)]
pub(crate) enum Event {
    /// The supervisor begins with this step.
    Begin(Beginning),
    /// A signal that the supervisor handles arrived.
    Signal(Signal),
    /// A cloud takes this machine back, after this time at the earliest.
    Preempted(Announcement, Duration),
    /// The lease of the run is lost, to the supervisor on this machine if it is known.
    LeaseLost(Option<String>),
    /// Ctrl-C was typed at the job's own terminal, which sends the job a SIGINT.
    Interrupted,
    /// A client requests a snapshot, and a state of the job after it.
    SnapshotRequest(Afterwards, Reply),
    UnpauseRequest(UnpauseReply),
    /// The job's first process runs. It has this pid on the host; `None` if it has exited.
    Started(Option<i32>),
    /// The job's first process has exited; the sandbox's report follows.
    Leaving,
    /// The sandbox reports the exit of the job's first process.
    JobEnded(Ended),
    /// Every process of the sandbox is gone.
    Gone,
    /// The job computes again after this freeze; its image is not durable yet.
    Computing(Duration),
    /// A snapshot ended.
    SnapshotEnded(Box<SnapshotEnd>),
    /// The newest image is past the point of the last crash.
    NewGround,
    /// The examined image can be restored.
    Fit,
    /// The examined image cannot be restored. Nothing was changed.
    Unfit(Box<RestoreError>),
    /// A damaged image was set aside, or could not be.
    SetAside {
        /// False if the store could not be written.
        done: bool,
    },
    RestoreEnded(Box<Result<Restored, RestoreError>>),
    /// The GPUs have room for the image of the killed paused job, or lack this.
    Room(Option<String>),
    /// The paused job continues, or does not.
    Unpaused(Result<Duration, Refusal>),
    /// The output of the dead job is delivered.
    Drained,
    /// The job gave no sign of life for too long.
    Suspected(Suspect),
    /// The stacks of this suspected job are in this log, if it could be written.
    Diagnosed(Suspect, Option<PathBuf>),
    /// The supervisor was stopped for this time, and the job with it.
    Continued(Duration),
    Timer(Timer),
}

impl Event {
    /// Returns true if threads of a snapshot or restore have just ended, and their memory can be returned.
    pub fn ends_large_work(&self) -> bool {
        matches!(self, Self::SnapshotEnded(_) | Self::RestoreEnded(_))
    }
}

#[derive(Debug)]
pub(crate) struct SnapshotEnd {
    pub result: Result<Box<Snapshotted>, SnapshotError>,
    /// True if the job is paused now.
    pub paused: bool,
    /// Computing time that writing the image took from the job.
    pub slowdown: Duration,
    /// False if the image should be in the remote store by now (`remote.sync`), and is not.
    pub is_synced: bool,
}

/// A job that did not continue after a pause.
#[derive(Debug)]
pub(crate) struct Refusal {
    pub why: StillPaused,
    /// True if the job was lost in the attempt; otherwise it stays paused.
    pub lost: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Suspect {
    pub finding: Finding,
    /// Computing time after which the job gave no sign of life.
    pub since: Duration,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Timer {
    /// The next scheduled snapshot may be due.
    Schedule,
    /// The wait before a restart is over.
    Backoff,
    /// The grace period after a request to stop is over.
    Grace,
    /// The report of an exit did not come: the job continues.
    Left,
}
