//! Device memory from an image: allocated on the GPUs and filled before its processes map it.

use std::collections::{BTreeMap, BTreeSet};

use super::copy_lanes::CopyLanes;
use super::error::ResidentError;
use super::standby::{Ready, Standby};
use crate::agent_client::Held;
use crate::cuda::GpuUuid;
use crate::run::resident_facts::{ResidentFacts, ResidentSegment};
use crate::store::ImageReader;

use crate::run::gpu_facts::GpuPairs;
use crate::run::run_context::RunContext;

/// Memory of processes, by their pids as the job sees them.
pub(crate) type Memory = BTreeMap<i32, Vec<Held>>;

/// Makes the memory of an image on the GPUs that it had, or on those that `map` names in their place, where it is not
/// there already.
///
/// # Errors
/// Nothing is left on the GPUs.
pub(crate) fn refill(
    context: &RunContext,
    standby: &Standby,
    image: &ImageReader,
    facts: &ResidentFacts,
    map: &GpuPairs,
) -> Result<Memory, ResidentError> {
    let (id, gpus) = (image.manifest().id, gpus_now(facts, map)?);
    match standby.take_for(id, &context.program, &gpus)? {
        Ready::Memory(_, memory) => {
            // By a reader that nobody watched: of what is to be read, so much is.
            let read = usize::try_from(facts.bytes()).unwrap_or(usize::MAX);
            image.given().add(read);
            Ok(memory)
        }
        Ready::Copier(copy_lanes) => fill(copy_lanes, image, facts, map),
    }
}

/// The same by a copier that is ready for these GPUs.
pub(super) fn fill(
    copy_lanes: CopyLanes,
    image: &ImageReader,
    facts: &ResidentFacts,
    map: &GpuPairs,
) -> Result<Memory, ResidentError> {
    if !facts.is_sane() {
        return Err(ResidentError::Facts);
    }
    let (memory, segments) = copy_lanes.make(facts, |then| new_gpu(map, then))?;
    tracing::debug!(bytes = facts.bytes(), "GPU memory is made");
    copy_lanes.fill(facts, &segments, image)?;
    tracing::debug!("GPU memory is filled");
    copy_lanes.leave();
    Ok(memory)
}

/// The GPU that takes the place of another, or that one.
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
