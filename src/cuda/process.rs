//! One CUDA process: its state, and the four steps between states.
//!
//! [`CheckpointApi`] is the seam to the driver. The real one is the loaded
//! library; tests put a fake there to fail what a GPU cannot be made to fail.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use super::error::{Call, CallError, Code, LockError};
use super::sys;

/// Where the driver says a process is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    /// It computes.
    Running,
    /// Its CUDA calls block; its submitted work is done.
    Locked,
    /// Its GPU memory is in host memory and it holds no GPU.
    Checkpointed,
    /// The driver gave the process up.
    Failed,
    /// A state newer than this program.
    Unknown(i32),
}

impl State {
    pub(super) fn from_raw(raw: i32) -> Self {
        match raw {
            0 => Self::Running,
            1 => Self::Locked,
            2 => Self::Checkpointed,
            3 => Self::Failed,
            other => Self::Unknown(other),
        }
    }
}

impl fmt::Display for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Running => f.write_str("running"),
            Self::Locked => f.write_str("locked"),
            Self::Checkpointed => f.write_str("checkpointed"),
            Self::Failed => f.write_str("failed"),
            Self::Unknown(raw) => write!(f, "in CUDA state {raw}"),
        }
    }
}

/// The driver's calls on another process. All block; only lock is bounded.
pub(crate) trait CheckpointApi: Send + Sync {
    /// Makes later restores possible, with `cuInit` where that is needed; called before anything
    /// is locked or restored. Only the first call does something.
    fn prepare(&self);
    fn state(&self, pid: i32) -> Result<State, Code>;
    fn restore_thread(&self, pid: i32) -> Result<i32, Code>;
    /// `timeout_ms` is at least 1.
    fn lock(&self, pid: i32, timeout_ms: u32) -> Result<(), Code>;
    fn checkpoint(&self, pid: i32) -> Result<(), Code>;
    fn restore(&self, pid: i32) -> Result<(), Code>;
    fn unlock(&self, pid: i32) -> Result<(), Code>;
    /// Whether the process still exists and can run (a zombie cannot).
    fn exists(&self, pid: i32) -> bool;
}

/// A process that uses CUDA, by its pid as this process sees it. Holding one
/// holds nothing: the process may end at any time, and dropping does nothing.
#[derive(Clone)]
pub struct CudaProcess {
    api: Arc<dyn CheckpointApi>,
    pid: i32,
}

impl CudaProcess {
    pub(super) fn new(api: Arc<dyn CheckpointApi>, pid: i32) -> Self {
        Self { api, pid }
    }

    /// The process.
    #[must_use]
    pub fn pid(&self) -> i32 {
        self.pid
    }

    /// Where the driver says the process is.
    ///
    /// # Errors
    /// Code 3 (not initialized) when the process does not use CUDA.
    pub fn state(&self) -> Result<State, CallError> {
        self.called(Call::GetState, self.api.state(self.pid))
    }

    /// The thread of the process in which the driver does its work on it.
    ///
    /// # Errors
    /// When the process does not use CUDA or has ended.
    pub fn restore_thread(&self) -> Result<i32, CallError> {
        self.called(Call::GetRestoreThreadId, self.api.restore_thread(self.pid))
    }

    /// Waits for the submitted GPU work, then blocks further CUDA calls.
    /// Running becomes locked. Processes that wait for each other on the GPU
    /// (NCCL) must be locked at the same time: see [`super::lock_all`].
    ///
    /// # Errors
    /// [`LockError::TimedOut`] leaves the process running and unharmed.
    pub fn lock(&self, timeout: Duration) -> Result<(), LockError> {
        match self.api.lock(self.pid, timeout_ms(timeout)) {
            Err(code) if code.number == sys::NOT_READY => Err(LockError::TimedOut {
                pid: self.pid,
                timeout,
            }),
            result => Ok(self.called(Call::Lock, result)?),
        }
    }

    /// Moves GPU memory into the host memory of the process and lets go of the
    /// GPU. Locked becomes checkpointed. Takes about 0.3 s per GiB and has no
    /// limit: a checkpoint stopped half-way loses the process.
    ///
    /// # Errors
    /// Code 801 (managed memory) leaves the process locked and unharmed.
    pub fn checkpoint(&self) -> Result<(), CallError> {
        self.called(Call::Checkpoint, self.api.checkpoint(self.pid))
    }

    /// Moves GPU memory back. Checkpointed becomes locked. Has no limit either.
    ///
    /// # Errors
    /// For lack of free GPU memory, which is final for the process.
    pub fn restore(&self) -> Result<(), CallError> {
        self.api.prepare();
        self.called(Call::Restore, self.api.restore(self.pid))
    }

    /// Lets CUDA calls through again. Locked becomes running.
    ///
    /// # Errors
    /// Code 401 (illegal state) when the process is not locked.
    pub fn unlock(&self) -> Result<(), CallError> {
        self.called(Call::Unlock, self.api.unlock(self.pid))
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

/// The driver's unit. Never 0, which it takes for "wait for ever".
pub(super) fn timeout_ms(timeout: Duration) -> u32 {
    u32::try_from(timeout.as_millis())
        .unwrap_or(u32::MAX)
        .max(1)
}

/// Whether a process exists and is no zombie. Unreadable counts as existing.
pub(super) fn exists(pid: i32) -> bool {
    let stat = match std::fs::read(format!("/proc/{pid}/stat")) {
        Ok(stat) => stat,
        Err(error) => return error.kind() != std::io::ErrorKind::NotFound,
    };
    // The state follows the name, which is in brackets and may hold any byte.
    let state = stat
        .iter()
        .rposition(|&byte| byte == b')')
        .and_then(|at| stat.get(at + 2));
    !matches!(state, Some(b'Z' | b'X'))
}

#[cfg(test)]
mod tests {
    use super::*;
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

    #[test]
    fn states_newer_than_this_program_are_kept() {
        assert_eq!(State::from_raw(2), State::Checkpointed);
        assert_eq!(State::from_raw(4), State::Unknown(4));
        assert_eq!(State::from_raw(-1), State::Unknown(-1));
    }

    #[test]
    fn the_steps_lead_through_the_states_and_back() {
        let fake = Fake::new(&[7]);
        let process = CudaProcess::new(fake.clone(), 7);
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
        let process = CudaProcess::new(fake.clone(), 7);
        let error = process.lock(Duration::from_millis(5)).unwrap_err();
        assert!(
            matches!(error, LockError::TimedOut { pid: 7, .. }),
            "{error}"
        );
        assert_eq!(process.state().unwrap(), State::Running);
    }

    #[test]
    fn a_refusal_names_pid_call_code_and_what_to_do() {
        let fake = Fake::new(&[7]);
        fake.fail_always(7, Call::Checkpoint, sys::NOT_SUPPORTED);
        let process = CudaProcess::new(fake, 7);
        process.lock(Duration::from_millis(5)).unwrap();
        let text = process.checkpoint().unwrap_err().to_string();
        assert!(text.starts_with("checkpoint CUDA process 7: "), "{text}");
        assert!(
            text.contains("801") && text.contains("managed memory"),
            "{text}"
        );
    }
}
