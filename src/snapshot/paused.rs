//! A paused job: it has an image, its tasks are stopped, its GPU state is in host memory, and its GPUs are free for
//! other programs.
//!
//! ```text
//! snapshot, tasks frozen ──▶ stopped ── room on the GPUs? ── GPU state resumes, tasks continue ──▶ computing
//!                               └──── abandoned: the job was killed
//! ```
//! Processes with GPU state continue as soon as it is resumed, the other processes after them. This module must not
//! know which part of ckpt-run requests a pause.

use std::sync::Arc;
use std::time::Duration;

use crate::clock;
use crate::cuda::{self, Inventory};
use crate::gpu::resident::{ResidentError, Standby, refill};
use crate::gpu::suspended::SuspendedJob;
use crate::run::format::{chain, size};
use crate::run::gpu_facts::CudaFacts;
use crate::run::image_facts::Stopwatch;
use crate::run::run_context::RunContext;
use crate::run::running_job::Job;
use crate::store::ImageId;

/// A paused job. When the value is dropped, the job continues, as far as that is possible.
#[derive(Debug)]
pub(crate) struct Paused {
    job: Arc<Job>,
    gpu: Option<(SuspendedJob, CudaFacts)>,
    /// True if a drop has nothing to undo any more.
    settled: bool,
}

/// The reason why a job is still paused.
#[derive(Debug)]
pub(crate) enum StillPaused {
    /// Other programs use the job's GPUs.
    NoRoom(String),
    /// The job could not be continued.
    Failed(String),
}

/// A job that did not continue; `paused` is `None` if the job was lost in the attempt.
#[derive(Debug)]
pub(crate) struct Refused {
    pub paused: Option<Box<Paused>>,
    pub why: StillPaused,
}

impl Paused {
    /// Creates the value for a job whose tasks are stopped, with the GPU state of its CUDA processes. Memory that
    /// stayed on the GPUs is in the image, and is released there.
    pub fn new(job: Arc<Job>, mut gpu: Option<(SuspendedJob, CudaFacts)>) -> Self {
        if let Some(kept) = gpu.as_mut().and_then(|(suspended, _)| suspended.kept_mut()) {
            kept.evict();
        }
        Self {
            job,
            gpu,
            settled: false,
        }
    }

    /// Lets the job continue if its GPUs have room for it; returns the time that this took. Blocks for as long as the
    /// driver takes, and for as long as it takes to read the memory that was only on the GPUs from the image `id`.
    pub fn unpause(
        mut self,
        context: &RunContext,
        standby: &Standby,
        id: ImageId,
    ) -> Result<Duration, Refused> {
        let needs = self.gpu.as_ref().map(|(_, facts)| facts);
        let machine = || cuda::inventory().unwrap_or_default();
        if let Some(why) = needs.and_then(|facts| lacking(facts, &machine())) {
            return Err(Refused {
                paused: Some(Box::new(self)),
                why: StillPaused::NoRoom(why),
            });
        }
        let begun = clock::now();
        if let Err(error) = self.refill(context, standby, id) {
            return Err(Refused {
                paused: Some(Box::new(self)),
                why: StillPaused::Failed(chain(&error)),
            });
        }
        self.settled = true;
        let failed = |reason| Refused {
            paused: None,
            why: StillPaused::Failed(reason),
        };
        if let Some((suspended, _)) = self.gpu.take() {
            let resumed = suspended.resume(&mut Stopwatch::start());
            resumed.map_err(|error| failed(chain(&error)))?;
        }
        self.continue_tasks()
            .map_err(|error| failed(chain(&error)))?;
        Ok(clock::now() - begun)
    }

    /// Restores to the GPUs the memory that is only in the image.
    fn refill(
        &mut self,
        context: &RunContext,
        standby: &Standby,
        id: ImageId,
    ) -> Result<(), ResidentError> {
        let Some((suspended, facts)) = &mut self.gpu else {
            return Ok(());
        };
        let Some((kept, facts)) = suspended.kept_mut().zip(facts.resident.as_ref()) else {
            return Ok(());
        };
        let image = context.store.read(id);
        let image = image.map_err(|error| ResidentError::Read(Box::new(error)))?;
        for (pid, memory) in refill(context, standby, &image, facts, &Vec::new())? {
            kept.put(pid, memory)?;
        }
        Ok(())
    }

    /// Abandons the job, which was killed: there is nothing to resume.
    pub fn abandon(mut self) {
        self.settled = true;
        // A drop would make the driver resume dying processes.
        if let Some((suspended, _)) = self.gpu.take() {
            suspended.leave();
        }
    }

    fn continue_tasks(&self) -> Result<(), crate::sandbox::SandboxError> {
        let continued = self.job.sandbox.signal(nix::libc::SIGCONT, true);
        self.job.continues();
        self.job.own_activity.leaves_gpu(clock::now());
        continued
    }
}

impl Drop for Paused {
    fn drop(&mut self) {
        if self.settled {
            return;
        }
        // Dropping the GPU state resumes it. This happens before the other processes continue, which may need it.
        drop(self.gpu.take());
        if let Err(error) = self.continue_tasks() {
            tracing::warn!("cannot continue the paused job: {}", chain(&error));
        }
    }
}

/// Returns a description of the memory that the GPUs lack for the job to be resumed; `None` if they have it, or do not
/// report their free memory.
pub(crate) fn lacking(facts: &CudaFacts, machine: &Inventory) -> Option<String> {
    let lacks: Vec<String> = facts
        .gpus
        .iter()
        .filter_map(|then| {
            let needed = then.used_bytes?;
            let now = machine.gpus.iter().find(|gpu| gpu.uuid == then.uuid)?;
            let free = now.memory?.free_bytes;
            (free < needed).then(|| {
                format!(
                    "GPU {} ({}) has {} free and the job needs {} there",
                    now.index,
                    now.uuid,
                    size(free),
                    size(needed)
                )
            })
        })
        .collect();
    (!lacks.is_empty()).then(|| lacks.join("; "))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::{Gpu, GpuMemory};
    use crate::run::gpu_facts::GpuFacts;

    #[test]
    fn full_gpu_is_named_and_unknown_memory_is_trusted() {
        let gpu = |uuid: &str, free: Option<u64>| Gpu {
            index: 3,
            name: String::new(),
            uuid: uuid.to_owned(),
            memory: free.map(|free_bytes| GpuMemory {
                total_bytes: 1 << 40,
                free_bytes,
            }),
            persistent: None,
            mig: None,
            mode: None,
            busy: None,
        };
        let used = |uuid: &str, used_bytes| GpuFacts {
            uuid: uuid.to_owned(),
            used_bytes,
            ..GpuFacts::default()
        };
        let machine = Inventory {
            driver: None,
            gpus: vec![gpu("a", Some(2 << 30)), gpu("b", None)],
        };
        let lacking = |gpus| {
            let facts = CudaFacts {
                gpus,
                ..CudaFacts::default()
            };
            lacking(&facts, &machine)
        };
        assert_eq!(
            lacking(vec![used("a", Some(2 << 30)), used("b", Some(1))]),
            None
        );
        assert_eq!(lacking(vec![used("a", None), used("c", Some(1))]), None);
        let why = lacking(vec![used("a", Some(3 << 30))]).unwrap();
        assert!(
            why.contains("GPU 3 (a)") && why.contains("2.0 GiB") && why.contains("3.0 GiB"),
            "{why}"
        );
    }
}
