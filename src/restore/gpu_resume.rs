//! The GPU part of a restore: the choice of GPUs before anything is changed, and the resume of the GPU state once the
//! processes exist.

use std::sync::Arc;
use std::thread;
use std::time::Duration;

use super::error::RestoreError;
use crate::cuda::{self, GpuMap, GpuMapError, GpuPair};
use crate::gpu::halted::{HaltGroup, LAST_RESORT};
use crate::gpu::mapping::{GpuPlan, Here, Refusal, plan};
use crate::gpu::resident::{ResidentError, ResidentRestore, Standby};
use crate::job;
use crate::run::format::chain;
use crate::run::gpu_facts::{CudaFacts, visible};
use crate::run::image_facts::ImageFacts;
use crate::run::run_context::RunContext;
use crate::run::running_job::Agents;
use crate::sandbox::Sandbox;
use crate::store::ImageId;

/// Interval between two checks of busy GPUs. The driver does not report when memory becomes free.
const CHECK_INTERVAL: Duration = Duration::from_millis(500);
/// Limit on the checks of busy GPUs, 15 s in total. The kernel releases a killed job's memory within seconds, when it
/// has destroyed the processes. Memory in use for longer belongs to another program.
const CHECKS_MAX: u32 = 31;

/// Chooses GPUs for the image's job. Returns `None` if GPUs may become free before they are needed.
pub(crate) fn examine(
    context: &RunContext,
    standby: &Standby,
    id: ImageId,
    facts: &CudaFacts,
) -> Result<Option<GpuPlan>, RestoreError> {
    if !cuda::available() {
        return Err(Refusal::NoGpu.into());
    }
    // The driver is loaded here, so that a lack of support is detected early.
    context.driver()?;
    match look(context, standby, id, facts) {
        Err(refusal) if refusal.may_pass() => Ok(None),
        Err(refusal) => Err(refusal.into()),
        Ok(plan) => Ok(Some(plan)),
    }
}

/// Returns the GPUs chosen earlier, or chooses again. Blocks for some seconds while the GPUs are busy.
pub(crate) fn choose(
    context: &RunContext,
    standby: &Standby,
    id: ImageId,
    facts: &CudaFacts,
    found: Option<GpuPlan>,
) -> Result<GpuPlan, Refusal> {
    let chosen = match found {
        Some(plan) => plan,
        None => wait_for(
            || look(context, standby, id, facts),
            || thread::sleep(CHECK_INTERVAL),
        )?,
    };
    if let Some((then, now)) = &chosen.other_driver {
        tracing::warn!(%then, %now, "the image was made with another release of the NVIDIA driver");
    }
    Ok(chosen)
}

fn wait_for(
    mut look: impl FnMut() -> Result<GpuPlan, Refusal>,
    mut pause: impl FnMut(),
) -> Result<GpuPlan, Refusal> {
    for number in 1..CHECKS_MAX {
        match look() {
            Err(refusal) if refusal.may_pass() => {
                if number == 1 {
                    tracing::info!("waiting for the GPUs: {refusal}");
                }
                pause();
            }
            result => return result,
        }
    }
    look()
}

fn look(
    context: &RunContext,
    standby: &Standby,
    id: ImageId,
    facts: &CudaFacts,
) -> Result<GpuPlan, Refusal> {
    let planned = plan_now(context, standby, id, facts);
    if planned.is_err() {
        // The next check must also see GPUs that have reappeared.
        context.nvml.release();
    }
    planned
}

fn plan_now(
    context: &RunContext,
    standby: &Standby,
    id: ImageId,
    facts: &CudaFacts,
) -> Result<GpuPlan, Refusal> {
    let machine = match cuda::inventory() {
        Ok(machine) => machine,
        Err(error) => {
            context.nvml.release();
            tracing::debug!(
                "restoring onto GPUs that cannot be listed: {}",
                chain(&error)
            );
            return Ok(GpuPlan::default());
        }
    };
    let all = || (0..machine.gpus.len()).collect();
    let open: Vec<usize> = visible(&machine, |name| std::env::var(name).ok()).unwrap_or_else(all);
    let here = Here {
        machine: &machine,
        open: &open,
        wanted: context.gpu_map_for(id),
    };
    if standby.fills(id) {
        return plan(&facts.clone().beside_resident(), here);
    }
    plan(facts, here)
}

/// A thread that transfers the image's device memory to the GPUs.
pub(crate) type Coming<'scope, 'image> =
    thread::ScopedJoinHandle<'scope, Result<ResidentRestore<'image>, ResidentError>>;

/// Resumes the GPU state of the restored processes during the transfer of `memory`. All of them are running when this
/// function returns.
pub(crate) fn resume(
    context: &RunContext,
    sandbox: &Arc<Sandbox>,
    facts: &ImageFacts,
    cuda_facts: &CudaFacts,
    gpus: &GpuPlan,
    memory: Option<Coming<'_, '_>>,
) -> Result<(), RestoreError> {
    let root = job::child_with_pid(sandbox.pid(), facts.pids.root)?;
    let there = job::tree(root)?;
    let host_pids = host_pids(&there, &cuda_facts.pids)?;
    let map = map(gpus)?;
    for pair in map.pairs().iter().filter(|pair| pair.old != pair.new) {
        tracing::info!(old = %pair.old, new = %pair.new, "a GPU is replaced by another one");
    }
    let driver = context.driver()?;
    // After an error, the caller kills the job.
    let limit = context.config.snapshot.timeout;
    let mut halted = HaltGroup::restored(&cuda_facts.standing, &there, limit)?.halt()?;
    halted
        .during(LAST_RESORT, || {
            cuda::resume_restored(driver, &host_pids, &map)
        })
        .map_err(|error| RestoreError::Resume(Box::new(error)))?;
    if let Some(memory) = memory {
        let agents = Agents {
            token: facts.token.ok_or(ResidentError::Facts)?,
            sandbox: Arc::clone(sandbox),
        };
        let memory = memory.join().map_err(|_| RestoreError::Panicked)?;
        memory?.finish(&agents, &there, &mut halted)?;
    }
    drop(halted);
    Ok(())
}

/// Converts the plan into the driver's form.
fn map(gpus: &GpuPlan) -> Result<GpuMap, GpuMapError> {
    let pair = |(old, new): &(String, String)| {
        Ok(GpuPair {
            old: old.parse()?,
            new: new.parse()?,
        })
    };
    let pairs: Result<_, GpuMapError> = gpus.map.iter().map(pair).collect();
    GpuMap::new(pairs?)
}

/// Returns the host pids of the image's CUDA processes. All of them must be among the processes `there`, because the
/// state of a missing process is lost.
fn host_pids(there: &[job::Process], pids: &[i32]) -> Result<Vec<i32>, RestoreError> {
    let find = |pid: &i32| {
        let found = there.iter().find(|process| process.pid == *pid);
        let found = found.map(|process| process.host_pid);
        found.ok_or(RestoreError::CudaProcessMissing { pid: *pid })
    };
    pids.iter().map(find).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn full() -> Refusal {
        Refusal::Memory {
            gpu: "a".to_owned(),
            needed: 2,
            free: 1,
        }
    }

    #[test]
    fn gpus_that_become_free_are_waited_for_and_others_are_not() {
        for (full_looks, looks, chosen) in [(0, 1, true), (30, 31, true), (31, 31, false)] {
            let (mut looked, mut paused) = (0, 0);
            let result = wait_for(
                || {
                    looked += 1;
                    if looked > full_looks {
                        Ok(GpuPlan::default())
                    } else {
                        Err(full())
                    }
                },
                || paused += 1,
            );
            assert_eq!((looked, result.is_ok()), (looks, chosen));
            assert_eq!(paused, looks - 1);
        }
        let refused = wait_for(|| Err(Refusal::NoGpu), || panic!("unexpected wait"));
        assert_eq!(refused, Err(Refusal::NoGpu));
    }

    #[test]
    fn a_missing_cuda_process_fails_the_restore() {
        let there = [(4300, 300), (4301, 301)].map(|(host_pid, pid)| job::Process {
            host_pid,
            pid,
            resident: 0,
        });
        assert_eq!(host_pids(&there, &[301]).unwrap(), [4301]);
        let error = host_pids(&there, &[300, 302]).unwrap_err();
        assert!(error.to_string().contains("302"), "{error}");
    }
}
