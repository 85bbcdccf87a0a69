//! Summary of a run, in numbers and in a sentence.

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

/// Bounds of the freeze histogram, in seconds: from freezes that are not noticeable to freezes that interrupt a
/// service.
pub const FREEZE_BOUNDS: [f64; 10] = [0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0];

/// A run in numbers. Durations are seconds.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Summary {
    /// Start of the first supervisor, as far as the log reaches back.
    pub begun: Option<Timestamp>,
    /// Total running time of the supervisors.
    pub run_seconds: f64,
    /// Images that became durable.
    pub snapshots: u64,
    /// Snapshots that failed.
    pub failed_snapshots: u64,
    /// Total duration of the freezes after which the job continued.
    pub freeze_seconds: f64,
    /// Number of these freezes in each interval that ends at one of [`FREEZE_BOUNDS`]; the last number counts longer
    /// ones.
    pub freeze_counts: [u64; FREEZE_BOUNDS.len() + 1],
    /// Number of crashes of the job.
    pub crashes: u64,
    /// Number of these crashes after which the job was restored.
    pub survived: u64,
    /// Number of restores after the supervisor had been killed.
    pub outages: u64,
    /// Number of times that the job was considered hung.
    pub hangs: u64,
    /// Images that became the running job.
    pub restores: u64,
    /// Total duration of these restores.
    pub restore_seconds: f64,
    /// Images that could not be restored.
    pub failed_restores: u64,
    /// Computing time that was repeated.
    pub lost_seconds: f64,
    /// Computing time that would have been repeated without images.
    pub saved_seconds: f64,
}

/// A snapshot, as stored in the account.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Freeze {
    /// Time at which the image was durable.
    pub time: Timestamp,
    /// Its id.
    pub image: String,
    /// The reason for taking it.
    pub trigger: String,
    /// Duration of the freeze.
    pub freeze_seconds: f64,
    /// Time from the beginning until the image was durable.
    pub durable_seconds: f64,
    /// Size of the image's content.
    pub raw_bytes: u64,
    /// Bytes that the image added to the store.
    pub stored_bytes: u64,
}

impl Summary {
    /// Counts a freeze after which the job continued.
    pub(super) fn froze(&mut self, seconds: f64) {
        self.freeze_seconds += seconds;
        let bound = FREEZE_BOUNDS.iter().position(|bound| seconds <= *bound);
        self.freeze_counts[bound.unwrap_or(FREEZE_BOUNDS.len())] += 1;
    }

    /// Returns the share of the run in which the job was frozen for snapshots, 0 to 1.
    #[must_use]
    pub fn freeze_share(&self) -> f64 {
        if self.run_seconds > 0.0 {
            (self.freeze_seconds / self.run_seconds).min(1.0)
        } else {
            0.0
        }
    }

    /// Describes the run in a sentence that mentions only events that occurred.
    #[must_use]
    pub fn in_words(&self) -> String {
        let ran = format!("ran {}", time_in_words(self.run_seconds));
        let facts: Vec<String> = [self.images(), self.failures(), self.crashes(), self.work()]
            .into_iter()
            .flatten()
            .collect();
        if facts.is_empty() {
            return format!("{ran}, no snapshot");
        }
        format!("{ran}: {}", facts.join(", "))
    }

    fn images(&self) -> Option<String> {
        if self.snapshots == 0 {
            return None;
        }
        let count = counted(self.snapshots, "snapshot");
        if self.freeze_seconds == 0.0 {
            return Some(count);
        }
        let frozen = time_in_words(self.freeze_seconds);
        let share = percent(self.freeze_share());
        Some(format!("{count} (frozen {frozen} in all, {share})"))
    }

    fn failures(&self) -> Option<String> {
        let failed = |count, of| (count > 0).then(|| format!("{} failed", counted(count, of)));
        let failures = [
            failed(self.failed_snapshots, "snapshot"),
            failed(self.failed_restores, "restore"),
        ];
        let failures: Vec<String> = failures.into_iter().flatten().collect();
        (!failures.is_empty()).then(|| failures.join(", "))
    }

    fn crashes(&self) -> Option<String> {
        let survived = match (self.survived, self.outages) {
            (0, 0) => return None,
            (crashes, 0) => counted(crashes, "crash"),
            (0, outages) => outage(outages),
            (crashes, outages) => format!("{} and {}", counted(crashes, "crash"), outage(outages)),
        };
        Some(format!("survived {survived}"))
    }

    fn work(&self) -> Option<String> {
        let lost = (self.survived > 0 || self.outages > 0 || self.lost_seconds > 0.0)
            .then(|| format!("lost {} of work", time_in_words(self.lost_seconds)));
        let saved = (self.saved_seconds > 0.0)
            .then(|| format!("saved {}", time_in_words(self.saved_seconds)));
        let work: Vec<String> = lost.into_iter().chain(saved).collect();
        (!work.is_empty()).then(|| work.join(", "))
    }
}

fn outage(count: u64) -> String {
    format!("{} of ckpt-run", counted(count, "kill"))
}

/// Formats a count with its noun: `1 crash`, `2 crashes`.
#[must_use]
pub fn counted(count: u64, of: &str) -> String {
    match (count, of) {
        (1, of) => format!("1 {of}"),
        (count, "crash") => format!("{count} crashes"),
        (count, of) => format!("{count} {of}s"),
    }
}

/// Formats a share from 0 to 1: `0.09 %`.
#[must_use]
pub fn percent(share: f64) -> String {
    let percent = share * 100.0;
    match percent {
        percent if percent >= 10.0 => format!("{percent:.0} %"),
        percent if percent >= 1.0 => format!("{percent:.1} %"),
        percent if percent >= 0.005 => format!("{percent:.2} %"),
        _ => "less than 0.01 %".to_owned(),
    }
}

/// Formats a duration: `0 s`, `0.42 s`, `7.2 s`, `48 s`, `3 min 20 s`, `48 min`, `2 h 13 min`, `3 d 4 h`.
#[must_use]
pub fn time_in_words(seconds: f64) -> String {
    let seconds = seconds.max(0.0);
    // The bounds follow the rounding: 9.96 is shown as 10, and 59.7 as a minute.
    match seconds {
        seconds if seconds < 0.005 => "0 s".to_owned(),
        seconds if seconds < 0.995 => format!("{seconds:.2} s"),
        seconds if seconds < 9.95 => format!("{seconds:.1} s"),
        seconds if seconds < 59.5 => format!("{seconds:.0} s"),
        seconds if seconds < 599.5 => two((60, "min"), (1, "s"), seconds),
        seconds if seconds < 3570.0 => format!("{:.0} min", seconds / 60.0),
        seconds if seconds < 86_370.0 => two((3600, "h"), (60, "min"), seconds),
        seconds => two((86_400, "d"), (3600, "h"), seconds),
    }
}

/// Formats a duration in two units, each given by its length in seconds and its name.
fn two(larger: (u64, &str), smaller: (u64, &str), seconds: f64) -> String {
    // Far beyond any clock; `as` saturates there, too.
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        clippy::cast_precision_loss,
        reason = "positive, and saturating is right"
    )]
    let count = (seconds / smaller.0 as f64).round() as u64;
    let each = larger.0 / smaller.0;
    match (count / each, count % each) {
        (whole, 0) => format!("{whole} {}", larger.1),
        (whole, rest) => format!("{whole} {} {rest} {}", larger.1, smaller.1),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn summary_mentions_only_events_that_occurred() {
        let summary = Summary {
            run_seconds: 2.0 * 3600.0 + 13.0 * 60.0,
            snapshots: 9,
            freeze_seconds: 7.2,
            survived: 2,
            crashes: 2,
            restores: 2,
            lost_seconds: 630.0,
            saved_seconds: 6600.0,
            ..Summary::default()
        };
        assert_eq!(
            summary.in_words(),
            "ran 2 h 13 min: 9 snapshots (frozen 7.2 s in all, 0.09 %), survived 2 crashes, lost 10 min of work, \
             saved 1 h 50 min"
        );
        let other = Summary {
            run_seconds: 20.0,
            snapshots: 1,
            failed_snapshots: 2,
            outages: 1,
            lost_seconds: 0.5,
            ..Summary::default()
        };
        assert_eq!(
            other.in_words(),
            "ran 20 s: 1 snapshot, 2 snapshots failed, survived 1 kill of ckpt-run, lost 0.50 s of work"
        );
    }

    #[test]
    fn summary_without_snapshots_is_short() {
        let summary = Summary {
            run_seconds: 3.0,
            ..Summary::default()
        };
        assert_eq!(summary.in_words(), "ran 3.0 s, no snapshot");
    }

    #[test]
    fn times_have_two_units_at_most() {
        for (seconds, words) in [
            (-1.0, "0 s"),
            (0.004, "0 s"),
            (0.006, "0.01 s"),
            (0.424, "0.42 s"),
            (0.999, "1.0 s"),
            (9.96, "10 s"),
            (59.7, "1 min"),
            (200.0, "3 min 20 s"),
            (599.9, "10 min"),
            (3590.0, "1 h"),
            (7980.0, "2 h 13 min"),
            (86_399.0, "1 d"),
            (273_600.0, "3 d 4 h"),
        ] {
            assert_eq!(time_in_words(seconds), words, "{seconds}");
        }
    }

    #[test]
    fn shares_are_never_shown_as_none() {
        for (share, words) in [
            (0.5, "50 %"),
            (0.0123, "1.2 %"),
            (0.0009, "0.09 %"),
            (1e-9, "less than 0.01 %"),
        ] {
            assert_eq!(percent(share), words);
        }
    }
}
