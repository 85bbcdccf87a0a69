//! Device memory out of an image: made on the GPUs and filled, before its processes map it.

use std::collections::BTreeMap;

use super::carrier::Carrier;
use super::error::ResidentError;
use super::facts::ResidentFacts;
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
    let now = |then: &str| -> Option<GpuUuid> {
        let moved = map.iter().find(|(old, _)| old == then);
        moved.map_or(then, |(_, new)| new).parse().ok()
    };
    let mut gpus: Vec<GpuUuid> = facts
        .segments()
        .map(|segment| now(&segment.gpu).ok_or(ResidentError::Facts))
        .collect::<Result<_, _>>()?;
    gpus.sort_unstable();
    gpus.dedup();
    let carrier = Carrier::start(&shop.program, &gpus)?;
    carrier.fill(facts, now, |name, pipe| match image.splice_to(name, pipe) {
        // The copier says why it reads no more.
        Err(ReadError::Sink(_)) => Ok(0),
        other => other.map_err(|error| ResidentError::Read(Box::new(error))),
    })
}
