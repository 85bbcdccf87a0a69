//! Copiers that are started before they are needed, so that no snapshot or restore waits for their start.
//!
//! ```text
//! warm (CUDA is initialized, no GPU is touched) ─▶ prepare, when the job has crashed: contexts, memory ─▶ take
//!                                               └───────────────── take, for a snapshot ───────▶
//! ```
//! To initialize CUDA takes 0.2 s and 20 MiB of host memory; a context 0.1 s and some hundred MiB of its GPU. The end of
//! a job that has crashed takes as long, and holds its GPU memory. Where there is room for as much beside it, the memory
//! of the image is filled meanwhile.

use std::path::Path;
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};

use super::copy_lanes::CopyLanes;
use super::error::ResidentError;
use super::refill::{Memory, fill, gpus_now};
use crate::copier::{Copier, CopierError};
use crate::cuda::GpuUuid;
use crate::run::gpu_facts::GpuFacts;
use crate::run::image_facts::ImageFacts;
use crate::run::resident_facts::ResidentFacts;
use crate::run::run_context::RunContext;
use crate::store::ImageId;
use crate::sync::locked;

/// The prepared copiers: at most one of each kind.
#[derive(Debug, Default)]
pub(crate) struct Standby {
    warm: Slot<Copier>,
    /// A copier or memory for the restore that is due. It is taken soon or dismissed, because it uses GPU memory.
    ready: Slot<Ready>,
    /// The image whose memory that fills, if it does.
    filled: Mutex<Filled>,
}

/// Told by the thread that fills, for as long as it is the one that a restore waits for.
type Filled = Arc<Mutex<Option<ImageId>>>;

/// Preparation that a restore finds.
#[derive(Debug)]
pub(crate) enum Ready {
    /// A copier with contexts.
    Copier(CopyLanes),
    /// The memory of this image, filled, on the GPUs that it was on.
    Memory(ImageId, Memory),
}

/// A thread's present or finished preparation; `None` if it failed or was not requested.
type Slot<T> = Mutex<Option<JoinHandle<Option<T>>>>;

impl Standby {
    /// Has a copier that is warm, from now on, for the next who needs one.
    pub fn warm(&self, program: &Path) {
        let mut slot = locked(&self.warm);
        if slot.is_none() {
            let program = program.to_owned();
            *slot = spawn(move || warm_copier(&program).ok());
        }
    }

    /// Makes contexts for the restore of this image, and its memory if there is room, beside that of the job where it is
    /// not gone yet.
    pub fn prepare(self: &Arc<Self>, context: &Arc<RunContext>, image: ImageId) {
        let (ours, standby) = (Arc::clone(context), Arc::clone(self));
        let filled = Filled::default();
        *locked(&self.filled) = Arc::clone(&filled);
        let preparing = spawn(move || {
            // Whatever is wrong with the image is found, and said, by its restore.
            let reader = ours.store.read(image).ok()?;
            let facts: ImageFacts = serde_json::from_slice(&reader.manifest().meta).ok()?;
            let cuda = facts.cuda?;
            let resident = cuda.resident.as_ref()?;
            let gpus = gpus_now(resident, &Vec::new()).ok()?;
            let copy_lanes = standby.begin(&ours.program, &gpus).ok()?;
            if !has_room(&copy_lanes, resident, &cuda.gpus) {
                return Some(Ready::Copier(copy_lanes));
            }
            *locked(&filled) = Some(image);
            let memory = fill(copy_lanes, &reader, resident, &Vec::new());
            if memory.is_err() {
                *locked(&filled) = None;
            }
            Some(Ready::Memory(image, memory.ok()?))
        });
        *locked(&self.ready) = preparing;
    }

    /// Returns true if memory of this image is on the GPUs, or on its way there, for its restore to take.
    pub fn fills(&self, image: ImageId) -> bool {
        let filled = Arc::clone(&locked(&self.filled));
        *locked(&filled) == Some(image)
    }

    /// Ends what was prepared, without waiting for its end: the job is not restored now.
    pub fn dismiss(&self) {
        *locked(&self.filled) = Filled::default();
        if let Some(starting) = taken(&self.ready) {
            // By a thread that nobody waits for.
            drop(spawn(move || starting.join().ok()));
        }
    }

    /// Takes the preparation for the restore of this image: its memory, or a copier with contexts on these GPUs.
    pub fn take_for(
        &self,
        image: ImageId,
        program: &Path,
        gpus: &[GpuUuid],
    ) -> Result<Ready, ResidentError> {
        match wait_for(&self.ready) {
            Some(Ready::Memory(filled, memory)) if filled == image => {
                tracing::debug!("GPU memory was filled while the job ended");
                Ok(Ready::Memory(filled, memory))
            }
            ready => self.copier(ready, program, gpus).map(Ready::Copier),
        }
    }

    /// A copier with contexts on these GPUs: one that was prepared, or a warm one, or another.
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
            Some(Ready::Copier(copy_lanes)) if copy_lanes.open(gpus).is_ok() => Ok(copy_lanes),
            // What is ready is of no use here, and ends before others take its place.
            ready => {
                drop(ready);
                self.begin(program, gpus)
            }
        }
    }

    fn begin(&self, program: &Path, gpus: &[GpuUuid]) -> Result<CopyLanes, ResidentError> {
        if let Some(copier) = wait_for(&self.warm) {
            match CopyLanes::begin(copier, gpus) {
                Ok(copy_lanes) => return Ok(copy_lanes),
                // What it once found of GPUs may have changed, or somebody has killed it.
                Err(error) => tracing::debug!(%error, "the copier is started anew"),
            }
        }
        CopyLanes::begin(warm_copier(program)?, gpus)
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

/// Starts a thread. Without one, there is only no head start.
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
