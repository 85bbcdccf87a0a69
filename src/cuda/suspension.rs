//! Suspending of processes that stay suspended, and resuming them later: the operations that a scheduler or a person
//! requests by pids.
//!
//! ```text
//! running ──suspend──> checkpointed ──resume──> running      toggle: the opposite of the current state
//! ```
//!
//! Operations are completed or undone, as in [`super::job_processes`]; only the single [`Step`]s are not undone. This
//! module must not know the caller.

use std::time::Duration;

use super::cuda_process::CudaProcess;
use super::error::{CallError, MapError, RestoreOntoError};
use super::group::in_parallel;
use super::job_processes::{SuspendOptions, TreeError, lock_all, resume_restored};
use super::loader::Driver;
use super::map::GpuMap;
use super::state::State;

/// Suspends all processes, or none, and leaves them suspended for any time, also after this process has exited.
/// Suspended processes stay suspended; a process that exits meanwhile is no error.
///
/// # Errors
/// The errors of [`lock_all`] and [`Locked::suspend`](super::Locked::suspend); also if a process does not use CUDA,
/// before any process is changed.
pub fn suspend_all(
    driver: &Driver,
    pids: &[i32],
    options: &SuspendOptions,
) -> Result<(), TreeError> {
    states(driver, pids)?;
    lock_all(driver, pids, options)?.suspend()?.leave();
    Ok(())
}

/// Resumes all processes, onto the GPUs that `map` names. Running processes continue; a process that was only locked is
/// unlocked; a process that exits meanwhile is no error.
///
/// # Errors
/// The errors of [`resume_restored`]; also if a process does not use CUDA, before any process is changed.
pub fn resume_all(driver: &Driver, pids: &[i32], map: &GpuMap) -> Result<(), TreeError> {
    states(driver, pids)?;
    resume_restored(driver, pids, map)
}

/// Suspends processes that all run, or resumes processes that all are suspended; returns their new state.
///
/// # Errors
/// The errors of [`suspend_all`] and [`resume_all`]; also, before any process is changed, if some run and others do
/// not, or one is in an intermediate state.
pub fn toggle_all(
    driver: &Driver,
    pids: &[i32],
    options: &SuspendOptions,
    map: &GpuMap,
) -> Result<State, TreeError> {
    let (mut running, mut suspended) = (Vec::new(), Vec::new());
    for (pid, state) in states(driver, pids)? {
        match state {
            State::Running => running.push(pid),
            State::Checkpointed => suspended.push(pid),
            State::Locked
            | State::Failed
            | State::Checkpointing
            | State::Restoring
            | State::Unknown(_) => return Err(TreeError::NotRunning { pid, state }),
        }
    }
    match (running.is_empty(), suspended.is_empty()) {
        (_, true) => suspend_all(driver, pids, options).map(|()| State::Checkpointed),
        (true, false) => resume_all(driver, pids, map).map(|()| State::Running),
        (false, false) => Err(TreeError::Mixed { running, suspended }),
    }
}

/// A step of the driver without a time limit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Step {
    /// A step from locked to checkpointed.
    Checkpoint,
    /// A step from checkpointed to locked, onto these GPUs.
    Restore(GpuMap),
    /// A step from locked to running.
    Unlock,
}

/// Takes one step with every process at once; returns the failures. Nothing is undone: a failed process is in its state
/// before the step, unless the driver reports it as failed; the others have taken the step.
///
/// # Errors
/// The driver takes no map of GPUs; nothing was done.
pub fn step_all(driver: &Driver, pids: &[i32], step: &Step) -> Result<Vec<CallError>, MapError> {
    if let Step::Restore(map) = step {
        driver.check_map(map)?;
    }
    let take = |process: CudaProcess| match step {
        Step::Checkpoint => process.checkpoint().err(),
        Step::Unlock => process.unlock().err(),
        Step::Restore(map) => match process.restore_onto(map) {
            Err(RestoreOntoError::Call(error)) => Some(error),
            // Checked above: the driver takes the map.
            Ok(()) | Err(RestoreOntoError::Map(_)) => None,
        },
    };
    Ok(in_parallel(pids, |pid| take(driver.process(pid))))
}

/// Returns the state of each process; the first failed query is the error.
fn states(driver: &Driver, pids: &[i32]) -> Result<Vec<(i32, State)>, CallError> {
    pids.iter()
        .map(|&pid| Ok((pid, driver.process(pid).state()?)))
        .collect()
}

impl CudaProcess {
    /// Locks and checkpoints. Running becomes checkpointed, and a checkpointed process stays so.
    ///
    /// # Errors
    /// The process runs again, unless the error's aftermath says otherwise: a process that was locked when the
    /// checkpoint failed is unlocked. A process that was not running before is not changed.
    pub fn suspend(&self, timeout: Duration) -> Result<(), TreeError> {
        suspend_all(self.driver(), &[self.pid()], &alone(timeout))
    }

    /// Restores, onto the GPUs that `map` names, and unlocks. Checkpointed becomes running, and a running process
    /// continues.
    ///
    /// # Errors
    /// The aftermath contains the state in which the process is left: checkpointed if it could not be restored, locked
    /// if it could not be unlocked.
    pub fn resume(&self, map: &GpuMap) -> Result<(), TreeError> {
        resume_all(self.driver(), &[self.pid()], map)
    }

    /// Suspends the process if it runs, resumes it if it is suspended; returns its new state.
    ///
    /// # Errors
    /// The errors of [`CudaProcess::suspend`] and [`CudaProcess::resume`]. A process in any other state is not changed.
    pub fn toggle(&self, timeout: Duration) -> Result<State, TreeError> {
        let same_gpus = GpuMap::default();
        toggle_all(self.driver(), &[self.pid()], &alone(timeout), &same_gpus)
    }
}

/// Returns options with one attempt that takes all the time: a single process waits for no other process.
fn alone(timeout: Duration) -> SuspendOptions {
    SuspendOptions {
        attempt: timeout,
        total: timeout,
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::cuda::GpuUuid;
    use crate::cuda::error::Call;
    use crate::cuda::fake::Fake;
    use crate::cuda::sys;

    const PIDS: [i32; 2] = [300, 301];
    const SHORT: Duration = Duration::from_millis(5);

    fn driver(fake: &Arc<Fake>) -> Driver {
        Driver::fake(fake.clone())
    }

    fn states_of(fake: &Fake) -> [Option<State>; 2] {
        PIDS.map(|pid| fake.state_of(pid))
    }

    #[test]
    fn processes_stay_suspended_until_they_are_resumed() {
        let fake = Fake::new(&PIDS);
        let driver = driver(&fake);
        let options = SuspendOptions::default();
        suspend_all(&driver, &PIDS, &options).unwrap();
        assert_eq!(states_of(&fake), [Some(State::Checkpointed); 2]);
        suspend_all(&driver, &PIDS, &options).unwrap();
        assert_eq!(states_of(&fake), [Some(State::Checkpointed); 2]);
        resume_all(&driver, &PIDS, &GpuMap::default()).unwrap();
        resume_all(&driver, &PIDS, &GpuMap::default()).unwrap();
        assert_eq!(states_of(&fake), [Some(State::Running); 2]);
    }

    #[test]
    fn toggling_goes_there_and_back() {
        let fake = Fake::new(&PIDS);
        let process = driver(&fake).process(300);
        assert_eq!(process.toggle(SHORT).unwrap(), State::Checkpointed);
        assert_eq!(fake.state_of(300), Some(State::Checkpointed));
        let same = GpuMap::default();
        let toggle = || toggle_all(&driver(&fake), &PIDS, &SuspendOptions::default(), &same);
        let text = toggle().unwrap_err().to_string();
        assert!(
            text.contains("process 301 running, process 300 suspended"),
            "{text}"
        );
        assert_eq!(process.toggle(SHORT).unwrap(), State::Running);
        assert_eq!(toggle().unwrap(), State::Checkpointed);
        assert_eq!(toggle().unwrap(), State::Running);
        assert_eq!(states_of(&fake), [Some(State::Running); 2]);
    }

    #[test]
    fn process_held_by_another_program_is_not_changed() {
        for state in [
            State::Locked,
            State::Failed,
            State::Checkpointing,
            State::Restoring,
            State::Unknown(6),
        ] {
            let fake = Fake::new(&PIDS);
            fake.set(301, state);
            let options = SuspendOptions::default();
            for result in [
                suspend_all(&driver(&fake), &PIDS, &options),
                toggle_all(&driver(&fake), &PIDS, &options, &GpuMap::default()).map(drop),
                lock_all(&driver(&fake), &PIDS, &options).map(drop),
            ] {
                let error = result.unwrap_err();
                assert!(
                    matches!(error, TreeError::NotRunning { pid: 301, .. }),
                    "{error}"
                );
                assert_eq!(states_of(&fake), [Some(State::Running), Some(state)]);
            }
            assert!(fake.calls().iter().all(|(call, _)| *call == Call::GetState));
        }
    }

    #[test]
    fn a_process_that_cannot_be_checkpointed_is_unlocked_again() {
        let fake = Fake::new(&PIDS);
        fake.fail_always(300, Call::Checkpoint, sys::NOT_SUPPORTED);
        let error = driver(&fake).process(300).suspend(SHORT).unwrap_err();
        assert!(matches!(error, TreeError::Suspend { .. }), "{error}");
        assert!(error.is_computing(), "{error}");
        assert_eq!(fake.state_of(300), Some(State::Running));
    }

    #[test]
    fn a_process_without_cuda_is_refused_before_anything_is_done() {
        let fake = Fake::new(&[300]);
        let options = SuspendOptions::default();
        for result in [
            suspend_all(&driver(&fake), &PIDS, &options),
            resume_all(&driver(&fake), &PIDS, &GpuMap::default()),
            toggle_all(&driver(&fake), &PIDS, &options, &GpuMap::default()).map(drop),
        ] {
            let error = result.unwrap_err();
            assert!(
                matches!(&error, TreeError::Query(error) if error.pid == 301),
                "{error}"
            );
            assert_eq!(fake.state_of(300), Some(State::Running));
        }
    }

    #[test]
    fn unresumable_process_stays_in_the_reported_state() {
        let fake = Fake::new(&PIDS);
        fake.set(300, State::Checkpointed);
        fake.fail_always(300, Call::Unlock, sys::OPERATING_SYSTEM);
        let process = driver(&fake).process(300);
        let error = process.resume(&GpuMap::default()).unwrap_err();
        let left = &error.aftermath().unwrap().stuck[0];
        assert_eq!((left.pid, left.state), (300, Some(State::Locked)));
    }

    #[test]
    fn steps_go_on_with_the_processes_that_can() {
        let fake = Fake::new(&PIDS);
        let gpu = GpuUuid::from_bytes([1; 16]);
        let map: GpuMap = format!("{gpu}={gpu}").parse().unwrap();
        let driver = driver(&fake);
        lock_all(&driver, &PIDS, &SuspendOptions::default())
            .unwrap()
            .leave();
        assert_eq!(states_of(&fake), [Some(State::Locked); 2]);
        fake.fail_always(301, Call::Checkpoint, sys::NOT_SUPPORTED);
        let failed = step_all(&driver, &PIDS, &Step::Checkpoint).unwrap();
        assert_eq!((failed.len(), failed[0].pid), (1, 301));
        assert_eq!(
            states_of(&fake),
            [Some(State::Checkpointed), Some(State::Locked)]
        );
        let restored = step_all(&driver, &[300], &Step::Restore(map.clone())).unwrap();
        assert_eq!((restored, fake.maps()), (vec![], vec![map.clone()]));
        assert_eq!(step_all(&driver, &PIDS, &Step::Unlock).unwrap(), []);
        assert_eq!(states_of(&fake), [Some(State::Running); 2]);
        let old = Driver::fake_of(fake.clone(), 12080);
        assert!(step_all(&old, &PIDS, &Step::Restore(map)).is_err());
    }
}
