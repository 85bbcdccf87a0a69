//! A set of processes on which every call is made at once, and which is always returned to running: the mechanism under
//! [`super::job_processes`].
//!
//! The steps are chosen from the state that the driver reports for each process, never from earlier attempts, so that a
//! call that failed after it took effect is undone as well. This module must not know the order of steps.

use std::sync::Arc;
use std::thread;

use super::cuda_process::CheckpointApi;
use super::error::{Call, CallError, Code};
use super::job_processes::{Aftermath, Left, TreeError};
use super::loader::Driver;
use super::map::GpuMap;
use super::state::State;

/// Limit on the processes of a group. Each process has a thread while they are locked; eight GPUs with a few processes
/// each are far below this.
const PROCESSES_MAX: usize = 512;

/// Failed calls that the return of a process to running tolerates. A call that failed once may succeed the next time;
/// one that failed twice will not.
const UNDO_FAILURES_MAX: u32 = 2;

/// Steps that the return of a process to running can take: query, restore, query, unlock, query.
const UNDO_STEPS_MAX: u32 = 3 + UNDO_FAILURES_MAX;

/// The meaning of a process in the group that does not use CUDA.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Without {
    /// The process used CUDA when it was found and runs another program now: there is nothing to resume.
    Changed,
    /// The process was suspended in the image it was restored from: its GPU state is lost.
    Lost,
}

/// Processes that are returned to running when this value is dropped, unless that was already tried.
pub(super) struct Group {
    api: Arc<dyn CheckpointApi>,
    pids: Vec<i32>,
    without: Without,
    /// The map for every restore, also for those that undo an operation.
    map: GpuMap,
    settled: bool,
}

impl Group {
    pub(super) fn new(
        driver: &Driver,
        pids: &[i32],
        without: Without,
        map: &GpuMap,
    ) -> Result<Self, TreeError> {
        driver.check_map(map)?;
        let mut pids = pids.to_vec();
        pids.sort_unstable();
        pids.dedup();
        if pids.len() > PROCESSES_MAX {
            return Err(TreeError::TooMany {
                count: pids.len(),
                most: PROCESSES_MAX,
            });
        }
        let api = Arc::clone(driver.api());
        if !pids.is_empty() {
            api.prepare();
        }
        Ok(Self {
            api,
            pids,
            without,
            map: map.clone(),
            // No process has been changed yet.
            settled: true,
        })
    }

    pub(super) fn pids(&self) -> &[i32] {
        &self.pids
    }

    pub(super) fn api(&self) -> &(dyn CheckpointApi + 'static) {
        &*self.api
    }

    /// Queries every process before any of them is changed. Processes that another program has suspended already, or
    /// that have exited, leave the group. A process whose state the driver does not report stays, so that the lock
    /// fails with the reason.
    pub(super) fn only_running(&mut self) -> Result<(), TreeError> {
        let api = &*self.api;
        let states = in_parallel(&self.pids, |pid| Some((pid, api.state(pid))));
        let mut leave = Vec::new();
        for (pid, state) in states {
            match state {
                Ok(State::Running) => {}
                Ok(
                    state @ (State::Locked
                    | State::Failed
                    | State::Checkpointing
                    | State::Restoring
                    | State::Unknown(_)),
                ) => return Err(TreeError::NotRunning { pid, state }),
                Err(_) if api.exists(pid) => {}
                Ok(State::Checkpointed) | Err(_) => leave.push(pid),
            }
        }
        self.pids.retain(|pid| !leave.contains(pid));
        Ok(())
    }

    /// Leaves the processes in their state: nothing is undone any more.
    pub(super) fn leave(mut self) {
        self.settled = true;
    }

    /// Restores every process at once, with the group's map.
    pub(super) fn restore(&mut self) -> Vec<CallError> {
        let map = self.map.clone();
        self.each(|api, pid| (Call::Restore, api.restore(pid, &map)))
    }

    /// Makes one call on every process at once. Returns the failures; a process that has exited is no failure and
    /// leaves the group.
    pub(super) fn each(
        &mut self,
        function: impl Fn(&(dyn CheckpointApi + 'static), i32) -> (Call, Result<(), Code>) + Sync,
    ) -> Vec<CallError> {
        self.settled = false;
        let api = &*self.api;
        let mut failures: Vec<CallError> = in_parallel(&self.pids, |pid| {
            let (call, result) = function(api, pid);
            let code = result.err()?;
            Some(CallError { pid, call, code })
        });
        failures.retain(|failure| {
            let exists = self.api.exists(failure.pid);
            if !exists {
                self.pids.retain(|&pid| pid != failure.pid);
            }
            exists
        });
        failures
    }

    /// Returns every process to running, from any state.
    pub(super) fn bring_back(&mut self) -> Aftermath {
        self.settled = true;
        let (api, without, map) = (&*self.api, self.without, &self.map);
        Aftermath {
            stuck: in_parallel(&self.pids, |pid| bring_back(api, pid, without, map).err()),
        }
    }

    pub(super) fn resumed(&mut self) -> Result<(), TreeError> {
        let aftermath = self.bring_back();
        if aftermath.is_computing() {
            Ok(())
        } else {
            Err(TreeError::Resume { aftermath })
        }
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        if self.settled {
            return;
        }
        let aftermath = self.bring_back();
        if !aftermath.is_computing() {
            tracing::error!(%aftermath, "the job's GPU state could not be resumed");
        }
    }
}

impl std::fmt::Debug for Group {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Group").field(&self.pids).finish()
    }
}

/// Restores and unlocks, as the process's state requires, until the process runs.
fn bring_back(
    api: &dyn CheckpointApi,
    pid: i32,
    without: Without,
    map: &GpuMap,
) -> Result<(), Left> {
    let mut left = Left {
        pid,
        state: None,
        failure: None,
    };
    let mut failures = 0;
    for _ in 0..UNDO_STEPS_MAX {
        let state = api.state(pid);
        left.state = state.as_ref().ok().copied();
        let (call, result) = match state {
            Ok(State::Running) => return Ok(()),
            Ok(State::Locked) => (Call::Unlock, api.unlock(pid)),
            Ok(State::Checkpointed) => (Call::Restore, api.restore(pid, map)),
            Ok(State::Failed | State::Checkpointing | State::Restoring | State::Unknown(_)) => {
                break;
            }
            Err(code) => match without {
                Without::Changed if code.is_not_initialized() => return Ok(()),
                Without::Changed | Without::Lost => (Call::GetState, Err(code)),
            },
        };
        let Err(code) = result else { continue };
        if !api.exists(pid) {
            return Ok(());
        }
        left.failure = Some(CallError { pid, call, code });
        failures += 1;
        if failures == UNDO_FAILURES_MAX {
            left.state = api.state(pid).ok();
            break;
        }
    }
    if left.state == Some(State::Running) {
        return Ok(());
    }
    Err(left)
}

/// Calls `function` for every pid at once, each on a separate thread, and collects the results in the order of the
/// pids. If no thread can be created for a pid, the calling thread handles it later.
pub(super) fn in_parallel<T: Send>(
    pids: &[i32],
    function: impl Fn(i32) -> Option<T> + Sync,
) -> Vec<T> {
    if let [pid] = *pids {
        return function(pid).into_iter().collect();
    }
    let function = &function;
    thread::scope(|scope| {
        let threads: Vec<_> = pids
            .iter()
            .map(|&pid| {
                thread::Builder::new()
                    .name(format!("cuda-{pid}"))
                    .spawn_scoped(scope, move || function(pid))
                    .map_err(|_| pid)
            })
            .collect();
        threads
            .into_iter()
            .filter_map(|thread| match thread {
                Ok(thread) => thread
                    .join()
                    .unwrap_or_else(|panic| std::panic::resume_unwind(panic)),
                Err(pid) => function(pid),
            })
            .collect()
    })
}
