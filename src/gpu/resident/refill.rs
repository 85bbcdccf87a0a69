//! Restore of device memory from an image: it is allocated and filled on the GPUs before its processes map it.

use std::collections::{BTreeMap, BTreeSet};

use super::copy_lanes::CopyLanes;
use super::error::ResidentError;
use super::image_fingerprints::ImageFingerprints;
use super::known_blocks::Changes;
use super::standby::{Ready, Standby};
use crate::agent_client::Held;
use crate::cuda::GpuUuid;
use crate::run::resident_facts::{ResidentFacts, ResidentSegment};
use crate::store::{ImageId, ImageReader};

use crate::run::gpu_facts::GpuPairs;
use crate::run::run_context::RunContext;

/// Memory of processes, by their pids in the job's namespace.
pub(crate) type Memory = BTreeMap<i32, Vec<Held>>;

/// Creates an image's memory on its former GPUs, or on their replacements in `map`.
///
/// # Errors
/// No memory is left on the GPUs.
pub(crate) fn refill(
    context: &RunContext,
    standby: &Standby,
    image: &ImageReader,
    facts: &ResidentFacts,
    map: &GpuPairs,
) -> Result<Memory, ResidentError> {
    let (id, gpus) = (image.manifest().id, gpus_now(facts, map)?);
    let filled = match standby.take_for(image, facts, &context.program, &gpus)? {
        Ready::Memory(filled) => {
            // Counts the bytes read by a reader without a progress watch.
            let read = usize::try_from(facts.bytes()).unwrap_or(usize::MAX);
            image.given().add(read);
            filled
        }
        Ready::Copier(copy_lanes, fingerprints) => {
            fill(copy_lanes, image, facts, map, fingerprints.as_ref())?
        }
    };
    standby.blocks.keep(id, &filled.found);
    Ok(filled.memory)
}

/// Memory of an image on the GPUs.
#[derive(Debug)]
pub(crate) struct FilledMemory {
    pub image: ImageId,
    pub memory: Memory,
    /// Fingerprints of its blocks.
    pub found: Changes,
}

/// Creates and fills the memory with a copier that is ready for these GPUs.
pub(super) fn fill(
    copy_lanes: CopyLanes,
    image: &ImageReader,
    facts: &ResidentFacts,
    map: &GpuPairs,
    fingerprints: Option<&ImageFingerprints>,
) -> Result<FilledMemory, ResidentError> {
    let (memory, segments) = copy_lanes.make(facts, |then| new_gpu(map, then))?;
    tracing::debug!(bytes = facts.bytes(), "GPU memory is allocated");
    let found = copy_lanes.fill(facts, &segments, image, fingerprints)?;
    tracing::debug!("GPU memory is filled");
    copy_lanes.leave();
    Ok(FilledMemory {
        image: image.manifest().id,
        memory,
        found,
    })
}

/// Returns the replacement of a GPU, or the GPU itself.
pub(super) fn new_gpu(map: &GpuPairs, then: &str) -> Option<GpuUuid> {
    let moved = map.iter().find(|(old, _)| old == then);
    moved.map_or(then, |(_, new)| new).parse().ok()
}

/// Returns all GPUs on which memory is restored.
pub(super) fn gpus_now(
    facts: &ResidentFacts,
    map: &GpuPairs,
) -> Result<Vec<GpuUuid>, ResidentError> {
    let gpu = |segment: &ResidentSegment| new_gpu(map, &segment.gpu);
    let gpus: Option<BTreeSet<GpuUuid>> = facts.segments().map(gpu).collect();
    Ok(gpus.ok_or(ResidentError::Facts)?.into_iter().collect())
}
