//! Device memory of an image whose job comes back on other GPUs.
//!
//! ```text
//! halt ─▶ resume (driver, other GPUs) ─▶ agents make memory ─▶ copier fills it from the image ─▶ threads go on
//! ```
//! A process that was moved cannot import memory that others made there (580.159.04: error 3), but what it makes
//! itself others can. So nothing is made before, and the threads stand still while the image is read.

use std::collections::BTreeMap;

use super::carrier::Carrier;
use super::error::ResidentError;
use super::facts::{ResidentFacts, ResidentSegment};
use super::keep::Kept;
use super::refill::{gpus_now, new_gpu, read};
use crate::cuda::{self, Driver, GpuMap, GpuUuid};
use crate::job::Process;
use crate::resident::{Held, Token};
use crate::store::ImageReader;

use super::super::gpu_plan::GpuPairs;
use super::super::workshop::Workshop;

/// What comes back, and where.
#[derive(Clone, Copy, Debug)]
pub(in crate::supervisor) struct Moved<'a> {
    pub image: &'a ImageReader,
    pub facts: &'a ResidentFacts,
    pub map: &'a GpuPairs,
}

impl<'a> Moved<'a> {
    /// `None` when all memory comes back where it was.
    pub fn of(image: &'a ImageReader, facts: &'a ResidentFacts, map: &'a GpuPairs) -> Option<Self> {
        let moves = |(old, new): &(String, String)| {
            old != new && facts.segments().any(|segment| segment.gpu == *old)
        };
        map.iter().any(moves).then_some(Self { image, facts, map })
    }

    /// Resumes the restored processes, and brings their memory back.
    ///
    /// # Errors
    /// The job cannot compute.
    pub fn resume(
        self,
        shop: &Workshop,
        driver: &Driver,
        (pids, map): (&[i32], &GpuMap),
        (token, there): (&Token, &[Process]),
    ) -> Result<(), ResidentError> {
        if !self.facts.is_sane() {
            return Err(ResidentError::Facts);
        }
        let gpus = gpus_now(self.facts, self.map)?;
        let carrier = Carrier::start(&shop.program, &gpus)?;
        let none = |pid: i32| (pid, Vec::new());
        let waiting = self.facts.processes.iter().map(|one| none(one.pid));
        let mut kept = Kept::restored(driver, token, there, waiting.collect())?;
        // On every error the caller ends the job.
        let halted = kept.halt()?;
        cuda::resume_restored(driver, pids, map)?;
        let memory = self.remake(&mut kept)?;
        self.fill(&carrier, &memory)?;
        drop(halted);
        Ok(())
    }

    /// All agents make their memory; in the order of the facts.
    fn remake(self, kept: &mut Kept) -> Result<Vec<Held>, ResidentError> {
        let mut made: BTreeMap<i32, Vec<Held>> = kept.remake()?;
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

    fn fill(self, carrier: &Carrier, memory: &[Held]) -> Result<(), ResidentError> {
        let gpu = |segment: &ResidentSegment| new_gpu(self.map, &segment.gpu);
        let gpus: Option<Vec<GpuUuid>> = self.facts.segments().map(gpu).collect();
        let gpus = gpus.ok_or(ResidentError::Facts)?;
        let segments = carrier.import(gpus.into_iter().zip(memory))?;
        carrier.fill(self.facts, &segments, |name, pipe| {
            read(self.image, name, pipe)
        })
    }
}
