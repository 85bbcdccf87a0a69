//! Space on the store's disk: old images are removed after a snapshot, and before a snapshot that would not fit.
//!
//! ```text
//! enough is free ─────────────────────────────────────────────────────▶ begin
//! not enough ─▶ images that this snapshot replaces anyway ─▶ removed ─▶ begin
//!                     └─ not enough either, or none ──────────────────▶ refused, none removed
//! ```
//! The space that a snapshot needs is an estimate; if the estimate was too low, the snapshot fails as on any full disk.

use super::error::SnapshotError;
use crate::clock;
use crate::config;
use crate::run::format::{chain, size};
use crate::run::image_facts::run_of;
use crate::run::machine;
use crate::run::remove_held;
use crate::run::run_context::RunContext;
use crate::run::run_state::RunState;
use crate::store::{Effort, Fate, GoesOn, ImageEntry, ImageId, Planned, Policy, WriteError};

/// Share of a job's memory that its first image takes on the disk, in quarters. Floating point numbers, which are most
/// of a large job, compressed to 0.75 (bfloat16) and 0.88 (float32); programs and their heaps to less than 0.4.
const FIRST_IMAGE_QUARTERS: u64 = 3;

/// Returns the retention rules in the form that the store uses.
#[must_use]
pub fn policy(retention: &config::Retention) -> Policy {
    Policy {
        keep_last: retention.keep_last,
        keep_within: retention.keep_within,
        keep_hourly: retention.keep_hourly,
        keep_daily: retention.keep_daily,
    }
}

/// Removes the images that the rules do not keep. Errors are logged and otherwise ignored: the new image exists.
pub(crate) fn rotate(context: &RunContext, state: &RunState) {
    let goes_on: GoesOn<'_> = &|id, meta| state.goes_on_from_numbered(id, meta);
    let removed = context
        .store
        .plan(&policy(&context.config.retention), &clock::local(), goes_on)
        .map_err(WriteError::from)
        .and_then(|plan| forget(context, &plan, Effort::Quick, goes_on));
    if let Err(error) = removed {
        tracing::warn!("cannot remove old images: {}", chain(&error));
    }
}

fn forget(
    context: &RunContext,
    plan: &[Planned],
    effort: Effort,
    goes_on: GoesOn<'_>,
) -> Result<(), WriteError> {
    for Planned { id, fate } in plan {
        match fate {
            Fate::Removed(_) => tracing::debug!(image = %id, reason = fate.reason(), "removing"),
            Fate::Kept(_) => tracing::trace!(image = %id, reason = fate.reason(), "keeping"),
        }
    }
    let forgotten = context.store.forget(&context.lock, plan, effort, goes_on)?;
    if !forgotten.images.is_empty() {
        remove_held(&context.store);
        tracing::debug!(
            images = forgotten.images.len(),
            bytes = %size(forgotten.swept.bytes),
            "old images removed"
        );
    }
    Ok(())
}

/// Ensures that the next image fits, before the job is frozen. `memory` is the size of the job's memory, on the host
/// and on GPUs.
pub(crate) fn make(
    context: &RunContext,
    state: &RunState,
    memory: u64,
) -> Result<(), SnapshotError> {
    let floor = context.config.snapshot.min_free;
    if floor == 0 {
        return Ok(());
    }
    let Some(free) = free_bytes(context) else {
        return Ok(());
    };
    let images = context.store.images().map_err(WriteError::from)?;
    let need = Need {
        image: expected_bytes(&images, state.started_unix_ms, memory),
        floor,
    };
    if need.fits(free) {
        return Ok(());
    }
    let policy = policy(&context.config.retention);
    let goes_on: GoesOn<'_> = &|id, meta| state.goes_on_from_numbered(id, meta);
    let plan = context.store.plan_ahead(&policy, &clock::local(), goes_on);
    let plan = plan.map_err(WriteError::from)?;
    let going = plan.iter().filter(|planned| planned.fate.is_removed());
    let going: Vec<ImageId> = going.map(|planned| planned.id).collect();
    let gains = context.store.gains(&going).map_err(WriteError::from)?;
    let Some(count) = need.removals(free, &gains) else {
        return Err(need.refusal(free));
    };
    tracing::info!(
        images = count,
        free = %size(free),
        needed = %size(need.bytes()),
        "old images are removed before the snapshot to free space"
    );
    let first: Vec<Planned> = plan
        .into_iter()
        .filter(|planned| planned.fate.is_removed())
        .take(count)
        .collect();
    forget(context, &first, Effort::Thorough, goes_on)?;
    match free_bytes(context) {
        // Some images were pinned meanwhile, or another program took the space.
        Some(free) if !need.fits(free) => Err(need.refusal(free)),
        Some(_) | None => Ok(()),
    }
}

/// The disk space that a snapshot needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Need {
    image: u64,
    floor: u64,
}

impl Need {
    fn bytes(self) -> u64 {
        self.image.saturating_add(self.floor)
    }

    fn fits(self, free: u64) -> bool {
        free >= self.bytes()
    }

    /// Returns the least number of images that must be removed. `gains` holds the space that is freed once the first
    /// image, the first two images, … are removed. Returns `None` if removing all of them is not enough.
    fn removals(self, free: u64, gains: &[u64]) -> Option<usize> {
        let enough = |gain: &u64| self.fits(free.saturating_add(*gain));
        gains.iter().position(enough).map(|index| index + 1)
    }

    fn refusal(self, free: u64) -> SnapshotError {
        SnapshotError::NoRoom {
            image: self.image,
            floor: self.floor,
            free,
        }
    }
}

/// Returns the estimated size that the next image of a run adds to the store. This is the size that the run's newest
/// undamaged image added: that image shared data with the one before it, as the next image will share data with it.
/// Before the first image it is a share of the job's memory.
fn expected_bytes(images: &[ImageEntry], run: u64, memory: u64) -> u64 {
    let of_run = |image: &&ImageEntry| image.damaged.is_none() && run_of(&image.meta) == Some(run);
    match images.iter().rfind(of_run) {
        Some(image) => image.stored_bytes,
        None => memory / 4 * FIRST_IMAGE_QUARTERS,
    }
}

/// Returns true if the store's disk has room for so many bytes, and the least free space besides.
pub(super) fn has_room(context: &RunContext, bytes: u64) -> bool {
    let needed = bytes.saturating_add(context.config.snapshot.min_free);
    free_bytes(context).is_none_or(|free| free >= needed)
}

/// Returns the free space; `None` if it is unknown, which is no reason to refuse a snapshot.
fn free_bytes(context: &RunContext) -> Option<u64> {
    match machine::free_disk(context.store.path()) {
        Ok(free) => Some(free),
        Err(error) => {
            tracing::debug!(%error, "cannot determine the free space of the store's disk");
            None
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    fn image(number: u64, run: u64, stored_bytes: u64) -> ImageEntry {
        ImageEntry {
            id: ImageId::new(number).unwrap(),
            created_unix_ms: 0,
            raw_bytes: 10 * GIB,
            stored_bytes,
            meta: format!("{{\"run\": {run}}}").into_bytes(),
            damaged: None,
            pinned: None,
        }
    }

    #[test]
    fn newest_good_image_predicts_the_size_of_the_next() {
        let mut images = vec![image(1, 7, 3 * GIB), image(2, 7, GIB), image(3, 6, 5 * GIB)];
        assert_eq!(expected_bytes(&images, 7, 8 * GIB), GIB);
        images[1].damaged = Some("torn".to_owned());
        assert_eq!(expected_bytes(&images, 7, 8 * GIB), 3 * GIB);
        assert_eq!(expected_bytes(&images, 8, 8 * GIB), 6 * GIB);
    }

    #[test]
    fn only_enough_images_are_removed_or_none() {
        let need = Need {
            image: 2 * GIB,
            floor: GIB,
        };
        assert!(need.fits(3 * GIB) && !need.fits(3 * GIB - 1));
        let gains = [0, GIB, 2 * GIB];
        assert_eq!(need.removals(2 * GIB, &gains), Some(2));
        assert_eq!(need.removals(GIB, &gains), Some(3));
        assert_eq!(need.removals(GIB - 1, &gains), None);
        assert_eq!(need.removals(GIB, &[]), None);
        let most = Need {
            image: u64::MAX,
            floor: GIB,
        };
        assert!(!most.fits(u64::MAX - 1));
    }

    #[test]
    fn refusal_has_needed_and_free_space_and_a_remedy() {
        let need = Need {
            image: 2 * GIB,
            floor: GIB,
        };
        let text = need.refusal(GIB / 2).to_string();
        for part in [
            "2.0 GiB",
            "1.0 GiB",
            "512.0 MiB",
            "snapshot.min_free",
            "--store",
            "forget",
        ] {
            assert!(text.contains(part), "{part}: {text}");
        }
    }
}
