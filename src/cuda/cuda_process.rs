//! A CUDA process: its state, and the driver's four steps between states.
//!
//! [`CheckpointApi`] is the interface to the driver. The real implementation is the loaded library; tests use a fake to
//! produce failures that a real GPU cannot be made to produce.

use std::fmt;
use std::thread;
use std::time::Duration;

use super::error::{Call, CallError, Code, LockError, RestoreOntoError, WaitError};
use super::loader::Driver;
use super::map::GpuMap;
use super::state::State;
use super::sys;
use crate::clock;

/// Pause between two queries of a state: short compared with the fastest checkpoint (0.25 s), long compared with the
/// query.
const WAIT_PAUSE: Duration = Duration::from_millis(10);

/// The driver's calls on another process. All of them block; only lock has a time limit.
pub(crate) trait CheckpointApi: Send + Sync {
    /// Makes later restores possible, with `cuInit` where that is needed. It is called before any process is locked or
    /// restored. Only the first call has an effect.
    fn prepare(&self);
    fn state(&self, pid: i32) -> Result<State, Code>;
    fn restore_thread(&self, pid: i32) -> Result<i32, Code>;
    /// Locks the process; `timeout_ms` is at least 1.
    fn lock(&self, pid: i32, timeout_ms: u32) -> Result<(), Code>;
    fn checkpoint(&self, pid: i32) -> Result<(), Code>;
    /// Restores the process; an empty map restores onto the same GPUs.
    fn restore(&self, pid: i32, map: &GpuMap) -> Result<(), Code>;
    fn unlock(&self, pid: i32) -> Result<(), Code>;
    /// Returns true if the process still exists and can run (a zombie cannot).
    fn exists(&self, pid: i32) -> bool;
}

/// A process that uses CUDA, by its pid as the calling process sees it. The value holds no resource: the process may
/// exit at any time, and dropping the value has no effect.
///
/// The methods are the driver's single steps; none is undone. [`CudaProcess::suspend`] and [`CudaProcess::resume`]
/// combine the steps and undo those that they cannot finish.
#[derive(Clone)]
pub struct CudaProcess {
    driver: Driver,
    pid: i32,
}

impl CudaProcess {
    pub(super) fn new(driver: Driver, pid: i32) -> Self {
        Self { driver, pid }
    }

    /// Returns the pid.
    #[must_use]
    pub fn pid(&self) -> i32 {
        self.pid
    }

    pub(super) fn driver(&self) -> &Driver {
        &self.driver
    }

    /// Returns the state of the process as the driver reports it.
    ///
    /// # Errors
    /// Code 3 (not initialized) if the process does not use CUDA.
    pub fn state(&self) -> Result<State, CallError> {
        self.called(Call::GetState, self.api().state(self.pid))
    }

    /// Returns the thread of the process in which the driver works on it. A program that stops the process's threads
    /// one by one must let this thread run during the steps.
    ///
    /// # Errors
    /// The process does not use CUDA or has exited.
    pub fn restore_thread(&self) -> Result<i32, CallError> {
        let tid = self.api().restore_thread(self.pid);
        self.called(Call::GetRestoreThreadId, tid)
    }

    /// Waits for the submitted GPU work, then blocks further CUDA calls. Running becomes locked. Processes that wait
    /// for each other on the GPU (NCCL) must be locked at the same time: see [`super::lock_all`].
    ///
    /// # Errors
    /// [`LockError::TimedOut`] leaves the process running and unharmed; a refusal leaves it in its previous state.
    pub fn lock(&self, timeout: Duration) -> Result<(), LockError> {
        match self.api().lock(self.pid, timeout_ms(timeout)) {
            Err(code) if code.number == sys::NOT_READY => Err(LockError::TimedOut {
                pid: self.pid,
                timeout,
            }),
            result => Ok(self.called(Call::Lock, result)?),
        }
    }

    /// Moves GPU memory into the host memory of the process and releases the GPU. Locked becomes checkpointed. The call
    /// takes about 0.3 s per GiB and has no time limit: a checkpoint stopped half-way loses the process.
    ///
    /// # Errors
    /// Code 801 (managed memory) leaves the process locked and unharmed.
    pub fn checkpoint(&self) -> Result<(), CallError> {
        self.called(Call::Checkpoint, self.api().checkpoint(self.pid))
    }

    /// Moves GPU memory back. Checkpointed becomes locked. The call has no time limit either.
    ///
    /// # Errors
    /// The process stays checkpointed. If there was too little free GPU memory, it is reported to stay so forever:
    /// check for enough memory first.
    pub fn restore(&self) -> Result<(), CallError> {
        self.api().prepare();
        let restored = self.api().restore(self.pid, &GpuMap::default());
        self.called(Call::Restore, restored)
    }

    /// Moves GPU memory onto the GPUs that `map` names; an empty map is the same as [`CudaProcess::restore`].
    ///
    /// # Errors
    /// The process stays checkpointed. Code 1 means that the map omits a GPU that was visible to the process.
    pub fn restore_onto(&self, map: &GpuMap) -> Result<(), RestoreOntoError> {
        self.driver.check_map(map)?;
        self.api().prepare();
        Ok(self.called(Call::Restore, self.api().restore(self.pid, map))?)
    }

    /// Unblocks CUDA calls. Locked becomes running.
    ///
    /// # Errors
    /// Code 401 (illegal state) if the process is not locked; its state does not change.
    pub fn unlock(&self) -> Result<(), CallError> {
        self.called(Call::Unlock, self.api().unlock(self.pid))
    }

    /// Waits until another program has moved the process to `wanted`. Queries the state at least once; an answer of the
    /// driver may arrive later than `timeout`.
    ///
    /// # Errors
    /// The process stays in another state until the timeout, the driver reports it as failed, or it exits. The process
    /// is not changed.
    pub fn wait_for_state(&self, wanted: State, timeout: Duration) -> Result<(), WaitError> {
        let begun = clock::now();
        loop {
            let last = self.state()?;
            if last == wanted {
                return Ok(());
            }
            let pid = self.pid;
            if last == State::Failed {
                return Err(WaitError::Failed { pid, wanted });
            }
            let waited = begun.elapsed();
            if waited >= timeout {
                return Err(WaitError::TimedOut {
                    pid,
                    wanted,
                    last,
                    waited,
                });
            }
            thread::sleep(WAIT_PAUSE.min(timeout.saturating_sub(waited)));
        }
    }

    fn api(&self) -> &dyn CheckpointApi {
        &**self.driver.api()
    }

    fn called<T>(&self, call: Call, result: Result<T, Code>) -> Result<T, CallError> {
        result.map_err(|code| CallError {
            pid: self.pid,
            call,
            code,
        })
    }
}

impl fmt::Debug for CudaProcess {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("CudaProcess").field(&self.pid).finish()
    }
}

/// Returns the timeout in the driver's unit. It is never 0, which the driver treats as "wait forever".
pub(super) fn timeout_ms(timeout: Duration) -> u32 {
    u32::try_from(timeout.as_millis())
        .unwrap_or(u32::MAX)
        .max(1)
}

/// Returns true if a process exists and is not a zombie. A process that cannot be read counts as existing.
pub(super) fn exists(pid: i32) -> bool {
    let stat = match std::fs::read(format!("/proc/{pid}/stat")) {
        Ok(stat) => stat,
        Err(error) => return error.kind() != std::io::ErrorKind::NotFound,
    };
    // The state follows the name, which is in parentheses and may contain any byte.
    let state = stat
        .iter()
        .rposition(|&byte| byte == b')')
        .and_then(|at| stat.get(at + 2));
    !matches!(state, Some(b'Z' | b'X'))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::cuda::GpuUuid;
    use crate::cuda::fake::Fake;

    #[test]
    fn a_lock_never_waits_for_ever() {
        assert_eq!(timeout_ms(Duration::ZERO), 1);
        assert_eq!(timeout_ms(Duration::from_micros(900)), 1);
        assert_eq!(timeout_ms(Duration::from_millis(400)), 400);
        assert_eq!(timeout_ms(Duration::MAX), u32::MAX);
    }

    #[test]
    fn an_ended_child_does_not_exist_even_before_it_is_reaped() {
        use nix::sys::wait::{Id, WaitPidFlag, waitid};
        let mut child = std::process::Command::new("true").spawn().unwrap();
        let pid = i32::try_from(child.id()).unwrap();
        let ended = WaitPidFlag::WEXITED | WaitPidFlag::WNOWAIT;
        waitid(Id::Pid(nix::unistd::Pid::from_raw(pid)), ended).unwrap();
        assert!(!exists(pid), "a zombie");
        child.wait().unwrap();
        assert!(!exists(pid), "reaped");
        assert!(exists(i32::try_from(std::process::id()).unwrap()));
    }

    fn process(fake: &Arc<Fake>) -> CudaProcess {
        Driver::fake(fake.clone()).process(7)
    }

    #[test]
    fn the_steps_lead_through_the_states_and_back() {
        let fake = Fake::new(&[7]);
        let process = process(&fake);
        assert_eq!(process.state().unwrap(), State::Running);
        process.lock(Duration::from_millis(400)).unwrap();
        assert_eq!(process.state().unwrap(), State::Locked);
        process.checkpoint().unwrap();
        assert_eq!(process.state().unwrap(), State::Checkpointed);
        process.restore().unwrap();
        process.unlock().unwrap();
        assert_eq!(process.state().unwrap(), State::Running);
    }

    #[test]
    fn a_busy_process_is_a_timeout_and_stays_running() {
        let fake = Fake::new(&[7]);
        fake.fail_always(7, Call::Lock, sys::NOT_READY);
        let process = process(&fake);
        let error = process.lock(Duration::from_millis(5)).unwrap_err();
        assert!(
            matches!(error, LockError::TimedOut { pid: 7, .. }),
            "{error}"
        );
        assert_eq!(process.state().unwrap(), State::Running);
    }

    #[test]
    fn refusal_names_pid_call_code_and_remedy() {
        let fake = Fake::new(&[7]);
        fake.fail_always(7, Call::Checkpoint, sys::NOT_SUPPORTED);
        let process = process(&fake);
        process.lock(Duration::from_millis(5)).unwrap();
        let text = process.checkpoint().unwrap_err().to_string();
        assert!(
            text.starts_with("cannot checkpoint CUDA process 7: "),
            "{text}"
        );
        assert!(
            text.contains("801") && text.contains("managed memory"),
            "{text}"
        );
    }

    #[test]
    fn a_process_is_restored_onto_the_gpus_of_the_map() {
        let fake = Fake::new(&[7]);
        let [old, new] = [1, 2].map(|n| GpuUuid::from_bytes([n; 16]));
        fake.move_from(old);
        fake.set(7, State::Checkpointed);
        let process = process(&fake);
        let error = process.restore().unwrap_err();
        assert_eq!(error.code.number, sys::INVALID_VALUE);
        assert!(error.to_string().contains("GPU map lacks one"), "{error}");
        let wrong: GpuMap = format!("{new}={old}").parse().unwrap();
        let error = process.restore_onto(&wrong).unwrap_err();
        assert!(matches!(error, RestoreOntoError::Call(_)), "{error}");
        assert_eq!(process.state().unwrap(), State::Checkpointed);
        let map: GpuMap = format!("{old}={new}").parse().unwrap();
        process.restore_onto(&map).unwrap();
        assert_eq!(process.state().unwrap(), State::Locked);
        assert_eq!(fake.maps(), [GpuMap::default(), wrong, map]);
    }

    #[test]
    fn a_driver_without_gpu_maps_is_not_asked_to_restore() {
        let fake = Fake::new(&[7]);
        fake.set(7, State::Checkpointed);
        let process = Driver::fake_of(fake.clone(), 12090).process(7);
        let gpu = GpuUuid::from_bytes([1; 16]);
        let map: GpuMap = format!("{gpu}={gpu}").parse().unwrap();
        let error = process.restore_onto(&map).unwrap_err();
        assert!(matches!(error, RestoreOntoError::Map(_)), "{error}");
        assert!(fake.calls().is_empty());
        process.restore_onto(&GpuMap::default()).unwrap();
    }

    #[test]
    fn waiting_for_a_state_ends_with_it_or_with_the_time() {
        let fake = Fake::new(&[7]);
        let process = process(&fake);
        process
            .wait_for_state(State::Running, Duration::ZERO)
            .unwrap();
        let timeout = Duration::from_millis(30);
        let error = process.wait_for_state(State::Locked, timeout).unwrap_err();
        assert!(
            matches!(error, WaitError::TimedOut { last: State::Running, waited, .. } if waited >= timeout),
            "{error}"
        );
        let before = fake.calls().len();
        thread::scope(|scope| {
            let waiting =
                scope.spawn(|| process.wait_for_state(State::Locked, Duration::from_secs(60)));
            while fake.calls().len() < before + 2 {
                thread::yield_now(); // The state is queried repeatedly.
            }
            process.lock(Duration::from_secs(1)).unwrap();
            waiting.join().unwrap().unwrap();
        });
    }

    #[test]
    fn wait_ends_for_a_failed_or_exited_process() {
        let fake = Fake::new(&[7]);
        let process = process(&fake);
        let hour = Duration::from_secs(3600);
        fake.set(7, State::Failed);
        let error = process.wait_for_state(State::Running, hour).unwrap_err();
        assert!(matches!(error, WaitError::Failed { .. }), "{error}");
        process.wait_for_state(State::Failed, hour).unwrap();
        fake.end(7);
        let error = process.wait_for_state(State::Running, hour).unwrap_err();
        assert!(matches!(error, WaitError::Call(_)), "{error}");
    }
}
