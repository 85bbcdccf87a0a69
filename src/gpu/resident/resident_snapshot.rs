//! Resident memory in a snapshot: the plan, made before the job is frozen, and the transfer into the image.

use std::sync::Arc;

use super::copy_lanes::{CopyLanes, Shadowed, TakeOver, TakenMemory};
use super::error::ResidentError;
use super::kept_memory::{self, KeptMemory};
use super::known_blocks::Changes;
use super::memory_usage::{MemoryUsage, shadows};
use super::policy::{Cover, Purpose, Way, bytes, choose, expect_no_newcomer};
use super::standby::Standby;
use super::suspend::{ResidentProcesses, suspend};
use crate::agent_client::{Channel, Token};
use crate::config::Memory;
use crate::cuda::{self, GpuUuid, SuspendOptions};
use crate::run::running_job::Agents;

use super::super::error::GpuError;
use super::super::halted::{HaltGroup, HaltedProcesses};
use super::super::processes::Gpu;
use crate::run::format::chain;
use crate::run::image_facts::Stopwatch;
use crate::run::machine;
use crate::run::run_context::RunContext;
use crate::store::StreamOpener;

/// Memory that a snapshot keeps on the GPUs, and a copier for it.
#[derive(Debug)]
pub(crate) struct ResidentPlan {
    agents: Agents,
    covers: Vec<Cover>,
    copy_lanes: Arc<CopyLanes>,
    /// Bytes of device memory that stay on the GPUs.
    bytes: u64,
    /// Bytes of GPU memory available for shadows.
    room: u64,
    changes: Arc<Changes>,
}

/// Transfer of kept memory into the image.
#[derive(Debug)]
pub(crate) struct ResidentTransfer {
    copy_lanes: Arc<CopyLanes>,
    streams: StreamOpener,
    changes: Arc<Changes>,
    taking: Option<TakeOver>,
    taken: Option<TakenMemory>,
}

/// Options of [`ResidentPlan::prepare`].
#[derive(Clone, Copy)]
pub(crate) struct PlanOptions<'a> {
    pub context: &'a RunContext,
    pub standby: &'a Standby,
    pub agents: &'a Agents,
    /// Processes on other GPUs than their agents know.
    pub moved: &'a [i32],
    pub purpose: Purpose,
    /// The error of an earlier attempt.
    pub despite: Option<&'a ResidentError>,
}

impl ResidentPlan {
    /// Decides and prepares; returns `None` if the driver suspends all memory. Adds facts about the memory per GPU to
    /// `gpu`.
    pub fn prepare(
        gpu: &mut Gpu<'_>,
        options: PlanOptions<'_>,
    ) -> Result<Option<Self>, ResidentError> {
        let PlanOptions {
            context,
            standby,
            agents,
            moved,
            purpose,
            despite,
        } = options;
        let wanted = context.config.cuda.memory;
        let now = despite.map_or(wanted, |_| Memory::Driver);
        let mut channel = agents.channel()?;
        let mut covers = ask(&mut channel, &agents.token, gpu)?;
        for cover in &mut covers {
            cover.know(moved);
        }
        let held = MemoryUsage::ask(&mut channel, &agents.token, &covers);
        gpu.add(held.iter().flat_map(MemoryUsage::imported));
        let covers = match choose(now, purpose, machine::descriptors(), covers)? {
            Way::Resident(covers) => covers,
            Way::Driver(reason) => {
                let failure = despite.map(|error| chain(error));
                log_reason(wanted, failure.or(reason.map(str::to_owned)));
                return Ok(None);
            }
        };
        let bound = covers.iter().any(Cover::is_bound);
        let covered = bytes(&covers);
        let shadows = shadows(held.as_ref(), &gpu.facts.gpus, covered);
        match start_carrier(context, standby, &shadows) {
            Ok((copy_lanes, room)) => Ok(Some(Self {
                agents: agents.clone(),
                covers,
                bytes: held.map_or(covered, |held| held.bytes()),
                room,
                changes: Arc::new(standby.blocks.changes(&context.store, copy_lanes.keys())),
                copy_lanes: Arc::new(copy_lanes),
            })),
            Err(error) if bound => Err(error),
            Err(error) => {
                log_reason(wanted, Some(chain(&error)));
                Ok(None)
            }
        }
    }

    /// Returns the bytes of device memory that stay on the GPUs.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Returns the maximum number of bytes that are read while the job is frozen.
    pub fn bytes_without_shadow(&self) -> u64 {
        self.bytes().saturating_sub(self.room)
    }

    /// Returns an estimate of these bytes: blocks that are the same as in the newest image are not read.
    pub fn bytes_expected_without_shadow(&self) -> u64 {
        self.changes.expected_of(self.bytes_without_shadow())
    }

    /// Returns true if another attempt without resident memory may avoid this error.
    pub fn is_avoidable(&self, error: &ResidentError) -> bool {
        error.driver_may() && !self.covers.iter().any(Cover::is_bound)
    }

    /// Returns the id of the agent's thread in a CUDA process.
    pub fn agent_of(&self, host_pid: i32) -> Option<i32> {
        let cover = self
            .covers
            .iter()
            .find(|cover| cover.host_pid == host_pid)?;
        cover.hello.as_ref().map(|hello| hello.thread)
    }

    /// Suspends the job's GPU state; the job is frozen afterwards.
    pub fn suspend(
        &self,
        gpu: &Gpu<'_>,
        halt_group: &HaltGroup,
        options: &SuspendOptions,
        streams: &StreamOpener,
        watch: &mut Stopwatch,
    ) -> Result<
        (
            cuda::Suspended,
            HaltedProcesses,
            KeptMemory,
            ResidentTransfer,
        ),
        ResidentError,
    > {
        let take = |kept: &_| self.copy_lanes.take(kept, streams, &self.changes);
        let processes = ResidentProcesses {
            driver: gpu.driver(),
            users: gpu.users(),
            agents: &self.agents,
            covers: &self.covers,
        };
        let (suspended, halted, kept, taking) =
            suspend(processes, halt_group, options, watch, take)?;
        let transfer = ResidentTransfer {
            copy_lanes: Arc::clone(&self.copy_lanes),
            streams: streams.clone(),
            changes: Arc::clone(&self.changes),
            taking: Some(taking),
            taken: None,
        };
        Ok((suspended, halted, kept, transfer))
    }
}

/// Checks that the earlier decision is still valid: the driver alone can suspend the job, whose processes are locked.
///
/// # Errors
/// Memory would be lost.
pub(crate) fn driver_suffices(agents: &Agents, gpu: &Gpu<'_>) -> Result<(), ResidentError> {
    let now = ask(&mut agents.channel()?, &agents.token, gpu)?;
    expect_no_newcomer(&now, |_| false)
}

/// Queries the agents of all CUDA processes.
fn ask(channel: &mut Channel, token: &Token, gpu: &Gpu<'_>) -> Result<Vec<Cover>, ResidentError> {
    let processes = gpu.processes().iter();
    let pids = processes.map(|process| (process.host_pid, process.pid));
    kept_memory::ask(channel, token, gpu.driver(), pids)
}

fn start_carrier(
    context: &RunContext,
    standby: &Standby,
    shadows: &[(GpuUuid, u64)],
) -> Result<(CopyLanes, u64), ResidentError> {
    let gpus: Vec<GpuUuid> = shadows.iter().map(|(gpu, _)| *gpu).collect();
    let copy_lanes = standby.take(&context.program, &gpus)?;
    let room = copy_lanes.make_room(shadows)?;
    Ok((copy_lanes, room))
}

/// Logs the reason why the driver suspends all memory.
fn log_reason(wanted: Memory, reason: Option<String>) {
    match (wanted, reason) {
        (Memory::Driver, _) | (_, None) => {}
        (Memory::Resident, Some(reason)) => {
            tracing::warn!("the driver copies GPU memory through host memory: {reason}");
        }
        (Memory::Auto, Some(reason)) => {
            tracing::info!("the driver copies GPU memory through host memory: {reason}");
        }
    }
}

impl ResidentTransfer {
    /// Waits until the memory without a shadow is in the image. The job is frozen.
    pub fn while_frozen(&mut self) -> Result<(), GpuError> {
        if let Some(taking) = self.taking.take() {
            let taken = taking.join().map_err(|_| ResidentError::Panicked)?;
            self.taken = Some(taken?);
        }
        Ok(())
    }

    /// Copies the rest into the image; afterwards no memory of ckpt-run is left on the GPUs. Returns what is known of
    /// the memory in the image.
    pub fn afterwards(self) -> Result<Arc<Changes>, GpuError> {
        let Self {
            copy_lanes,
            streams,
            changes,
            taken,
            ..
        } = self;
        if let Some(taken) = &taken {
            copy_lanes.drain(taken, Shadowed::Yes, &streams, &changes)?;
            taken.write_fingerprints(&streams, &changes)?;
        }
        Ok(changes)
    }
}
