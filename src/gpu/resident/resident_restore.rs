//! Device memory of an image on its way to restored processes: the same GPUs as before, or others.
//!
//! ```text
//! the same   (criu) copier makes and fills memory ─▶ halt ─▶ resume ─▶ agents map it ─▶ threads go on
//! others     (criu) copier starts ─▶ halt ─▶ resume ─▶ agents make memory ─▶ copier fills it ─▶ threads go on
//! ```
//! A process that the driver has moved to another GPU cannot import memory that others made there (580.159.04: error
//! 3), but others can import what it makes itself. So the threads stand still while that is filled.

use super::copy_lanes::CopyLanes;
use super::error::ResidentError;
use super::kept_memory::KeptMemory;
use super::refill::{Memory, gpus_now, new_gpu, refill};
use super::standby::Standby;
use crate::agent_client::{Held, Token};
use crate::cuda::GpuUuid;
use crate::job::Process;
use crate::run::resident_facts::{ResidentFacts, ResidentSegment};
use crate::store::ImageReader;

use super::super::halted::{HaltedProcesses, LAST_RESORT};
use crate::run::gpu_facts::GpuPairs;
use crate::run::run_context::RunContext;

/// Memory that waits for its processes to be resumed.
#[derive(Debug)]
pub(crate) enum ResidentRestore<'a> {
    /// The memory is allocated and filled.
    Made(Memory),
    /// The memory is allocated when the processes are on their new GPUs.
    Moving(GpuMove<'a>),
}

/// Memory that is allocated later, and the copier that fills it then.
#[derive(Debug)]
pub(crate) struct GpuMove<'a> {
    copy_lanes: CopyLanes,
    image: &'a ImageReader,
    facts: &'a ResidentFacts,
    map: &'a GpuPairs,
}

impl<'a> ResidentRestore<'a> {
    /// Does what can be done before the processes are there.
    ///
    /// # Errors
    /// Nothing is left on the GPUs.
    pub fn begin(
        context: &RunContext,
        standby: &Standby,
        image: &'a ImageReader,
        facts: &'a ResidentFacts,
        map: &'a GpuPairs,
    ) -> Result<Self, ResidentError> {
        if !facts.moves(map) {
            return Ok(Self::Made(refill(context, standby, image, facts, map)?));
        }
        let gpus = gpus_now(facts, map)?;
        Ok(Self::Moving(GpuMove {
            copy_lanes: standby.take(&context.program, &gpus)?,
            image,
            facts,
            map,
        }))
    }

    /// Gives the processes, which are among those that are there, their memory. They are halted, and their calls to CUDA do
    /// not wait.
    ///
    /// # Errors
    /// The job cannot compute.
    pub fn finish(
        self,
        token: &Token,
        there: &[Process],
        halted: &mut HaltedProcesses,
    ) -> Result<(), ResidentError> {
        match self {
            Self::Made(memory) => {
                let mut kept = KeptMemory::restored(token, there, memory)?;
                halted.during(LAST_RESORT, || kept.give_back())
            }
            Self::Moving(gpu_move) => {
                let memory = halted.during(LAST_RESORT, || gpu_move.remake(token, there))?;
                // As long as the disk takes, and no work of the job's processes.
                gpu_move.fill(&memory)
            }
        }
    }
}

impl GpuMove<'_> {
    /// Makes all agents allocate their memory. Returns it in the order of the facts.
    fn remake(&self, token: &Token, there: &[Process]) -> Result<Vec<Held>, ResidentError> {
        let waiting = self.facts.processes.iter().map(|one| (one.pid, Vec::new()));
        let mut made = KeptMemory::restored(token, there, waiting.collect())?.remake()?;
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
        self.copy_lanes.fill(self.facts, &segments, self.image)
    }
}
