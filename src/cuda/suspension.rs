//! Suspends processes and leaves them so, resumes them later: the operations
//! that a scheduler or a person asks for, by pids alone.
//!
//! ```text
//! running ──suspend──> checkpointed ──resume──> running      toggle: whichever it is not
//! ```
//!
//! What they begin they finish or undo, as [`super::job_processes`] does; only the single
//! [`Step`]s leave things as they come. It must not know who asks.

use std::time::Duration;

use super::cuda_process::CudaProcess;
use super::error::{CallError, MapError, RestoreOntoError};
use super::group::in_parallel;
use super::job_processes::{SuspendOptions, TreeError, lock_all, resume_restored};
use super::loader::Driver;
use super::map::GpuMap;
use super::state::State;

/// Suspends all processes, or none, and leaves them suspended: for as long as
/// anybody likes, also after this process has ended. Those that are suspended
/// already stay so; one that ends meanwhile is no error.
///
/// # Errors
/// As [`lock_all`] and [`Locked::suspend`](super::Locked::suspend); also when a
/// process does not use CUDA, before anything is done.
pub fn suspend_all(
    driver: &Driver,
    pids: &[i32],
    options: &SuspendOptions,
) -> Result<(), TreeError> {
    states(driver, pids)?;
    lock_all(driver, pids, options)?.suspend()?.leave();
    Ok(())
}

/// Resumes all processes, onto the GPUs that `map` names. Those that run already
/// go on; one that was only locked is unlocked; one that ends meanwhile is no error.
///
/// # Errors
/// As [`resume_restored`]; also when a process does not use CUDA, before
/// anything is done.
pub fn resume_all(driver: &Driver, pids: &[i32], map: &GpuMap) -> Result<(), TreeError> {
    states(driver, pids)?;
    resume_restored(driver, pids, map)
}

/// Suspends processes that all run, resumes processes that all are suspended;
/// the state that they have then.
///
/// # Errors
/// As [`suspend_all`] and [`resume_all`]; before anything is done when some run
/// and some do not, or one is half-way in between.
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

/// One of the driver's steps that may take as long as it takes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Step {
    /// Locked becomes checkpointed.
    Checkpoint,
    /// Checkpointed becomes locked, onto these GPUs.
    Restore(GpuMap),
    /// Locked becomes running.
    Unlock,
}

/// Takes one step with every process at once; those that failed. Nothing is
/// undone: a process that failed is in the state it was in before the step,
/// unless the driver gave it up; the others have taken it.
///
/// # Errors
/// When the driver takes no map of GPUs; nothing was done.
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

/// Where each process is; the first that does not tell is the error.
fn states(driver: &Driver, pids: &[i32]) -> Result<Vec<(i32, State)>, CallError> {
    pids.iter()
        .map(|&pid| Ok((pid, driver.process(pid).state()?)))
        .collect()
}

impl CudaProcess {
    /// Locks and checkpoints. Running becomes checkpointed, and a process that
    /// is checkpointed stays so.
    ///
    /// # Errors
    /// The process runs again, unless the error's aftermath says otherwise:
    /// what was locked when the checkpoint failed is unlocked. One that was not
    /// running before is not touched.
    pub fn suspend(&self, timeout: Duration) -> Result<(), TreeError> {
        suspend_all(self.driver(), &[self.pid()], &alone(timeout))
    }

    /// Restores, onto the GPUs that `map` names, and unlocks. Checkpointed
    /// becomes running, and a process that runs goes on.
    ///
    /// # Errors
    /// The aftermath says in which state the process is left: checkpointed when
    /// it could not be restored, locked when it could not be unlocked.
    pub fn resume(&self, map: &GpuMap) -> Result<(), TreeError> {
        resume_all(self.driver(), &[self.pid()], map)
    }

    /// Suspends the process if it runs, resumes it if it is suspended; the state
    /// that it has then.
    ///
    /// # Errors
    /// As [`CudaProcess::suspend`] and [`CudaProcess::resume`]. A process in any
    /// other state is not touched.
    pub fn toggle(&self, timeout: Duration) -> Result<State, TreeError> {
        let same_gpus = GpuMap::default();
        toggle_all(self.driver(), &[self.pid()], &alone(timeout), &same_gpus)
    }
}

/// One attempt that takes all the time: a process alone waits for no other.
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
            text.contains("process 301 running and process 300 suspended"),
            "{text}"
        );
        assert_eq!(process.toggle(SHORT).unwrap(), State::Running);
        assert_eq!(toggle().unwrap(), State::Checkpointed);
        assert_eq!(toggle().unwrap(), State::Running);
        assert_eq!(states_of(&fake), [Some(State::Running); 2]);
    }

    #[test]
    fn a_process_that_somebody_else_holds_is_not_touched() {
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
    fn a_process_that_cannot_be_resumed_is_left_as_the_error_says() {
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
