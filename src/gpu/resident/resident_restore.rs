//! Transfer of device memory from an image to restored processes, on the same GPUs or on others.
//!
//! ```text
//! the same   (criu) copier creates and fills memory ─▶ halt ─▶ resume ─▶ agents map it ─▶ threads continue
//! others     (criu) copier starts ─▶ halt ─▶ resume ─▶ agents create memory ─▶ copier fills it ─▶ threads continue
//! ```
//! A process that the driver has moved to another GPU cannot import memory that others created there (580.159.04: error
//! 3), but others can import memory that it creates. So its threads stay halted while that memory is filled.

use super::copy_lanes::CopyLanes;
use super::error::ResidentError;
use super::image_fingerprints::ImageFingerprints;
use super::kept_memory::KeptMemory;
use super::known_blocks::KnownBlocks;
use super::refill::{Memory, gpus_now, new_gpu, refill};
use super::standby::Standby;
use crate::agent_client::Held;
use crate::cuda::GpuUuid;
use crate::job::Process;
use crate::run::resident_facts::{ResidentFacts, ResidentSegment};
use crate::run::running_job::Agents;
use crate::store::ImageReader;

use super::super::halted::{HaltedProcesses, LAST_RESORT};
use crate::run::gpu_facts::GpuPairs;
use crate::run::run_context::RunContext;

/// Memory for processes that have not been resumed yet.
#[derive(Debug)]
pub(crate) enum ResidentRestore<'a> {
    /// The memory is allocated and filled.
    Made(Memory),
    /// The memory is allocated when the processes are on their new GPUs.
    Moving(Box<GpuMove<'a>>),
}

/// Memory to be allocated later, and the copier that will fill it.
#[derive(Debug)]
pub(crate) struct GpuMove<'a> {
    copy_lanes: CopyLanes,
    image: &'a ImageReader,
    facts: &'a ResidentFacts,
    map: &'a GpuPairs,
    fingerprints: Option<ImageFingerprints>,
    blocks: &'a KnownBlocks,
}

impl<'a> ResidentRestore<'a> {
    /// Performs the steps that do not require the processes.
    ///
    /// # Errors
    /// No memory is left on the GPUs.
    pub fn begin(
        context: &RunContext,
        standby: &'a Standby,
        image: &'a ImageReader,
        facts: &'a ResidentFacts,
        map: &'a GpuPairs,
    ) -> Result<Self, ResidentError> {
        if !facts.moves(map) {
            return Ok(Self::Made(refill(context, standby, image, facts, map)?));
        }
        let gpus = gpus_now(facts, map)?;
        let (copy_lanes, fingerprints) =
            standby.take_to_fill(image, facts, &context.program, &gpus)?;
        Ok(Self::Moving(Box::new(GpuMove {
            copy_lanes,
            image,
            facts,
            map,
            fingerprints,
            blocks: &standby.blocks,
        })))
    }

    /// Returns the memory to those processes that exist. They must be halted and their CUDA calls not blocked.
    ///
    /// # Errors
    /// The job cannot compute.
    pub fn finish(
        self,
        agents: &Agents,
        there: &[Process],
        halted: &mut HaltedProcesses,
    ) -> Result<(), ResidentError> {
        match self {
            Self::Made(memory) => {
                let mut kept = KeptMemory::restored(agents, there, memory)?;
                halted.during(LAST_RESORT, || kept.give_back())
            }
            Self::Moving(gpu_move) => {
                let memory = halted.during(LAST_RESORT, || gpu_move.remake(agents, there))?;
                // Takes as long as the disk does; the job's processes do no work.
                gpu_move.fill(&memory)
            }
        }
    }
}

impl GpuMove<'_> {
    /// Makes all agents allocate their memory. Returns it in the order of the facts.
    fn remake(&self, agents: &Agents, there: &[Process]) -> Result<Vec<Held>, ResidentError> {
        let waiting = self.facts.processes.iter().map(|one| (one.pid, Vec::new()));
        let mut made = KeptMemory::restored(agents, there, waiting.collect())?.remake()?;
        let mut memory = Vec::new();
        for process in &self.facts.processes {
            let held = made.remove(&process.pid).unwrap_or_default();
            let place = |held: &Held| (held.segment.address, held.segment.len);
            let wanted = |segment: &ResidentSegment| (segment.address, segment.len);
            if !held
                .iter()
                .map(place)
                .eq(process.segments.iter().map(wanted))
            {
                return Err(ResidentError::Facts);
            }
            memory.extend(held);
        }
        Ok(memory)
    }

    fn fill(&self, memory: &[Held]) -> Result<(), ResidentError> {
        let gpu = |segment: &ResidentSegment| new_gpu(self.map, &segment.gpu);
        let gpus: Option<Vec<GpuUuid>> = self.facts.segments().map(gpu).collect();
        let gpus = gpus.ok_or(ResidentError::Facts)?;
        let segments = self.copy_lanes.import(gpus.into_iter().zip(memory))?;
        let Self {
            facts,
            image,
            fingerprints,
            blocks,
            ..
        } = self;
        let fingerprints = fingerprints.as_ref();
        let found = self
            .copy_lanes
            .fill(facts, &segments, image, fingerprints)?;
        blocks.keep(image.manifest().id, &found);
        Ok(())
    }
}
