//! Device memory out of an image: made on the GPUs and filled, before its processes map it.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;

use super::carrier::Carrier;
use super::error::ResidentError;
use super::facts::{ResidentFacts, ResidentSegment};
use crate::cuda::GpuUuid;
use crate::resident::Held;
use crate::store::{ImageReader, ReadError};

use super::super::gpu_plan::GpuPairs;
use super::super::workshop::Workshop;

/// Memory of processes, by their pids as the job sees them.
pub(in crate::supervisor) type Memory = BTreeMap<i32, Vec<Held>>;

/// Makes the memory of an image on the GPUs that it had, or on those that `map` names in their place.
///
/// # Errors
/// Nothing is left on the GPUs.
pub(in crate::supervisor) fn refill(
    shop: &Workshop,
    image: &ImageReader,
    facts: &ResidentFacts,
    map: &GpuPairs,
) -> Result<Memory, ResidentError> {
    if !facts.is_sane() {
        return Err(ResidentError::Facts);
    }
    let carrier = Carrier::start(&shop.program, &gpus_now(facts, map)?)?;
    let (memory, segments) = carrier.make(facts, |then| new_gpu(map, then))?;
    carrier.fill(facts, &segments, |name, pipe| read(image, name, pipe))?;
    Ok(memory)
}

/// The GPU that takes the place of another, or that one.
pub(super) fn new_gpu(map: &GpuPairs, then: &str) -> Option<GpuUuid> {
    let moved = map.iter().find(|(old, _)| old == then);
    moved.map_or(then, |(_, new)| new).parse().ok()
}

/// All GPUs that memory comes back on.
pub(super) fn gpus_now(
    facts: &ResidentFacts,
    map: &GpuPairs,
) -> Result<Vec<GpuUuid>, ResidentError> {
    let gpu = |segment: &ResidentSegment| new_gpu(map, &segment.gpu);
    let gpus: Option<BTreeSet<GpuUuid>> = facts.segments().map(gpu).collect();
    Ok(gpus.ok_or(ResidentError::Facts)?.into_iter().collect())
}

/// Writes a stream of the image into a pipe of the copier's.
pub(super) fn read(image: &ImageReader, name: &str, pipe: &File) -> Result<u64, ResidentError> {
    match image.splice_to(name, pipe) {
        // The copier says why it reads no more.
        Err(ReadError::Sink(_)) => Ok(0),
        other => other.map_err(|error| ResidentError::Read(Box::new(error))),
    }
}
