//! The job's CUDA processes: their discovery, their properties and their suspend for a snapshot.

use std::time::Duration;

use super::error::GpuError;
use super::halted::{HaltGroup, HaltGroupError};
use super::resident::{ResidentPlan, ResidentTransfer, driver_suffices};
use super::suspended::SuspendedJob;
use super::unsupported::{self, CudaUser, FABRIC_DEVICES, Neighbour};
use crate::agent_client;
use crate::cuda::{self, GpuUse, GpuUuid, Inventory};
use crate::job::{self, Process, variable};
use crate::run::environment::STORE_VARIABLE;
use crate::run::gpu_facts::{CudaFacts, visible};
use crate::run::image_facts::Stopwatch;
use crate::run::machine;
use crate::run::run_context::RunContext;
use crate::run::running_job::Job;
use crate::store::StreamOpener;

/// Longest attempt to lock all CUDA processes at once; after that all are released and the lock is retried.
const LOCK_ATTEMPT: Duration = Duration::from_millis(400);
/// Path prefix of the driver's device files.
const DEVICES: &str = "/dev/nvidia";
/// File name prefix of NCCL's library, for all its versions.
const NCCL_LIBRARY: &str = "libnccl.so";

/// The job's CUDA processes.
pub(crate) struct Gpu<'a> {
    driver: &'a cuda::Driver,
    /// The processes; `users` holds their host pids.
    processes: Vec<Process>,
    users: Vec<i32>,
    /// The job's device memory in bytes. If the driver does not report it for each process, all memory in use.
    pub bytes: u64,
    is_told: bool,
    /// GPU facts for the image; no pids yet.
    pub facts: CudaFacts,
}

impl<'a> Gpu<'a> {
    /// Finds the CUDA processes; there are none on a machine without a driver. A driver that cannot suspend them is an
    /// error only if there are CUDA processes, and so is state that could not be restored.
    pub fn of(context: &'a RunContext, processes: &[Process]) -> Result<Option<Self>, GpuError> {
        if !cuda::available() {
            return Ok(None);
        }
        let holds = |process: &&Process| job::has_open(process.host_pid, DEVICES);
        let holders: Vec<Process> = processes.iter().filter(holds).copied().collect();
        // The driver answers a query about a stopped process only after that process continues (580.159.04).
        if let Some(pid) = job::first_stopped(&holders) {
            return Err(GpuError::Stopped { pid });
        }
        let driver = match context.driver() {
            Ok(driver) => driver,
            Err(error) if !holders.is_empty() => return Err(error.into()),
            Err(error) => {
                tracing::debug!(%error, "CUDA processes cannot be suspended, but there are none");
                return Ok(None);
            }
        };
        let pids: Vec<i32> = processes.iter().map(|process| process.host_pid).collect();
        let users = cuda::find(driver, &pids);
        if users.is_empty() {
            return Ok(None);
        }
        context.nvml.keep();
        let gpus = context.gpus();
        let all = cuda::uses().unwrap_or_default();
        let (uses, others): (Vec<GpuUse>, Vec<GpuUse>) =
            all.into_iter().partition(|one| users.contains(&one.pid));
        let describe = |pid: &i32| describe(*pid, &uses, &gpus);
        let described: Vec<CudaUser> = users.iter().map(describe).collect();
        let split = gpus.gpus.iter().filter(|gpu| gpu.mig == Some(true));
        let split: Vec<String> = split.map(|gpu| gpu.uuid.clone()).collect();
        let machine_gpus = gpus.gpus.len();
        unsupported::check(&described, machine_gpus, &split)?;
        unsupported::check_neighbours(&described, machine_gpus, || {
            neighbours(others, &context.store.path().to_string_lossy())
        })?;
        let environments: Vec<Vec<u8>> =
            described.into_iter().map(|user| user.environment).collect();
        let told = memory_of(&users, &uses);
        Ok(Some(Self {
            driver,
            bytes: told.unwrap_or_else(machine::gpu_memory_in_use),
            is_told: told.is_some(),
            facts: CudaFacts::of(&gpus, &uses, &environments),
            processes: processes
                .iter()
                .filter(|process| users.contains(&process.host_pid))
                .copied()
                .collect(),
            users,
        }))
    }

    /// Returns the host pids of the processes.
    pub fn users(&self) -> &[i32] {
        &self.users
    }

    /// Returns the processes with all their pids.
    pub fn processes(&self) -> &[Process] {
        &self.processes
    }

    /// Adds memory of the processes that the driver did not report.
    pub fn add(&mut self, more: impl Iterator<Item = (GpuUuid, u64)>) {
        for (uuid, bytes) in more {
            if self.is_told {
                self.bytes = self.bytes.saturating_add(bytes);
            }
            self.facts.add(uuid, bytes);
        }
    }

    /// Returns the driver through which the processes were found.
    pub fn driver(&self) -> &cuda::Driver {
        self.driver
    }

    /// Suspends the GPU state. Resident memory stays on the GPUs and is written into `streams` if it cannot wait; the
    /// rest moves into host memory.
    pub fn suspend(
        &self,
        context: &RunContext,
        job: &Job,
        resident_plan: Option<&ResidentPlan>,
        streams: &StreamOpener,
        watch: &mut Stopwatch,
    ) -> Result<(SuspendedJob, Option<ResidentTransfer>), GpuError> {
        let suspended = self
            .halt_group(context, resident_plan)
            .and_then(|halt_group| {
                let options = cuda::SuspendOptions {
                    attempt: LOCK_ATTEMPT,
                    total: context.config.snapshot.lock_timeout,
                };
                match resident_plan {
                    Some(plan) => self.suspend_resident(plan, halt_group, &options, streams, watch),
                    None => self.suspend_by_driver(job, halt_group, &options, watch),
                }
            });
        suspended.map_err(|error| {
            let ended = |process: &&Process| !job::is_alive(process.host_pid);
            let ended: Vec<&Process> = self.processes.iter().filter(ended).collect();
            let all = ended.len() == self.processes.len();
            match ended.first() {
                // The state of the exited processes is gone with them, and the others were undone: the next attempt
                // finds the remaining processes.
                Some(process) if all || !error.job_is_lost() => {
                    GpuError::Leaving { pid: process.pid }
                }
                Some(_) | None => error,
            }
        })
    }

    fn suspend_resident(
        &self,
        plan: &ResidentPlan,
        halt_group: HaltGroup,
        options: &cuda::SuspendOptions,
        streams: &StreamOpener,
        watch: &mut Stopwatch,
    ) -> Result<(SuspendedJob, Option<ResidentTransfer>), GpuError> {
        let (suspended, halted, kept, transfer) =
            plan.suspend(self, &halt_group, options, streams, watch)?;
        let suspended_job = SuspendedJob::new(suspended, halt_group, halted, Some(kept));
        Ok((suspended_job, Some(transfer)))
    }

    fn suspend_by_driver(
        &self,
        job: &Job,
        halt_group: HaltGroup,
        options: &cuda::SuspendOptions,
        watch: &mut Stopwatch,
    ) -> Result<(SuspendedJob, Option<ResidentTransfer>), GpuError> {
        let failed = |error| GpuError::Suspend(Box::new(error));
        let locked = cuda::lock_all(self.driver, &self.users, options).map_err(failed)?;
        watch.lap("lock");
        if let Some(agents) = job.agents() {
            driver_suffices(&agents, self)?;
        }
        let mut halted = halt_group.halt_outside_driver()?;
        let suspended = halted.during(Duration::ZERO, || locked.suspend());
        let suspended = suspended.map_err(failed)?;
        watch.lap("suspend");
        Ok((SuspendedJob::new(suspended, halt_group, halted, None), None))
    }

    /// Returns the group of all CUDA processes: they may wait for each other on the GPUs.
    fn halt_group(
        &self,
        context: &RunContext,
        resident_plan: Option<&ResidentPlan>,
    ) -> Result<HaltGroup, GpuError> {
        let agent = |process: &Process| resident_plan?.agent_of(process.host_pid);
        let limit = context.config.snapshot.timeout;
        match HaltGroup::of(self.driver, &self.processes, limit, agent) {
            Ok(halt_group) => Ok(halt_group),
            // Inside `cuInit` a process counts as running, but the driver has no restore thread in it yet (580.159.04).
            Err(HaltGroupError::Driver(error)) if error.code.is_not_initialized() => {
                let user = self.processes.iter().find(|one| one.host_pid == error.pid);
                let pid = user.map_or(error.pid, |user| user.pid);
                Err(GpuError::Device { pid })
            }
            Err(HaltGroupError::Driver(error)) => Err(GpuError::Suspend(Box::new(error.into()))),
            Err(HaltGroupError::Threads(error)) => Err(error.into()),
        }
    }
}

/// Returns the processes' device memory in bytes; `None` if the driver does not report it for each of them.
fn memory_of(users: &[i32], uses: &[GpuUse]) -> Option<u64> {
    let told = |pid: &i32| {
        let mut own = uses.iter().filter(|one| one.pid == *pid).peekable();
        own.peek()?;
        own.map(|one| one.bytes).sum::<Option<u64>>()
    };
    users.iter().map(told).sum()
}

/// Reads from `/proc` the facts by which unsupported processes are recognised. Unreadable facts count as absent.
fn describe(pid: i32, uses: &[GpuUse], machine: &Inventory) -> CudaUser {
    let own = || uses.iter().filter(|one| one.pid == pid);
    let environment = job::environment(pid);
    CudaUser {
        pid,
        nccl: job::has_mapped(pid, NCCL_LIBRARY),
        agent: variable(&environment, agent_client::TOKEN_VARIABLE).is_some()
            && job::has_mapped(pid, agent_client::LIBRARY_PREFIX),
        gpus: gpus_of(own(), &environment, machine),
        environment,
        through_mps: own().any(|one| one.through_mps),
        fabric: job::has_open(pid, FABRIC_DEVICES),
    }
}

/// Returns the processes that belong to other runs than the one with store `own`. Processes of other containers may be
/// invisible.
fn neighbours(uses: Vec<GpuUse>, own: &str) -> Vec<Neighbour> {
    let neighbour = |one: GpuUse| {
        let store = variable(&job::environment(one.pid), STORE_VARIABLE)?;
        (store != own).then(|| Neighbour {
            store,
            nccl: job::has_mapped(one.pid, NCCL_LIBRARY),
            gpu: one.uuid,
        })
    };
    uses.into_iter().filter_map(neighbour).collect()
}

/// Returns the UUIDs of the GPUs that a process computes on. A process that has just started or was just resumed is not
/// on the driver's list yet: it may compute on all GPUs visible to it. Empty if these cannot be determined either.
fn gpus_of<'a>(
    uses: impl Iterator<Item = &'a GpuUse>,
    environment: &[u8],
    machine: &Inventory,
) -> Vec<String> {
    let told: Vec<String> = uses.map(|one| one.uuid.clone()).collect();
    if !told.is_empty() {
        return told;
    }
    let seen = visible(machine, |name| variable(environment, name)).unwrap_or_default();
    let uuid = |place: usize| machine.gpus[place].uuid.clone();
    seen.into_iter().map(uuid).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::Gpu;

    #[test]
    fn unlisted_process_counts_for_all_visible_gpus() {
        let gpu = |uuid: &str| Gpu {
            index: 0,
            name: String::new(),
            uuid: uuid.to_owned(),
            memory: None,
            persistent: None,
            mig: None,
            mode: None,
            busy: None,
        };
        let machine = Inventory {
            driver: None,
            gpus: vec![gpu("a"), gpu("b")],
        };
        let listed = [used(1, None)];
        let gpus =
            |uses: &[GpuUse], environment: &[u8]| gpus_of(uses.iter(), environment, &machine);
        assert_eq!(gpus(&listed, b""), ["a"]);
        assert_eq!(gpus(&[], b"CUDA_VISIBLE_DEVICES=1\0"), ["b"]);
        assert_eq!(gpus(&[], b"HOME=/\0"), ["a", "b"]);
        assert!(gpus(&[], b"CUDA_VISIBLE_DEVICES=MIG-1\0").is_empty());
    }

    fn used(pid: i32, bytes: Option<u64>) -> GpuUse {
        GpuUse {
            pid,
            uuid: "a".to_owned(),
            bytes,
            through_mps: false,
        }
    }

    #[test]
    fn memory_is_known_only_if_known_for_every_process() {
        let uses = [
            used(1, Some(5)),
            used(1, Some(6)),
            used(2, Some(7)),
            used(3, None),
        ];
        assert_eq!(memory_of(&[1, 2], &uses), Some(18));
        assert_eq!(memory_of(&[1, 3], &uses), None);
        assert_eq!(memory_of(&[1, 4], &uses), None);
    }
}
