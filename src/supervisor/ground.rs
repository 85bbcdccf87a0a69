//! Whether a job gets further than the place at which it crashed, or computes the same again up to there.
//!
//! ```text
//! start ──── image 1 ──── image 2 ── crash
//!               └ restored ─ image 3 ─ …        the same ground: no progress
//!               └ restored ─────────────── image 4    new ground
//! ```
//! Places are told by computing time, as far as this supervisor has seen it: an image of a supervisor before is at the
//! beginning.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::store::ImageId;

/// Newest images whose places are remembered: more than any store keeps.
const IMAGES_MAX: usize = 4096;
/// The same work takes longer at times: what has to be passed lies beyond the crash by this part of the way to it from
/// the image before.
const MARGIN_PARTS: u32 = 4;

/// Where the job is, where it was at its images, and where it crashed. All by the supervisor's clock of computing time.
#[derive(Debug, Default)]
pub(super) struct Ground {
    /// The clock at the job's start or restore, and the place of that.
    since: Duration,
    began: Duration,
    /// Of the snapshot under way.
    frozen: Duration,
    images: BTreeMap<ImageId, Duration>,
    /// What has to be passed, after a crash.
    crash: Option<Duration>,
}

impl Ground {
    /// The job computes from its start, or from this image.
    pub fn begins(&mut self, image: Option<ImageId>, clock: Duration) {
        self.since = clock;
        let place = image.and_then(|image| self.images.get(&image));
        self.began = place.copied().unwrap_or_default();
    }

    /// The job stands still for a snapshot.
    pub fn freezes(&mut self, clock: Duration) {
        self.frozen = self.place(clock);
    }

    /// The image of that is durable. Whether the job had got further than ever before it crashed.
    pub fn taken(&mut self, image: ImageId) -> bool {
        if self.images.len() == IMAGES_MAX {
            self.images.pop_first();
        }
        self.images.insert(image, self.frozen);
        let is_further = self.crash.is_none_or(|crash| self.frozen > crash);
        if is_further {
            self.crash = None;
        }
        is_further
    }

    /// It crashed by itself: a kill from outside says nothing of the place.
    pub fn crashes(&mut self, clock: Duration) {
        let place = self.place(clock);
        let before = self.images.values().filter(|image| **image <= place).max();
        let before = before.copied().unwrap_or_default().max(self.began);
        let margin = place.saturating_sub(before) / MARGIN_PARTS;
        self.crash = self.crash.max(Some(place + margin));
    }

    fn place(&self, clock: Duration) -> Duration {
        self.began + clock.saturating_sub(self.since)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seconds(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    fn image(number: u64) -> ImageId {
        format!("{number:06}").parse().unwrap()
    }

    #[test]
    fn images_of_ground_that_was_computed_before_are_no_progress() {
        let mut ground = Ground::default();
        ground.begins(None, seconds(0));
        for number in 1..=2 {
            ground.freezes(seconds(10 * number));
            assert!(ground.taken(image(number)));
        }
        ground.crashes(seconds(28));
        // From the second image: 8 s to the crash, and 2 s more for those 8.
        ground.begins(Some(image(2)), seconds(28));
        ground.freezes(seconds(35));
        assert!(!ground.taken(image(3)), "at 27");
        ground.crashes(seconds(36));
        ground.begins(Some(image(1)), seconds(36));
        ground.freezes(seconds(46));
        assert!(!ground.taken(image(4)), "at 20");
        ground.freezes(seconds(56));
        assert!(!ground.taken(image(5)), "at 30");
        ground.freezes(seconds(57));
        assert!(ground.taken(image(6)), "at 31");
        ground.freezes(seconds(58));
        assert!(ground.taken(image(7)), "nothing has crashed since");
    }

    #[test]
    fn a_supervisor_that_goes_on_knows_nothing_of_before() {
        let mut ground = Ground::default();
        ground.begins(Some(image(7)), seconds(0));
        ground.freezes(seconds(5));
        assert!(ground.taken(image(8)));
        ground.crashes(seconds(9));
        ground.begins(Some(image(7)), seconds(9));
        ground.freezes(seconds(9 + 11));
        assert!(
            ground.taken(image(9)),
            "beyond 9 and a part of the 4 from the image before"
        );
    }
}
