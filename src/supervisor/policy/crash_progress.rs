//! Progress past a crash: does the job get further than the place at which it crashed, or only up to there again?
//!
//! ```text
//! start ──── image 1 ──── image 2 ── crash
//!               └ restored ─ image 3 ─ …        the same ground: no progress
//!               └ restored ─────────────── image 4    new ground
//! ```
//! Places are the progress that the run's account has, in seconds of computing.

/// The same work takes longer at times: what has to be passed lies beyond the crash by this part of the way to it from
/// the image before.
const MARGIN_PARTS: f64 = 4.0;

/// The place that the job must pass after a crash.
#[derive(Debug, Default)]
pub(crate) struct CrashProgress {
    crash: Option<f64>,
}

impl CrashProgress {
    /// The job crashed by itself at this place, so far beyond its image: a kill from outside says nothing of the place.
    pub fn crashed(&mut self, place: f64, beyond_image: f64) {
        let beyond = place + beyond_image / MARGIN_PARTS;
        self.crash = Some(self.crash.map_or(beyond, |crash| crash.max(beyond)));
    }

    /// Returns true if an image of this place is past the crash; then the crash is forgotten.
    pub fn is_passed(&mut self, image: f64) -> bool {
        self.crash = self.crash.filter(|crash| image <= *crash);
        self.crash.is_none()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn images_of_ground_that_was_computed_before_are_no_progress() {
        let mut crash_progress = CrashProgress::default();
        assert!(crash_progress.is_passed(10.0) && crash_progress.is_passed(20.0));
        // From the image at 20: 8 s to the crash, and 2 s more for those 8.
        crash_progress.crashed(28.0, 8.0);
        assert!(!crash_progress.is_passed(27.0));
        crash_progress.crashed(28.0, 1.0);
        assert!(!crash_progress.is_passed(20.0));
        assert!(!crash_progress.is_passed(30.0));
        assert!(crash_progress.is_passed(31.0));
        assert!(crash_progress.is_passed(5.0), "nothing has crashed since");
    }
}
