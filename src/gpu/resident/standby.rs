//! Copiers started in advance, so that no snapshot or restore waits for their start.
//!
//! ```text
//! warm (CUDA initialized, no GPU used) ─▶ prepare, after a crash of the job: contexts, memory ─▶ take
//!                                               └────── take, for a snapshot ──────────────────▶
//! ```
//! The initialization of CUDA takes 0.2 s and 20 MiB of host memory; a context takes 0.1 s and some hundred MiB of GPU
//! memory. A crashed job takes about as long to exit, and occupies GPU memory until then. If there is enough room
//! beside it, the memory of the image is filled meanwhile.

use std::path::Path;
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};

use super::copy_lanes::CopyLanes;
use super::error::ResidentError;
use super::image_fingerprints::ImageFingerprints;
use super::known_blocks::KnownBlocks;
use super::refill::{FilledMemory, fill, gpus_now};
use crate::copier::{Copier, CopierError};
use crate::cuda::GpuUuid;
use crate::run::gpu_facts::GpuFacts;
use crate::run::image_facts::ImageFacts;
use crate::run::resident_facts::ResidentFacts;
use crate::run::run_context::RunContext;
use crate::store::{ImageId, ImageReader};
use crate::sync::locked;

/// Prepared copiers, at most one of each kind.
#[derive(Debug, Default)]
pub(crate) struct Standby {
    warm: Slot<Copier>,
    /// Copier or memory for the next restore. It is taken soon or dismissed, because it uses GPU memory.
    ready: Slot<Ready>,
    /// Image whose memory is being filled or filled.
    filled: Mutex<Filled>,
    /// Blocks of device memory in the image that was committed or restored last.
    pub blocks: KnownBlocks,
}

/// Image being filled, set by the filling thread as long as a restore waits for that thread.
type Filled = Arc<Mutex<Option<ImageId>>>;

/// Prepared resource for a restore.
#[derive(Debug)]
pub(crate) enum Ready {
    /// Copier with contexts, and the image's fingerprints.
    Copier(CopyLanes, Option<ImageFingerprints>),
    /// Memory of an image, filled, on its former GPUs.
    Memory(FilledMemory),
}

/// Thread with the present or finished preparation; `None` if it failed or was not requested.
type Slot<T> = Mutex<Option<JoinHandle<Option<T>>>>;

impl Standby {
    /// Starts a copier and initializes CUDA in it, for the next snapshot or restore.
    pub fn warm(&self, program: &Path) {
        let mut slot = locked(&self.warm);
        if slot.is_none() {
            let program = program.to_owned();
            *slot = spawn(move || warm_copier(&program).ok());
        }
    }

    /// Creates contexts for the restore of this image, and its memory if there is room beside the exiting job's.
    pub fn prepare(self: &Arc<Self>, context: &Arc<RunContext>, image: ImageId) {
        let (ours, standby) = (Arc::clone(context), Arc::clone(self));
        let filled = Filled::default();
        *locked(&self.filled) = Arc::clone(&filled);
        let preparing = spawn(move || {
            // An unreadable image is reported by its restore.
            let reader = ours.store.read(image).ok()?;
            let facts: ImageFacts = serde_json::from_slice(&reader.manifest().meta).ok()?;
            let cuda = facts.cuda?;
            let resident = cuda.resident.as_ref()?;
            let gpus = gpus_now(resident, &Vec::new()).ok()?;
            let fingerprints = standby.blocks.recall(&reader, resident).ok()?;
            let copy_lanes = standby.begin(&ours.program, &gpus).ok()?;
            if !has_room(&copy_lanes, resident, &cuda.gpus) {
                return Some(Ready::Copier(copy_lanes, fingerprints));
            }
            *locked(&filled) = Some(image);
            let (map, fingerprints) = (Vec::new(), fingerprints.as_ref());
            let memory = fill(copy_lanes, &reader, resident, &map, fingerprints);
            if memory.is_err() {
                *locked(&filled) = None;
            }
            Some(Ready::Memory(memory.ok()?))
        });
        *locked(&self.ready) = preparing;
    }

    /// Returns true if memory of this image is on the GPUs, or being filled, for its restore.
    pub fn fills(&self, image: ImageId) -> bool {
        let filled = Arc::clone(&locked(&self.filled));
        *locked(&filled) == Some(image)
    }

    /// Ends the preparations without waiting: the job is not restored now.
    pub fn dismiss(&self) {
        *locked(&self.filled) = Filled::default();
        if let Some(starting) = taken(&self.ready) {
            // A detached thread waits for the copier's exit.
            drop(spawn(move || starting.join().ok()));
        }
    }

    /// Takes the preparation for the restore of this image: its memory, or a copier with contexts on these GPUs.
    pub fn take_for(
        &self,
        image: &ImageReader,
        facts: &ResidentFacts,
        program: &Path,
        gpus: &[GpuUuid],
    ) -> Result<Ready, ResidentError> {
        match wait_for(&self.ready) {
            Some(Ready::Memory(filled)) if filled.image == image.manifest().id => {
                tracing::debug!("GPU memory was filled while the job exited");
                Ok(Ready::Memory(filled))
            }
            ready => {
                let (copy_lanes, fingerprints) =
                    self.to_fill(ready, image, facts, program, gpus)?;
                Ok(Ready::Copier(copy_lanes, fingerprints))
            }
        }
    }

    /// Takes a copier for the restore of this image on other GPUs, and returns the image's fingerprints.
    pub fn take_to_fill(
        &self,
        image: &ImageReader,
        facts: &ResidentFacts,
        program: &Path,
        gpus: &[GpuUuid],
    ) -> Result<(CopyLanes, Option<ImageFingerprints>), ResidentError> {
        self.to_fill(wait_for(&self.ready), image, facts, program, gpus)
    }

    /// The image's keys are set when no other preparation is in progress, and before contexts are created.
    fn to_fill(
        &self,
        ready: Option<Ready>,
        image: &ImageReader,
        facts: &ResidentFacts,
        program: &Path,
        gpus: &[GpuUuid],
    ) -> Result<(CopyLanes, Option<ImageFingerprints>), ResidentError> {
        let fingerprints = self.blocks.recall(image, facts)?;
        Ok((self.copier(ready, program, gpus)?, fingerprints))
    }

    /// Returns a copier with contexts on these GPUs: a prepared one, a warm one, or a new one.
    pub fn take(&self, program: &Path, gpus: &[GpuUuid]) -> Result<CopyLanes, ResidentError> {
        self.copier(wait_for(&self.ready), program, gpus)
    }

    fn copier(
        &self,
        ready: Option<Ready>,
        program: &Path,
        gpus: &[GpuUuid],
    ) -> Result<CopyLanes, ResidentError> {
        match ready {
            Some(Ready::Copier(copy_lanes, _))
                if copy_lanes.keys() == self.blocks.keys() && copy_lanes.open(gpus).is_ok() =>
            {
                Ok(copy_lanes)
            }
            // The prepared resource is not usable here, and is freed before others take its place.
            ready => {
                drop(ready);
                self.begin(program, gpus)
            }
        }
    }

    fn begin(&self, program: &Path, gpus: &[GpuUuid]) -> Result<CopyLanes, ResidentError> {
        let keys = self.blocks.keys();
        if let Some(copier) = wait_for(&self.warm) {
            match CopyLanes::begin(copier, gpus, keys.clone()) {
                Ok(copy_lanes) => return Ok(copy_lanes),
                // Its facts about the GPUs may be outdated, or it may have been killed.
                Err(error) => tracing::debug!(%error, "the copier is started again"),
            }
        }
        CopyLanes::begin(warm_copier(program)?, gpus, keys)
    }
}

/// Returns true if each GPU has room for all memory that the job had there.
fn has_room(copy_lanes: &CopyLanes, resident: &ResidentFacts, gpus: &[GpuFacts]) -> bool {
    gpus.iter().all(|gpu| {
        let bytes = resident.bytes_on(&gpu.uuid);
        let (Ok(uuid), Some(used)) = (gpu.uuid.parse(), gpu.used_bytes) else {
            return bytes == 0;
        };
        let needed = used.max(bytes);
        bytes == 0 || copy_lanes.room(uuid).is_ok_and(|room| room >= needed)
    })
}

fn warm_copier(program: &Path) -> Result<Copier, CopierError> {
    let copier = Copier::start(program)?;
    copier.initialize()?;
    Ok(copier)
}

/// Starts a thread. A failure only means that nothing is prepared.
fn spawn<T: Send + 'static>(
    make: impl FnOnce() -> Option<T> + Send + 'static,
) -> Option<JoinHandle<Option<T>>> {
    let thread = thread::Builder::new().name("standby".to_owned());
    thread.spawn(make).ok()
}

fn wait_for<T>(slot: &Slot<T>) -> Option<T> {
    taken(slot)?.join().ok().flatten()
}

fn taken<T>(slot: &Slot<T>) -> Option<JoinHandle<Option<T>>> {
    locked(slot).take()
}
