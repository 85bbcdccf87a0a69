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

use super::error::{Call, TreeError};
use super::group::Group;
use super::loader::Driver;
use super::process::{CheckpointApi, timeout_ms};
use super::sys;
use crate::clock;

/// Pause between two attempts to lock: long enough for ranks that wait for each
/// other to reach another place, short against a step of training.
const PAUSE_MS_MAX: u64 = 60;

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
            Err(code) => code.number != sys::NOT_INITIALIZED && api.exists(pid),
        })
        .collect()
}

/// How long to try to lock.
#[derive(Debug, Clone, Copy)]
pub struct SuspendOptions {
    /// One attempt at all processes. Short, because ranks locked at unlucky
    /// moments wait for each other until it is over (400 ms: 1 to 18 attempts).
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
/// are dropped from the set. No pids is fine and locks nothing.
///
/// # Errors
/// When the GPU work does not stand still within `options.total`, or the
/// driver refuses. The job computes, unless the error's aftermath says otherwise.
pub fn lock_all(
    driver: &Driver,
    pids: &[i32],
    options: &SuspendOptions,
) -> Result<Locked, TreeError> {
    let mut group = Group::new(driver, pids)?;
    let begun = clock::now();
    let mut attempts = 0;
    loop {
        attempts += 1;
        let left = options.total.saturating_sub(begun.elapsed());
        let timeout = timeout_ms(options.attempt.min(left));
        let failures = group.each(|api, pid| api.lock(pid, timeout), Call::Lock);
        if failures.is_empty() {
            return Ok(Locked { group, attempts });
        }
        let aftermath = group.bring_back();
        let (busy, refused): (Vec<_>, Vec<_>) = failures
            .into_iter()
            .partition(|failure| failure.code.number == sys::NOT_READY);
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

    /// Moves GPU memory back and lets the job compute again.
    ///
    /// # Errors
    /// Naming the processes that do not compute; all others do.
    pub fn resume(mut self) -> Result<ResumeTimes, TreeError> {
        let begun = clock::now();
        // Failures are not looked at: the second pass goes by each process's
        // state, tries again what failed, and reports what still does not run.
        self.group.each(CheckpointApi::restore, Call::Restore);
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

/// Resumes processes that CRIU has restored from an image taken while they were
/// suspended. Returns when the driver says that each of them runs.
///
/// # Errors
/// Naming the processes that do not compute. The restore of the job has failed
/// then; the others run.
pub fn resume_restored(driver: &Driver, pids: &[i32]) -> Result<(), TreeError> {
    Group::new(driver, pids)?.resumed()
}

/// Another pause after each attempt: spread over 1 to [`PAUSE_MS_MAX`] ms by a
/// fixed mix of the attempt's number, which is all the chance that is needed.
fn pause(attempt: u32) -> Duration {
    let mixed = u64::from(attempt).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 32;
    Duration::from_millis(1 + mixed % PAUSE_MS_MAX)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::cuda::fake::{Effect, Fake};
    use crate::cuda::process::State;

    const PIDS: [i32; 3] = [300, 301, 302];

    fn driver(fake: &Arc<Fake>) -> Driver {
        Driver::fake(Arc::clone(fake) as Arc<dyn CheckpointApi>)
    }

    /// One attempt at locking, so that a timeout is reported at once.
    fn once() -> SuspendOptions {
        SuspendOptions {
            attempt: Duration::from_millis(5),
            total: Duration::ZERO,
        }
    }

    fn assert_all_running(fake: &Fake, context: &str) {
        for pid in PIDS {
            assert_eq!(
                fake.state_of(pid),
                Some(State::Running),
                "{pid} after {context}"
            );
        }
    }

    /// A whole snapshot's worth of calls; the error of the first that failed.
    fn cycle(fake: &Arc<Fake>) -> Result<(), TreeError> {
        lock_all(&driver(fake), &PIDS, &once())?
            .suspend()?
            .resume()?;
        Ok(())
    }

    #[test]
    fn a_cycle_ends_with_all_processes_running() {
        let fake = Fake::new(&PIDS);
        let locked = lock_all(&driver(&fake), &[301, 300, 302, 300], &once()).unwrap();
        assert_eq!((locked.pids(), locked.attempts()), (&PIDS[..], 1));
        let suspended = locked.suspend().unwrap();
        assert_eq!(suspended.pids(), PIDS);
        assert_eq!(fake.state_of(301), Some(State::Checkpointed));
        suspended.resume().unwrap();
        assert_all_running(&fake, "a cycle");
    }

    #[test]
    fn whichever_call_fails_every_process_runs_afterwards() {
        let fake = Fake::new(&PIDS);
        cycle(&fake).unwrap();
        let calls = fake.calls().len();
        assert!(calls > 4 * PIDS.len(), "{calls} calls");
        for effect in [Effect::None, Effect::Done] {
            for code in [
                sys::OPERATING_SYSTEM,
                sys::NOT_READY,
                sys::NOT_SUPPORTED,
                999,
            ] {
                for n in 0..calls {
                    let fake = Fake::new(&PIDS);
                    fake.fail_nth(n, code, effect);
                    let result = cycle(&fake);
                    let context = format!("call {n} failed with {code} ({effect:?}): {result:?}");
                    assert_all_running(&fake, &context);
                    let steps_forward = n < 2 * PIDS.len();
                    assert_eq!(result.is_err(), steps_forward, "{context}");
                    if let Err(error) = result {
                        assert!(error.is_computing(), "{context}");
                    }
                }
            }
        }
    }

    #[test]
    fn dropping_a_locked_or_suspended_job_resumes_it() {
        let fake = Fake::new(&PIDS);
        drop(lock_all(&driver(&fake), &PIDS, &once()).unwrap());
        assert_all_running(&fake, "dropping the lock");
        drop(
            lock_all(&driver(&fake), &PIDS, &once())
                .unwrap()
                .suspend()
                .unwrap(),
        );
        assert_all_running(&fake, "dropping the suspended job");
    }

    #[test]
    fn a_busy_process_is_reported_and_the_others_are_unlocked() {
        let fake = Fake::new(&PIDS);
        fake.fail_always(301, Call::Lock, sys::NOT_READY);
        let error = lock_all(&driver(&fake), &PIDS, &once()).unwrap_err();
        assert!(
            matches!(&error, TreeError::TimedOut { busy, attempts: 1, .. } if *busy == [301]),
            "{error}"
        );
        assert!(
            error
                .to_string()
                .contains("process 301 did not finish in 1 attempts"),
            "{error}"
        );
        assert_all_running(&fake, "a timeout");
    }

    #[test]
    fn a_lock_that_times_out_is_tried_again_from_running() {
        let fake = Fake::new(&PIDS);
        fake.fail_nth(1, sys::NOT_READY, Effect::None);
        let options = SuspendOptions::default();
        let locked = lock_all(&driver(&fake), &PIDS, &options).unwrap();
        assert_eq!(locked.attempts(), 2);
        locked.unlock().unwrap();
        assert_all_running(&fake, "the second attempt");
    }

    #[test]
    fn managed_memory_leaves_the_job_computing_and_says_why() {
        let fake = Fake::new(&PIDS);
        fake.fail_always(300, Call::Checkpoint, sys::NOT_SUPPORTED);
        let error = cycle(&fake).unwrap_err();
        let TreeError::Suspend { source, .. } = &error else {
            panic!("{error}");
        };
        assert_eq!((source.pid, source.code.number), (300, sys::NOT_SUPPORTED));
        assert!(error.to_string().ends_with("the job computes"), "{error}");
        assert_all_running(&fake, "a refused checkpoint");
    }

    #[test]
    fn a_process_that_cannot_be_restored_is_named_and_the_others_run() {
        let fake = Fake::new(&PIDS);
        fake.fail_always(302, Call::Restore, sys::OUT_OF_MEMORY);
        let error = cycle(&fake).unwrap_err();
        assert!(!error.is_computing());
        let stuck = &error.aftermath().unwrap().stuck;
        assert_eq!(stuck.len(), 1, "{error}");
        assert_eq!(
            (stuck[0].pid, stuck[0].state),
            (302, Some(State::Checkpointed))
        );
        let text = error.to_string();
        assert!(text.contains("process 302 is left checkpointed"), "{text}");
        assert!(text.contains("less free memory"), "{text}");
        assert_eq!(fake.state_of(300), Some(State::Running));
        assert_eq!(fake.state_of(301), Some(State::Running));
    }

    #[test]
    fn a_process_that_ends_during_the_lock_is_left_out() {
        let fake = Fake::new(&PIDS);
        fake.end(301);
        let locked = lock_all(&driver(&fake), &PIDS, &once()).unwrap();
        assert_eq!(locked.pids(), [300, 302]);
        let suspended = locked.suspend().unwrap();
        fake.end(300);
        suspended.resume().unwrap();
        assert_eq!(fake.state_of(302), Some(State::Running));
    }

    #[test]
    fn find_keeps_cuda_processes_and_those_nobody_can_answer_for() {
        let fake = Fake::new(&[300, 302, 303]);
        fake.end(302);
        fake.fail_always(303, Call::GetState, sys::OPERATING_SYSTEM);
        assert_eq!(find(&driver(&fake), &[300, 301, 302, 303]), [300, 303]);
    }

    #[test]
    fn restored_processes_are_resumed_from_any_state_the_image_holds() {
        let fake = Fake::new(&PIDS);
        fake.set(300, State::Checkpointed);
        fake.set(301, State::Locked);
        resume_restored(&driver(&fake), &PIDS).unwrap();
        assert_all_running(&fake, "a restore");
    }

    #[test]
    fn a_restored_process_that_the_driver_gave_up_is_an_error() {
        let fake = Fake::new(&PIDS);
        fake.set(301, State::Failed);
        let error = resume_restored(&driver(&fake), &PIDS).unwrap_err();
        assert!(
            error.to_string().contains("process 301 is left failed"),
            "{error}"
        );
    }

    #[test]
    fn no_processes_need_no_calls() {
        let fake = Fake::new(&[]);
        let locked = lock_all(&driver(&fake), &[], &once()).unwrap();
        locked.suspend().unwrap().resume().unwrap();
        assert!(fake.calls().is_empty());
    }

    #[test]
    fn more_processes_than_threads_are_refused_before_any_call() {
        let fake = Fake::new(&[]);
        let pids: Vec<i32> = (1..2000).collect();
        let error = lock_all(&driver(&fake), &pids, &once()).unwrap_err();
        assert!(
            matches!(error, TreeError::TooMany { count: 1999, .. }),
            "{error}"
        );
        assert!(fake.calls().is_empty());
    }

    #[test]
    fn pauses_differ_and_stay_short() {
        let pauses: Vec<u128> = (1..50).map(|n| pause(n).as_millis()).collect();
        assert!(pauses.iter().all(|ms| (1..=60).contains(ms)), "{pauses:?}");
        let distinct: std::collections::BTreeSet<_> = pauses.iter().collect();
        assert!(distinct.len() > 20, "{pauses:?}");
    }
}
