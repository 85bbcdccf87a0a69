//! Resident memory in a snapshot: the plan, made before the job is frozen, and the transfer into the image.

use std::sync::Arc;

use super::copy_lanes::{CopyLanes, Shadowed, TakeOver, TakenMemory};
use super::error::ResidentError;
use super::kept_memory::{self, KeptMemory};
use super::memory_usage::{MemoryUsage, shadows};
use super::policy::{Cover, Way, bytes, choose, expect_no_newcomer};
use super::standby::Standby;
use super::suspend::suspend;
use crate::agent_client::{Channel, Token};
use crate::config::Memory;
use crate::cuda::{self, GpuUuid, SuspendOptions};

use super::super::error::GpuError;
use super::super::halted::{HaltGroup, HaltedProcesses};
use super::super::processes::Gpu;
use crate::run::format::chain;
use crate::run::image_facts::Stopwatch;
use crate::run::machine;
use crate::run::run_context::RunContext;
use crate::store::StreamOpener;

/// The memory that a snapshot keeps on the GPUs, and a copier that is ready for it.
#[derive(Debug)]
pub(crate) struct ResidentPlan {
    token: Token,
    covers: Vec<Cover>,
    copy_lanes: Arc<CopyLanes>,
    /// Device memory that stays where it is, bytes.
    bytes: u64,
    /// Room on the GPUs for a shadow of it, bytes.
    room: u64,
}

/// Kept memory on its way into the image.
#[derive(Debug)]
pub(crate) struct ResidentTransfer {
    copy_lanes: Arc<CopyLanes>,
    streams: StreamOpener,
    taking: Option<TakeOver>,
    taken: Option<TakenMemory>,
}

impl ResidentPlan {
    /// Decides and prepares; `None` when the driver does it all. What the job has on which GPU is known better then.
    /// `moved` processes are on other GPUs than their agents
    /// know; `to_host` for a pause; `despite` what failed before.
    pub fn prepare(
        (context, standby): (&RunContext, &Standby),
        (token, moved): (&Token, &[i32]),
        gpu: &mut Gpu<'_>,
        to_host: bool,
        despite: Option<&ResidentError>,
    ) -> Result<Option<Self>, ResidentError> {
        let wanted = context.config.cuda.memory;
        let now = despite.map_or(wanted, |_| Memory::Driver);
        let mut channel = Channel::bind()?;
        let mut covers = ask(&mut channel, token, gpu)?;
        for cover in &mut covers {
            cover.know(moved);
        }
        let held = MemoryUsage::ask(&mut channel, token, &covers);
        gpu.add(held.iter().flat_map(MemoryUsage::imported));
        let covers = match choose(now, to_host, machine::descriptors(), covers)? {
            Way::Resident(covers) => covers,
            Way::Driver(reason) => {
                let failure = despite.map(|error| chain(error));
                say(wanted, failure.or(reason.map(str::to_owned)));
                return Ok(None);
            }
        };
        let bound = covers.iter().any(Cover::is_bound);
        let covered = bytes(&covers);
        let shadows = shadows(held.as_ref(), &gpu.facts.gpus, covered);
        match start_carrier(context, standby, &shadows) {
            Ok((copy_lanes, room)) => Ok(Some(Self {
                token: *token,
                covers,
                copy_lanes: Arc::new(copy_lanes),
                bytes: held.map_or(covered, |held| held.bytes()),
                room,
            })),
            Err(error) if bound => Err(error),
            Err(error) => {
                say(wanted, Some(chain(&error)));
                Ok(None)
            }
        }
    }

    /// Device memory that stays where it is, bytes.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Returns an estimate of the bytes that are read while the job is frozen.
    pub fn bytes_without_shadow(&self) -> u64 {
        self.bytes().saturating_sub(self.room)
    }

    /// Returns true if a snapshot with this failure may go the driver's way.
    pub fn is_avoidable(&self, error: &ResidentError) -> bool {
        error.driver_may() && !self.covers.iter().any(Cover::is_bound)
    }

    /// Returns the thread of the agent of a CUDA process.
    pub fn agent_of(&self, host_pid: i32) -> Option<i32> {
        let cover = self
            .covers
            .iter()
            .find(|cover| cover.host_pid == host_pid)?;
        cover.hello.as_ref().map(|hello| hello.thread)
    }

    /// Suspends the job's GPU state; it stands still then.
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
        let who = (&self.token, &self.covers[..]);
        let take = |kept: &_| self.copy_lanes.take(kept, streams);
        let (driver, users) = (gpu.driver(), gpu.users());
        let (suspended, halted, kept, taking) =
            suspend(driver, users, halt_group, who, options, watch, take)?;
        let transfer = ResidentTransfer {
            copy_lanes: Arc::clone(&self.copy_lanes),
            streams: streams.clone(),
            taking: Some(taking),
            taken: None,
        };
        Ok((suspended, halted, kept, transfer))
    }
}

/// Checks that the driver alone can still suspend the job, whose processes are locked, as was decided before.
///
/// # Errors
/// Memory would be lost.
pub(crate) fn driver_suffices(token: &Token, gpu: &Gpu<'_>) -> Result<(), ResidentError> {
    expect_no_newcomer(&ask(&mut Channel::bind()?, token, gpu)?, |_| false)
}

/// Asks every CUDA process for its agent.
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

/// Says why the driver does it all.
fn say(wanted: Memory, reason: Option<String>) {
    match (wanted, reason) {
        (Memory::Driver, _) | (_, None) => {}
        (Memory::Resident, Some(reason)) => {
            tracing::warn!("GPU memory goes the driver's way: {reason}");
        }
        (Memory::Auto, Some(reason)) => {
            tracing::info!("GPU memory goes the driver's way: {reason}");
        }
    }
}

impl ResidentTransfer {
    /// Waits until what has no shadow is in the image. The job stands still.
    pub fn while_frozen(&mut self) -> Result<(), GpuError> {
        if let Some(taking) = self.taking.take() {
            let taken = taking.join().map_err(|_| ResidentError::Panicked)?;
            self.taken = Some(taken?);
        }
        Ok(())
    }

    /// Takes the rest into the image; then nothing of ours is left on the GPUs.
    pub fn afterwards(self) -> Result<(), GpuError> {
        match &self.taken {
            Some(taken) => self.copy_lanes.drain(taken, Shadowed::Yes, &self.streams),
            None => Ok(()),
        }
    }
}
