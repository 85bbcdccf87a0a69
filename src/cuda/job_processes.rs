//! All CUDA processes of a job at once: suspend, resume, and back out.
//!
//! ```text
//! pids ──lock_all──> Locked ──suspend──> Suspended ──resume──> computing
//!                      │ unlock, drop       │ drop                ^
//!                      └────────────────────┴─────────────────────┘
//! after a CRIU restore: ──────────resume_restored─────────────────┘
//! ```
//!
//! Every call blocks; one thread a process, because processes that wait for
//! each other on the GPU must be locked together (one after the other, two NCCL
//! ranks deadlock). Only lock is bounded: a checkpoint or restore stopped
//! half-way loses the process, so those take as long as they take.
//!
//! Whatever fails, what was done is undone from the state in which the driver
//! says each process is; an error's [`Aftermath`] names what could not be.
//! This file must not know how processes were found or who freezes them.

use std::thread;
use std::time::Duration;

use super::cuda_process::{CheckpointApi, timeout_ms};
use super::error::{Call, CallError};
use super::group::{Group, Without};
use super::loader::Driver;
use super::map::GpuMap;
use super::state::State;
use super::sys;
use crate::clock;

mod error;

pub use error::{Aftermath, Left, TreeError};

/// Pause between two attempts to lock: long enough for ranks that wait for each
/// other to reach another place, short against a step of training.
const PAUSE_MS_MAX: u64 = 60;

/// Attempts of the first length; as many follow of twice that length, and so on. NCCL ranks need up to 18.
const SHORT_ATTEMPTS: u32 = 20;

/// Those of `pids` that use CUDA, in the order given. Skips processes that have
/// ended. One that the driver gives no answer for is kept, so that the lock
/// fails with the reason instead of an image lacking its GPU state.
#[must_use]
pub fn find(driver: &Driver, pids: &[i32]) -> Vec<i32> {
    let api = driver.api();
    pids.iter()
        .copied()
        .filter(|&pid| match api.state(pid) {
            Ok(_) => true,
            Err(code) => !code.is_not_initialized() && api.exists(pid),
        })
        .collect()
}

/// How long to try to lock.
#[derive(Debug, Clone, Copy)]
pub struct SuspendOptions {
    /// One attempt at all processes. Short, because ranks locked at unlucky
    /// moments wait for each other until it is over (400 ms: 1 to 18 attempts).
    /// Attempts get longer where many fail.
    pub attempt: Duration,
    /// All attempts together. The first attempt is always made.
    pub total: Duration,
}

impl Default for SuspendOptions {
    fn default() -> Self {
        Self {
            attempt: Duration::from_millis(400),
            total: Duration::from_secs(30),
        }
    }
}

/// Locks all processes, or none: those locked are unlocked before each new
/// attempt, so that the job advances in between. Processes that end meanwhile
/// are dropped from the set, and so are those that somebody has suspended
/// already: they stay so. No pids is fine and locks nothing.
///
/// # Errors
/// When the GPU work does not stand still within `options.total`, or the
/// driver refuses. The job computes, unless the error's aftermath says otherwise.
/// A process that somebody else has locked is refused and not touched.
pub fn lock_all(
    driver: &Driver,
    pids: &[i32],
    options: &SuspendOptions,
) -> Result<Locked, TreeError> {
    let mut group = Group::new(driver, pids, Without::Changed, &GpuMap::default())?;
    group.only_running()?;
    let begun = clock::now();
    let mut attempts = 0;
    loop {
        attempts += 1;
        let left = options.total.saturating_sub(begun.elapsed());
        let timeout = timeout_ms(length(options.attempt, attempts).min(left));
        let failures = group.each(|api, pid| api.lock(pid, timeout), Call::Lock);
        if failures.is_empty() {
            return Ok(Locked { group, attempts });
        }
        let aftermath = group.bring_back();
        let (busy, refused): (Vec<_>, Vec<_>) = failures
            .into_iter()
            .partition(|failure| passes(failure, &**driver.api()));
        if let Some(source) = refused.into_iter().next() {
            return Err(TreeError::Lock { source, aftermath });
        }
        let waited = begun.elapsed();
        if !aftermath.is_computing() || waited >= options.total {
            let busy = busy.into_iter().map(|failure| failure.pid).collect();
            return Err(TreeError::TimedOut {
                busy,
                attempts,
                waited,
                aftermath,
            });
        }
        tracing::debug!(attempts, "GPU work does not stand still yet");
        thread::sleep(pause(attempts));
    }
}

/// Whether a lock may succeed at another attempt: the process has work to do, or is inside `cuInit`. There the
/// driver calls it running and answers a lock with 3, not initialized (580.159.04).
fn passes(failure: &CallError, api: &dyn CheckpointApi) -> bool {
    match failure.code.number {
        sys::NOT_READY => true,
        sys::NOT_INITIALIZED => api.state(failure.pid) == Ok(State::Running),
        _ => false,
    }
}

/// The job's CUDA processes, locked. Dropping it unlocks them, best effort.
#[derive(Debug)]
#[must_use = "dropping it unlocks the job"]
pub struct Locked {
    group: Group,
    attempts: u32,
}

impl Locked {
    /// The processes.
    #[must_use]
    pub fn pids(&self) -> &[i32] {
        self.group.pids()
    }

    /// How often all were tried together until all were locked.
    #[must_use]
    pub fn attempts(&self) -> u32 {
        self.attempts
    }

    /// Moves all GPU memory into host memory. The host needs that much free.
    ///
    /// # Errors
    /// Then everything is undone, and the job computes unless the error's
    /// aftermath says otherwise.
    pub fn suspend(self) -> Result<Suspended, TreeError> {
        let mut group = self.group;
        let failures = group.each(CheckpointApi::checkpoint, Call::Checkpoint);
        match failures.into_iter().next() {
            None => Ok(Suspended { group }),
            Some(source) => Err(TreeError::Suspend {
                source,
                aftermath: group.bring_back(),
            }),
        }
    }

    /// Leaves the processes locked, for somebody else to go on with.
    pub fn leave(self) {
        self.group.leave();
    }

    /// Lets the job compute again.
    ///
    /// # Errors
    /// Naming the processes that do not compute.
    pub fn unlock(mut self) -> Result<(), TreeError> {
        self.group.resumed()
    }
}

/// The job's CUDA processes with all GPU state in host memory. Dropping it
/// resumes them, best effort, and blocks for as long as that takes.
#[derive(Debug)]
#[must_use = "dropping it resumes the job"]
pub struct Suspended {
    group: Group,
}

impl Suspended {
    /// The processes.
    #[must_use]
    pub fn pids(&self) -> &[i32] {
        self.group.pids()
    }

    /// Leaves the processes suspended, for [`resume_restored`] to go on with, now or after a restore.
    pub fn leave(self) {
        self.group.leave();
    }

    /// Moves GPU memory back and lets the job compute again.
    ///
    /// # Errors
    /// Naming the processes that do not compute; all others do.
    pub fn resume(mut self) -> Result<ResumeTimes, TreeError> {
        let begun = clock::now();
        // Failures are not looked at: the second pass goes by each process's
        // state, tries again what failed, and reports what still does not run.
        self.group.restore();
        let restore = begun.elapsed();
        self.group.resumed()?;
        Ok(ResumeTimes {
            restore,
            unlock: begun.elapsed().saturating_sub(restore),
        })
    }
}

/// What a resume took.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ResumeTimes {
    /// Moving GPU memory back, all processes in parallel.
    pub restore: Duration,
    /// Letting the processes go, and asking whether they run.
    pub unlock: Duration,
}

/// Resumes processes that were left suspended, or that CRIU has restored from an
/// image taken while they were; onto the GPUs that `map` names, or the same ones
/// with an empty map. Returns when the driver says that each of them runs.
///
/// # Errors
/// Naming the processes that do not compute; the others run. With a map that
/// the driver cannot take, nothing was done.
pub fn resume_restored(driver: &Driver, pids: &[i32], map: &GpuMap) -> Result<(), TreeError> {
    Group::new(driver, pids, Without::Lost, map)?.resumed()
}

/// How long an attempt may take: the first ones are short, for ranks that wait for each other; where those do not
/// do, the work itself is long, or others share the GPU.
fn length(first: Duration, attempt: u32) -> Duration {
    first * (1 + attempt / SHORT_ATTEMPTS)
}

/// Another pause after each attempt: spread over 1 to [`PAUSE_MS_MAX`] ms by a
/// fixed mix of the attempt's number, which is all the chance that is needed.
fn pause(attempt: u32) -> Duration {
    let mixed = u64::from(attempt).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 32;
    Duration::from_millis(1 + mixed % PAUSE_MS_MAX)
}

#[cfg(test)]
mod faults;
#[cfg(test)]
mod tests;
