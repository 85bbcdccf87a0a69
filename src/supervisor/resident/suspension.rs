//! A job whose GPU state is suspended, whichever way its device memory went.

use std::time::Duration;

use super::error::ResidentError;
use super::keep::Kept;
use crate::clock;
use crate::cuda;

use super::super::describe::chain;
use super::super::image::Stopwatch;
use super::super::snapshot_error::SnapshotError;

/// Dropped, the job goes on, as far as that is possible.
#[derive(Debug)]
pub(in crate::supervisor) enum Suspension {
    /// All of it is in host memory.
    Driver(cuda::Suspended),
    /// Large allocations stayed where they were.
    Resident(Resident),
}

/// The rest is in host memory, and what was kept waits for its processes.
#[derive(Debug)]
pub(in crate::supervisor) struct Resident {
    /// Taken when it is settled.
    suspended: Option<cuda::Suspended>,
    kept: Kept,
}

impl Suspension {
    pub fn resident(suspended: cuda::Suspended, kept: Kept) -> Self {
        let suspended = Some(suspended);
        Self::Resident(Resident { suspended, kept })
    }

    pub fn pids(&self) -> &[i32] {
        match self {
            Self::Driver(suspended) => suspended.pids(),
            Self::Resident(resident) => resident.suspended.as_ref().map_or(&[], |one| one.pids()),
        }
    }

    /// What stayed on the GPUs.
    pub fn kept(&self) -> Option<&Kept> {
        match self {
            Self::Driver(_) => None,
            Self::Resident(resident) => Some(&resident.kept),
        }
    }

    /// The same, to let go of it and to put it back.
    pub fn kept_mut(&mut self) -> Option<&mut Kept> {
        match self {
            Self::Driver(_) => None,
            Self::Resident(resident) => Some(&mut resident.kept),
        }
    }

    /// Leaves the processes as they are: they are dead, or dying.
    pub fn leave(self) {
        match self {
            Self::Driver(suspended) => suspended.leave(),
            Self::Resident(mut resident) => {
                if let Some(suspended) = resident.suspended.take() {
                    suspended.leave();
                }
            }
        }
    }

    /// Lets the job compute again.
    pub fn resume(self, watch: &mut Stopwatch) -> Result<(), SnapshotError> {
        match self {
            Self::Driver(suspended) => {
                let failed = |error| SnapshotError::Resume(Box::new(error));
                let times = suspended.resume().map_err(failed)?;
                watch.add("resume", times.restore);
                watch.add("unlock", times.unlock);
            }
            Self::Resident(mut resident) => {
                let Some(suspended) = resident.suspended.take() else {
                    return Ok(());
                };
                let (times, map) = resident.resume(suspended)?;
                watch.add("resume", times.restore);
                watch.add("unlock", times.unlock);
                watch.add("map", map);
            }
        }
        Ok(())
    }
}

impl Resident {
    fn resume(
        &mut self,
        suspended: cuda::Suspended,
    ) -> Result<(cuda::ResumeTimes, Duration), ResidentError> {
        // Before the driver lets them go: they have no memory yet. Halted and let go on this very thread.
        let halted = if self.kept.is_evicted() {
            Err(ResidentError::Evicted)
        } else {
            self.kept.halt().map_err(ResidentError::from)
        };
        let halted = match halted {
            Ok(halted) => halted,
            Err(error) => {
                suspended.leave();
                let pid = self.kept.processes().first().map_or(0, |one| one.pid);
                let source = Box::new(error);
                return Err(ResidentError::Lost { pid, source });
            }
        };
        let times = suspended.resume()?;
        let begun = clock::now();
        self.kept.give_back()?;
        drop(halted);
        Ok((times, begun.elapsed()))
    }
}

impl Drop for Resident {
    fn drop(&mut self) {
        let suspended = self.suspended.take();
        let resumed = suspended.map(|suspended| self.resume(suspended));
        if let Some(Err(error)) = resumed {
            tracing::error!(
                "the job's GPU state could not be resumed: {}",
                chain(&error)
            );
        }
    }
}
