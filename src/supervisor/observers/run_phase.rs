//! The phases of a run, as the status reports them.

use serde::{Deserialize, Serialize};

use crate::run::run_state::Progress;

/// Phase of a run.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum State {
    /// The job is being started.
    Starting,
    /// The job computes.
    Running,
    /// The job is snapshotted; it is frozen for a part of that time.
    Snapshotting,
    /// The job is frozen and holds no GPU.
    Paused,
    /// An image is becoming the job.
    Restoring,
    /// The job crashed; the wait before it is restarted.
    Waiting,
    /// The job has ended, or is being ended.
    Ending,
    /// No supervisor runs: the job is done.
    Finished,
    /// No supervisor runs: the same command line continues the run.
    Saved,
    /// No supervisor runs: the job was given up.
    Failed,
    /// No supervisor runs, and the last one was killed: the same command line continues the run.
    Killed,
    /// No supervisor runs: ckpt-run failed around the job.
    Error,
    /// The store holds no run.
    #[default]
    None,
}

impl State {
    /// Every phase.
    pub const ALL: [Self; 13] = [
        Self::Starting,
        Self::Running,
        Self::Snapshotting,
        Self::Paused,
        Self::Restoring,
        Self::Waiting,
        Self::Ending,
        Self::Finished,
        Self::Saved,
        Self::Failed,
        Self::Killed,
        Self::Error,
        Self::None,
    ];

    /// Returns the phase of a run whose supervisor has ended.
    pub(crate) fn at_end(progress: Progress) -> Self {
        match progress {
            Progress::Running => Self::Error,
            Progress::Saved => Self::Saved,
            Progress::Finished => Self::Finished,
            Progress::Failed { .. } => Self::Failed,
        }
    }

    /// Returns true if a supervisor runs.
    #[must_use]
    pub fn is_supervised(self) -> bool {
        !matches!(
            self,
            Self::Finished | Self::Saved | Self::Failed | Self::Killed | Self::Error | Self::None
        )
    }

    /// The word, as in JSON.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Starting => "starting",
            Self::Running => "running",
            Self::Snapshotting => "snapshotting",
            Self::Paused => "paused",
            Self::Restoring => "restoring",
            Self::Waiting => "waiting",
            Self::Ending => "ending",
            Self::Finished => "finished",
            Self::Saved => "saved",
            Self::Failed => "failed",
            Self::Killed => "killed",
            Self::Error => "error",
            Self::None => "none",
        }
    }
}
