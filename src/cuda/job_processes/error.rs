//! Errors of operations on all CUDA processes of a job, and the processes left afterwards.

use std::fmt;
use std::time::Duration;

use thiserror::Error;

use crate::cuda::error::{CallError, MapError};
use crate::cuda::state::State;

/// A failed operation on the whole job. Completed steps were undone as far as possible.
#[derive(Debug, Error)]
pub enum TreeError {
    /// The driver does not support a map of GPUs. Nothing was done.
    #[error(transparent)]
    Map(#[from] MapError),
    /// A process was not computing at the start, so ckpt-run must neither stop nor resume it. Nothing was done to any
    /// process.
    #[error("cannot lock CUDA process {pid}: it is {state}{}", hint(*state))]
    NotRunning {
        /// The first such process.
        pid: i32,
        /// Its state.
        state: State,
    },
    /// A process's state cannot be queried. Nothing was done to any process.
    #[error(transparent)]
    Query(#[from] CallError),
    /// Some of the processes are suspended and some are not. Nothing was done.
    #[error(
        "cannot toggle CUDA processes in different states: {} running, {} suspended; name only running or only suspended \
         processes",
        Pids(running),
        Pids(suspended)
    )]
    Mixed {
        /// The running processes.
        running: Vec<i32>,
        /// The suspended processes.
        suspended: Vec<i32>,
    },
    /// More processes than a reasonable number of waiting threads.
    #[error("cannot suspend {count} CUDA processes at once: at most {most} are supported")]
    TooMany {
        /// The number of processes.
        count: usize,
        /// The supported number.
        most: usize,
    },
    /// The job's GPU work was never finished in all processes at once.
    #[error(
        "cannot lock the job's CUDA processes: GPU work of {} did not finish in {attempts} attempts \
         over {:.1} s; {aftermath}",
        Pids(busy), waited.as_secs_f64()
    )]
    TimedOut {
        /// The processes that were still busy in the last attempt.
        busy: Vec<i32>,
        /// The number of joint attempts.
        attempts: u32,
        /// The duration of all attempts.
        waited: Duration,
        /// The processes that were left.
        aftermath: Aftermath,
    },
    /// A process cannot be locked.
    #[error("cannot lock the job's CUDA processes; {aftermath}")]
    Lock {
        /// The first failure.
        #[source]
        source: CallError,
        /// The processes that were left.
        aftermath: Aftermath,
    },
    /// GPU memory could not be moved to the host.
    #[error("cannot suspend the job's GPU state; {aftermath}")]
    Suspend {
        /// The first failure.
        #[source]
        source: CallError,
        /// The processes that were left.
        aftermath: Aftermath,
    },
    /// GPU memory could not be moved back, or a process could not be unlocked.
    #[error("cannot resume the job's GPU state; {aftermath}")]
    Resume {
        /// The processes that were left.
        aftermath: Aftermath,
    },
}

impl TreeError {
    /// Returns the processes that the failed operation left; `None` if it did not begin.
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

    /// Returns true if every process that still exists computes, or is unchanged because the operation did not begin.
    #[must_use]
    pub fn is_computing(&self) -> bool {
        self.aftermath().is_none_or(Aftermath::is_computing)
    }
}

/// Returns the remedy for a process that was not running at the start.
fn hint(state: State) -> &'static str {
    match state {
        State::Locked | State::Checkpointing | State::Restoring => {
            "; another program is suspending or resuming it, or left it in this state (`ckpt-run cuda resume --pid` \
             continues it)"
        }
        State::Failed => ", which is permanent; end the process",
        State::Running | State::Checkpointed | State::Unknown(_) => "",
    }
}

/// The processes that an operation and its undo did not leave running.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Aftermath {
    /// The processes that do not compute; empty if the whole job computes.
    pub stuck: Vec<Left>,
}

impl Aftermath {
    /// Returns true if every process that still exists computes.
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

/// A process that does not compute and could not be resumed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Left {
    /// The process.
    pub pid: i32,
    /// The state, if the driver still reports it.
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
            .map_or(Ok(()), |failure| write!(f, " ({failure})"))
    }
}

/// Pids in text form: "process 300" or "processes 300, 301".
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
