//! A job whose GPU state is suspended: all its CUDA processes are frozen, whether their device memory moved to the host
//! or stayed on the GPUs.

use std::time::Duration;

use super::error::GpuError;
use super::halted::{HaltGroup, HaltedProcesses, LAST_RESORT};
use super::resident::{KeptMemory, ResidentError};
use crate::clock;
use crate::cuda;
use crate::run::format::chain;
use crate::run::image_facts::Stopwatch;

/// A suspended job. Dropping it resumes the job as far as that is possible.
#[derive(Debug)]
pub(crate) struct SuspendedJob {
    /// `None` once the job was resumed or left.
    suspended: Option<cuda::Suspended>,
    halt_group: HaltGroup,
    /// Memory that stayed on the GPUs, if any did.
    kept: Option<KeptMemory>,
}

impl SuspendedJob {
    /// Creates the value from halted processes and stops them.
    pub fn new(
        suspended: cuda::Suspended,
        halt_group: HaltGroup,
        still: HaltedProcesses,
        kept: Option<KeptMemory>,
    ) -> Self {
        still.stop();
        Self {
            suspended: Some(suspended),
            halt_group,
            kept,
        }
    }

    /// Returns the pids of the processes as the host sees them.
    pub fn pids(&self) -> &[i32] {
        self.suspended.as_ref().map_or(&[], cuda::Suspended::pids)
    }

    /// Returns the group of frozen processes.
    pub fn halt_group(&self) -> &HaltGroup {
        &self.halt_group
    }

    /// Returns the memory that stayed on the GPUs.
    pub fn kept(&self) -> Option<&KeptMemory> {
        self.kept.as_ref()
    }

    /// Returns the memory that stayed on the GPUs, mutably: to release it and to restore it.
    pub fn kept_mut(&mut self) -> Option<&mut KeptMemory> {
        self.kept.as_mut()
    }

    /// Leaves the processes as they are: they are dead or dying.
    pub fn leave(mut self) {
        if let Some(suspended) = self.suspended.take() {
            suspended.leave();
        }
    }

    /// Resumes the GPU state, so that the job computes again.
    pub fn resume(mut self, watch: &mut Stopwatch) -> Result<(), GpuError> {
        let Some(suspended) = self.suspended.take() else {
            return Ok(());
        };
        let (times, map) = self.bring_back(suspended)?;
        watch.add("resume", times.restore);
        watch.add("unlock", times.unlock);
        if self.kept.is_some() {
            watch.add("map", map);
        }
        Ok(())
    }

    fn bring_back(
        &mut self,
        suspended: cuda::Suspended,
    ) -> Result<(cuda::ResumeTimes, Duration), GpuError> {
        // ptrace: the same thread halts and releases the processes.
        let halted = match &self.kept {
            Some(kept) if kept.is_evicted() => Err(ResidentError::Evicted),
            Some(_) | None => self.halt_group.halt().map_err(ResidentError::from),
        };
        let mut still = match halted {
            Ok(still) => still,
            Err(error) => {
                suspended.leave();
                let source = Box::new(error);
                return Err(ResidentError::Stuck { source }.into());
            }
        };
        let patience = match self.kept {
            // Once unlocked, a thread may use the GPU before its memory is mapped.
            Some(_) => LAST_RESORT,
            None => Duration::ZERO,
        };
        let resumed = still.during(patience, || suspended.resume());
        let times = resumed.map_err(|error| GpuError::Resume(Box::new(error)))?;
        let begun = clock::now();
        if let Some(kept) = &mut self.kept {
            still.during(patience, || kept.give_back())?;
        }
        drop(still);
        Ok((times, begun.elapsed()))
    }
}

impl Drop for SuspendedJob {
    fn drop(&mut self) {
        let suspended = self.suspended.take();
        let resumed = suspended.map(|suspended| self.bring_back(suspended));
        if let Some(Err(error)) = resumed {
            let reason = chain(&error);
            tracing::error!("the job's GPU state could not be resumed: {reason}");
        }
    }
}
