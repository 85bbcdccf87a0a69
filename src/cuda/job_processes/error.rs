//! What can go wrong with all CUDA processes of a job, and what is left then.

use std::fmt;
use std::time::Duration;

use thiserror::Error;

use crate::cuda::error::{CallError, MapError};
use crate::cuda::state::State;

/// An operation on the whole job failed. What could be undone was undone.
#[derive(Debug, Error)]
pub enum TreeError {
    /// The driver takes no map of GPUs. Nothing was done.
    #[error(transparent)]
    Map(#[from] MapError),
    /// A process was not computing to begin with, so that it is not for us to
    /// stop or to let go. Nothing was done to any process.
    #[error("lock CUDA process {pid}: it is {state}{}", hint(*state))]
    NotRunning {
        /// The first such process.
        pid: i32,
        /// Its state.
        state: State,
    },
    /// A process cannot be asked for its state. Nothing was done to any process.
    #[error(transparent)]
    Query(#[from] CallError),
    /// Some of the processes are suspended and some are not. Nothing was done.
    #[error(
        "toggle CUDA processes: {} running and {} suspended; name those of one kind",
        Pids(running),
        Pids(suspended)
    )]
    Mixed {
        /// Those that run.
        running: Vec<i32>,
        /// Those that are suspended.
        suspended: Vec<i32>,
    },
    /// More processes than threads that are reasonable to wait with.
    #[error("suspend {count} CUDA processes at once: at most {most} are supported")]
    TooMany {
        /// How many there are.
        count: usize,
        /// How many are supported.
        most: usize,
    },
    /// The job's GPU work never stood still in all processes at once.
    #[error(
        "lock the job's CUDA processes: GPU work of {} did not finish in {attempts} attempts \
         over {:.1} s; {aftermath}",
        Pids(busy), waited.as_secs_f64()
    )]
    TimedOut {
        /// The processes that were still busy in the last attempt.
        busy: Vec<i32>,
        /// How often all were tried together.
        attempts: u32,
        /// For how long.
        waited: Duration,
        /// What was left.
        aftermath: Aftermath,
    },
    /// A process cannot be locked.
    #[error("lock the job's CUDA processes; {aftermath}")]
    Lock {
        /// The first failure.
        #[source]
        source: CallError,
        /// What was left.
        aftermath: Aftermath,
    },
    /// GPU memory could not be moved to the host.
    #[error("suspend the job's GPU state; {aftermath}")]
    Suspend {
        /// The first failure.
        #[source]
        source: CallError,
        /// What was left.
        aftermath: Aftermath,
    },
    /// GPU memory could not be moved back, or a process could not be let go.
    #[error("resume the job's GPU state; {aftermath}")]
    Resume {
        /// What was left.
        aftermath: Aftermath,
    },
}

impl TreeError {
    /// What the failed operation left behind; `None` when it did not begin.
    #[must_use]
    pub fn aftermath(&self) -> Option<&Aftermath> {
        match self {
            Self::Map(_)
            | Self::NotRunning { .. }
            | Self::Query(_)
            | Self::Mixed { .. }
            | Self::TooMany { .. } => None,
            Self::TimedOut { aftermath, .. }
            | Self::Lock { aftermath, .. }
            | Self::Suspend { aftermath, .. }
            | Self::Resume { aftermath } => Some(aftermath),
        }
    }

    /// Whether every process that still exists computes, or is as it was when
    /// the operation did not begin.
    #[must_use]
    pub fn is_computing(&self) -> bool {
        self.aftermath().is_none_or(Aftermath::is_computing)
    }
}

/// What to do about a process that was not running to begin with.
fn hint(state: State) -> &'static str {
    match state {
        State::Locked | State::Checkpointing | State::Restoring => {
            "; something else is suspending or resuming it at the same time, or left it so \
             (`ckpt-run cuda resume --pid` lets it run)"
        }
        State::Failed => "; the driver gave it up, which is final; end it",
        State::Running | State::Checkpointed | State::Unknown(_) => "",
    }
}

/// The processes that an operation and its undo did not leave running.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Aftermath {
    /// Empty when all of the job computes.
    pub stuck: Vec<Left>,
}

impl Aftermath {
    /// Whether every process that still exists computes.
    #[must_use]
    pub fn is_computing(&self) -> bool {
        self.stuck.is_empty()
    }
}

impl fmt::Display for Aftermath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.is_computing() {
            return f.write_str("the job computes");
        }
        f.write_str("the job does not compute:")?;
        for (index, left) in self.stuck.iter().enumerate() {
            write!(f, "{} {left}", if index == 0 { "" } else { "," })?;
        }
        Ok(())
    }
}

/// A process that does not compute and could not be made to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Left {
    /// The process.
    pub pid: i32,
    /// Its state, if the driver still tells.
    pub state: Option<State>,
    /// The last call that failed on it.
    pub failure: Option<CallError>,
}

impl fmt::Display for Left {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "process {} is left ", self.pid)?;
        match self.state {
            Some(state) => write!(f, "{state}")?,
            None => f.write_str("in an unknown state")?,
        }
        self.failure
            .as_ref()
            .map_or(Ok(()), |failure| write!(f, " (cannot {failure})"))
    }
}

/// "process 300" or "processes 300, 301".
struct Pids<'a>(&'a [i32]);

impl fmt::Display for Pids<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.0.len() == 1 {
            "process"
        } else {
            "processes"
        })?;
        for (index, pid) in self.0.iter().enumerate() {
            write!(f, "{} {pid}", if index == 0 { "" } else { "," })?;
        }
        Ok(())
    }
}
