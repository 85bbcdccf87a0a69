//! A job whose GPU state is suspended: its CUDA processes are stopped, whether or not device memory stayed on the GPUs.

use std::time::Duration;

use super::error::GpuError;
use super::halted::{HaltGroup, HaltedProcesses, LAST_RESORT};
use super::resident::{KeptMemory, ResidentError};
use crate::clock;
use crate::cuda;
use crate::run::format::chain;
use crate::run::image_facts::Stopwatch;

/// Dropped, the job goes on, as far as that is possible.
#[derive(Debug)]
pub(crate) struct SuspendedJob {
    /// Taken when it is settled.
    suspended: Option<cuda::Suspended>,
    halt_group: HaltGroup,
    /// The memory that stayed on the GPUs, if any.
    kept: Option<KeptMemory>,
}

impl SuspendedJob {
    /// Takes over processes that are halted. They are stopped from here on.
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

    /// The processes, as the host sees them.
    pub fn pids(&self) -> &[i32] {
        self.suspended.as_ref().map_or(&[], cuda::Suspended::pids)
    }

    /// Returns the group of stopped processes.
    pub fn halt_group(&self) -> &HaltGroup {
        &self.halt_group
    }

    /// Returns the memory that stayed on the GPUs.
    pub fn kept(&self) -> Option<&KeptMemory> {
        self.kept.as_ref()
    }

    /// The same, to let go of it and to put it back.
    pub fn kept_mut(&mut self) -> Option<&mut KeptMemory> {
        self.kept.as_mut()
    }

    /// Leaves the processes as they are: they are dead, or dying.
    pub fn leave(mut self) {
        if let Some(suspended) = self.suspended.take() {
            suspended.leave();
        }
    }

    /// Lets the job compute again.
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
        // Halted and let go on this very thread.
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
            // Unlocked, a thread may use the GPU before its memory is there.
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
