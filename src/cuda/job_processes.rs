//! The CUDA processes of a job, all at once: suspend, resume, and undo.
//!
//! ```text
//! pids ──lock_all──> Locked ──suspend──> Suspended ──resume──> computing
//!                      │ unlock, drop       │ drop                ^
//!                      └────────────────────┴─────────────────────┘
//! after a CRIU restore: ──────────resume_restored─────────────────┘
//! ```
//!
//! Every call blocks and uses one thread per process, because processes that wait for each other on the GPU must be
//! locked together (two NCCL ranks locked one after the other deadlock). Only lock has a time limit: a checkpoint or
//! restore stopped half-way loses the process, so those have none.
//!
//! After any failure, the completed steps are undone according to the state that the driver reports for each process;
//! an error's [`Aftermath`] names the processes that could not be resumed. This file must not know how processes were
//! found or who freezes them.

use std::thread;
use std::time::{Duration, Instant};

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

/// Limit on the pause between two attempts to lock: long enough for ranks that wait for each other to reach another
/// place, short compared with a training step.
const PAUSE_MS_MAX: u64 = 60;

/// Number of attempts of the first length; as many follow of twice that length, and so on.
const SHORT_ATTEMPTS: u32 = 20;

/// Limit on the hand-overs of one attempt. Ranks that compute without a pause stop at a random point each time.
const HAND_OVERS_MAX: u32 = 8;

/// Returns the `pids` that use CUDA, in the given order. Processes that have exited are left out. A process whose state
/// the driver does not report is kept, so that the lock fails with the reason instead of creating an image without its
/// GPU state.
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

/// Time limits for a lock.
#[derive(Debug, Clone, Copy)]
pub struct SuspendOptions {
    /// Length of one attempt on all processes. It is short, because ranks locked at unfavorable moments wait for each
    /// other until it is over. Attempts get longer if many fail.
    pub attempt: Duration,
    /// Time limit for all attempts together. The first attempt is always made.
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

/// Locks all processes, or none: the locked ones are unlocked before each new attempt, so that the job advances in
/// between.
///
/// If only some can be locked, ranks were stopped at different points: the busy ones wait for work that the others have
/// not begun. Within the attempt they are then locked while the others run on, and the others after that (hand-over).
///
/// Processes that exit meanwhile leave the set, and so do processes that another program has already suspended; they stay
/// suspended. An empty list of pids is valid and locks nothing.
///
/// # Errors
/// The GPU work does not stop within `options.total`, or the driver refuses. The job computes, unless the error's
/// aftermath says otherwise. A process that another program has locked is refused and not changed.
pub fn lock_all(
    driver: &Driver,
    pids: &[i32],
    options: &SuspendOptions,
) -> Result<Locked, TreeError> {
    let mut group = Group::new(driver, pids, Without::Changed, &GpuMap::default())?;
    group.only_running()?;
    let begun = clock::now();
    let mut attempts = 0;
    // No process waits for another one: there is only one, or none could be locked.
    let mut is_long = group.pids().len() < 2;
    loop {
        attempts += 1;
        let length = if is_long {
            length(options.attempt, attempts)
        } else {
            hand_over_limit(options)
        };
        let failures = lock_at_once(&mut group, length, options, begun);
        if failures.is_empty() {
            return Ok(Locked { group, attempts });
        }
        is_long |= failures.len() >= group.pids().len();
        let aftermath = group.bring_back();
        let (busy, refused): (Vec<_>, Vec<_>) = failures
            .into_iter()
            .partition(|failure| passes(failure, group.api()));
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
        tracing::debug!(attempts, "GPU work has not finished yet");
        thread::sleep(pause(attempts));
    }
}

/// Makes one attempt to lock all processes, with hand-overs while time is left since `begun`. Returns the failures.
fn lock_at_once(
    group: &mut Group,
    length: Duration,
    options: &SuspendOptions,
    begun: Instant,
) -> Vec<CallError> {
    let left = || options.total.saturating_sub(begun.elapsed());
    let limit = timeout_ms(length.min(left()));
    let mut failures = group.each(|api, pid| (Call::Lock, api.lock(pid, limit)));
    for _ in 0..HAND_OVERS_MAX {
        let ahead: Vec<i32> = failures.iter().map(|failure| failure.pid).collect();
        let some = !ahead.is_empty() && ahead.len() < group.pids().len();
        if !some || left().is_zero() || !failures.iter().all(|one| passes(one, group.api())) {
            break;
        }
        tracing::debug!(?ahead, "the other processes run on");
        let is_ahead = |pid: i32| ahead.contains(&pid);
        let limit = timeout_ms(options.attempt.min(left()));
        failures = group.each(|api, pid| {
            if is_ahead(pid) {
                (Call::Lock, api.lock(pid, limit))
            } else {
                (Call::Unlock, api.unlock(pid))
            }
        });
        if !failures.is_empty() {
            break;
        }
        let limit = timeout_ms(hand_over_limit(options).min(left()));
        failures = group.each(|api, pid| {
            let is_locked = is_ahead(pid);
            let result = if is_locked {
                Ok(())
            } else {
                api.lock(pid, limit)
            };
            (Call::Lock, result)
        });
    }
    failures
}

/// Returns the time after which processes that are not locked, while others are, count as ahead of those.
fn hand_over_limit(options: &SuspendOptions) -> Duration {
    options.attempt / 4
}

/// Returns true if a lock may succeed at another attempt: the process has GPU work, or is inside `cuInit`. In that case
/// the driver reports it as running and answers a lock with 3, not initialized (580.159.04).
fn passes(failure: &CallError, api: &dyn CheckpointApi) -> bool {
    match failure.code.number {
        sys::NOT_READY => true,
        sys::NOT_INITIALIZED => api.state(failure.pid) == Ok(State::Running),
        _ => false,
    }
}

/// The job's CUDA processes, locked. Dropping the value unlocks them, best effort.
#[derive(Debug)]
#[must_use = "dropping it unlocks the job"]
pub struct Locked {
    group: Group,
    attempts: u32,
}

impl Locked {
    /// Returns the pids.
    #[must_use]
    pub fn pids(&self) -> &[i32] {
        self.group.pids()
    }

    /// Returns the number of joint attempts until all processes were locked.
    #[must_use]
    pub fn attempts(&self) -> u32 {
        self.attempts
    }

    /// Moves all GPU memory into host memory. The host needs that much free memory.
    ///
    /// # Errors
    /// Everything is undone, and the job computes unless the error's aftermath says otherwise.
    pub fn suspend(self) -> Result<Suspended, TreeError> {
        let mut group = self.group;
        let failures = group.each(|api, pid| (Call::Checkpoint, api.checkpoint(pid)));
        match failures.into_iter().next() {
            None => Ok(Suspended { group }),
            Some(source) => Err(TreeError::Suspend {
                source,
                aftermath: group.bring_back(),
            }),
        }
    }

    /// Leaves the processes locked, for another program to continue with.
    pub fn leave(self) {
        self.group.leave();
    }

    /// Lets the job compute again.
    ///
    /// # Errors
    /// The error names the processes that do not compute.
    pub fn unlock(mut self) -> Result<(), TreeError> {
        self.group.resumed()
    }
}

/// The job's CUDA processes with all GPU state in host memory. Dropping the value resumes them, best effort, and blocks
/// until that is done.
#[derive(Debug)]
#[must_use = "dropping it resumes the job"]
pub struct Suspended {
    group: Group,
}

impl Suspended {
    /// Returns the pids.
    #[must_use]
    pub fn pids(&self) -> &[i32] {
        self.group.pids()
    }

    /// Leaves the processes suspended, for a later [`resume_restored`], now or after a restore.
    pub fn leave(self) {
        self.group.leave();
    }

    /// Moves GPU memory back and lets the job compute again.
    ///
    /// # Errors
    /// The error names the processes that do not compute; all others do.
    pub fn resume(mut self) -> Result<ResumeTimes, TreeError> {
        let begun = clock::now();
        // Failures are ignored here: the second pass uses each process's state, retries failed steps, and reports the
        // processes that still do not run.
        self.group.restore();
        let restore = begun.elapsed();
        self.group.resumed()?;
        Ok(ResumeTimes {
            restore,
            unlock: begun.elapsed().saturating_sub(restore),
        })
    }
}

/// The duration of a resume.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ResumeTimes {
    /// Time for moving GPU memory back, all processes in parallel.
    pub restore: Duration,
    /// Time for unlocking the processes and checking that they run.
    pub unlock: Duration,
}

/// Resumes processes that were left suspended, or that CRIU has restored from an image taken while they were suspended,
/// onto the GPUs that `map` names, or onto the same ones if the map is empty. Returns when the driver reports that each
/// of them runs.
///
/// # Errors
/// The error names the processes that do not compute; the others run. If the driver cannot take the map, nothing was
/// done.
pub fn resume_restored(driver: &Driver, pids: &[i32], map: &GpuMap) -> Result<(), TreeError> {
    Group::new(driver, pids, Without::Lost, map)?.resumed()
}

/// Returns the length of an attempt. The first attempts are short, for ranks that wait for each other. If short
/// attempts fail, the work itself is long, or other programs share the GPU.
fn length(first: Duration, attempt: u32) -> Duration {
    first * (1 + attempt / SHORT_ATTEMPTS)
}

/// Returns the pause after an attempt, different each time: spread over 1 to [`PAUSE_MS_MAX`] ms by a fixed mix of the
/// attempt's number, which is random enough for this purpose.
fn pause(attempt: u32) -> Duration {
    let mixed = u64::from(attempt).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 32;
    Duration::from_millis(1 + mixed % PAUSE_MS_MAX)
}

#[cfg(test)]
mod faults;
#[cfg(test)]
mod tests;
