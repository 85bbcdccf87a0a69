//! The computing time between two snapshots (`interval = "auto"`): a pure function of the cost of a snapshot and the
//! rate of failures. `decide/snapshot_timer` measures both.
//!
//! ```text
//! C   what a snapshot takes from the job: its freeze, and what writing the image slows the job down by
//! M   computing time between two failures: (assumed + computed) / (1 + failures), as if the run had computed for
//!     `snapshot.mtbf` and failed once before it began
//! T   = sqrt(2 C M) * (1 + sqrt(C / 2M) / 3 + C / 2M / 9) - C      while C < 2M, else M
//! ```
//! T is Daly's higher-order estimate of the optimum (Future Generation Computer Systems 22, 2006); its first term is
//! Young's. M is the mean of the failure rate under a gamma prior with one failure in `snapshot.mtbf`: without a
//! failure it grows with the time that passes, and after many it is what was seen.
//!
//! T is never below `C / snapshot.max_overhead` nor below the time that an image takes to become durable, so that at
//! most every second moment is spent writing; and always between 5 s and 4 h.

use std::fmt;
use std::time::Duration;

use crate::config::{Jitter, Snapshot, format_percent};
use crate::history::{percent, time_in_words};

/// Below, a log consists of snapshots.
const SHORTEST: Duration = Duration::from_secs(5);
/// Longest interval: the work of a day that may be lost, however rarely the job fails.
const LONGEST: Duration = Duration::from_secs(4 * 3600);
/// Freeze that is assumed before the first one is measured: that of a GPU job of some size.
const COST_ASSUMED: Duration = Duration::from_secs(2);
/// Weight of the newest measurement in the mean: the last few decide, one slow snapshot does not.
const NEWEST_WEIGHT: f64 = 0.3;
/// Smallest relative change that is reported.
const NOTICEABLE: f64 = 0.2;
/// Factor over the wanted overhead from which on a warning is logged: less is within the error of measurement.
const TOO_MUCH: f64 = 1.1;

#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Rules {
    /// Assumed computing time between two failures.
    pub mtbf: Duration,
    /// Most of the job's time that its freezes are to take, above 0, at most 1.
    pub max_overhead: f64,
}

impl From<&Snapshot> for Rules {
    fn from(settings: &Snapshot) -> Self {
        Self {
            mtbf: settings.mtbf,
            max_overhead: settings.max_overhead,
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cost {
    /// Time for which the job was frozen.
    pub freeze: Duration,
    /// Computing that was lost while the image was written, as its CPU time tells.
    pub slowdown: Duration,
    /// Time from the freeze's end until the image was durable.
    pub writing: Duration,
}

impl Cost {
    /// Returns the computing time that it took from the job.
    #[must_use]
    pub fn total(self) -> Duration {
        self.freeze.saturating_add(self.slowdown)
    }

    /// The mean of snapshots so far, with one more.
    #[must_use]
    pub fn with(self, newest: Self) -> Self {
        let mean = |so_far: Duration, newest: Duration| {
            so_far.mul_f64(1.0 - NEWEST_WEIGHT) + newest.mul_f64(NEWEST_WEIGHT)
        };
        Self {
            freeze: mean(self.freeze, newest.freeze),
            slowdown: mean(self.slowdown, newest.slowdown),
            // Images of an earlier supervisor do not tell.
            writing: if self.writing.is_zero() {
                newest.writing
            } else {
                mean(self.writing, newest.writing)
            },
        }
    }
}

/// The result of one query of the run.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Seen {
    /// The mean cost of its snapshots; `None` before the first.
    pub cost: Option<Cost>,
    pub computed: Duration,
    pub failures: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reason {
    Optimum,
    Overhead,
    /// Images take so long to become durable.
    Writing,
    /// No shorter one makes sense.
    Shortest,
    /// No longer one makes sense.
    Longest,
}

impl Reason {
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Optimum => "optimum",
            Self::Overhead => "max-overhead",
            Self::Writing => "writing",
            Self::Shortest => "shortest",
            Self::Longest => "longest",
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Chosen {
    /// Time from the end of a snapshot to the next.
    pub interval: Duration,
    pub reason: Reason,
    pub cost: Duration,
    pub measured: bool,
    pub mtbf: Duration,
    /// T, before the bounds.
    pub optimum: Duration,
    /// The bound by `snapshot.max_overhead`.
    pub least: Duration,
    /// The bound by the time of writing.
    pub writing: Duration,
}

impl Chosen {
    /// The part of the job's time, 0 to 1, that snapshots take.
    #[must_use]
    pub fn overhead(&self) -> f64 {
        overhead(self.cost, self.interval)
    }

    /// The part of the job's time, 0 to 1, that is expected to be done again after failures.
    #[must_use]
    pub fn lost(&self) -> f64 {
        let lost = (self.interval + self.cost).as_secs_f64() / 2.0;
        (lost / self.mtbf.as_secs_f64()).min(1.0)
    }

    /// Returns true if it differs enough from another interval to be reported.
    #[must_use]
    pub fn is_news_after(&self, other: Duration) -> bool {
        let (new, old) = (self.interval.as_secs_f64(), other.as_secs_f64());
        (new - old).abs() > old * NOTICEABLE
    }
}

impl fmt::Display for Chosen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let measured = if self.measured { "" } else { " (assumed)" };
        write!(
            f,
            "a snapshot costs {}{measured}, time between failures {}, optimum {}",
            rough(self.cost),
            rough(self.mtbf),
            rough(self.optimum),
        )?;
        match self.reason {
            Reason::Optimum => Ok(()),
            Reason::Overhead => f.write_str(", raised by snapshot.max_overhead"),
            Reason::Writing => write!(f, ", raised because writing takes {}", rough(self.writing)),
            Reason::Shortest => write!(f, ", raised to {}", rough(SHORTEST)),
            Reason::Longest => write!(f, ", lowered to {}", rough(LONGEST)),
        }
    }
}

#[must_use]
pub fn choose(rules: Rules, seen: Seen) -> Chosen {
    let cost = seen.cost.map_or(COST_ASSUMED, Cost::total);
    let writing = seen.cost.map_or(Duration::ZERO, |cost| cost.writing);
    let mtbf = mean_time(rules.mtbf, seen.computed, seen.failures);
    let optimum = optimum(cost, mtbf);
    let least = least(cost, rules.max_overhead);
    let bounds = [
        (optimum, Reason::Optimum),
        (least, Reason::Overhead),
        (writing, Reason::Writing),
        (SHORTEST, Reason::Shortest),
    ];
    let mut longest = bounds[0];
    for bound in bounds {
        if bound.0 > longest.0 {
            longest = bound;
        }
    }
    // What is given bounds more than what makes sense.
    let (interval, reason) = if longest.0 > LONGEST && optimum > least.max(writing) {
        (LONGEST.max(least).max(writing), Reason::Longest)
    } else {
        longest
    };
    Chosen {
        interval,
        reason,
        cost,
        measured: seen.cost.is_some(),
        mtbf,
        optimum,
        least,
        writing,
    }
}

fn mean_time(assumed: Duration, computed: Duration, failures: u64) -> Duration {
    #[expect(clippy::cast_precision_loss, reason = "exact below 2^53")]
    let failures = failures as f64;
    from_seconds((assumed.as_secs_f64() + computed.as_secs_f64()) / (1.0 + failures))
}

fn optimum(cost: Duration, mtbf: Duration) -> Duration {
    let (c, m) = (cost.as_secs_f64(), mtbf.as_secs_f64());
    if c >= 2.0 * m {
        return mtbf;
    }
    let part = c / (2.0 * m);
    let time = (2.0 * c * m).sqrt() * (1.0 + part.sqrt() / 3.0 + part / 9.0) - c;
    from_seconds(time)
}

/// The shortest interval that keeps the overhead.
fn least(cost: Duration, max_overhead: f64) -> Duration {
    from_seconds(cost.as_secs_f64() / max_overhead)
}

/// The part of the time that snapshots of this cost take.
#[must_use]
pub fn overhead(cost: Duration, interval: Duration) -> f64 {
    let all = (cost + interval).as_secs_f64();
    if all > 0.0 {
        cost.as_secs_f64() / all
    } else {
        0.0
    }
}

/// A warning for an interval that was given and costs more than is wanted.
#[must_use]
pub fn too_dear(rules: Rules, cost: Cost, interval: Duration) -> Option<String> {
    let least = least(cost.total(), rules.max_overhead);
    let overhead = overhead(cost.total(), interval);
    (overhead > rules.max_overhead * TOO_MUCH).then(|| {
        format!(
            "snapshots take {} of the job's time, more than snapshot.max_overhead ({}): {} each, every {}; \
             use --interval auto, or an interval of at least {}",
            percent(overhead),
            format_percent(rules.max_overhead),
            rough(cost.total()),
            rough(interval),
            rough(least),
        )
    })
}

/// Computing that is lost while an image is written: `rate` is the CPU seconds a second that the job uses otherwise.
/// A job that hardly uses any, or more than before, has lost nothing that could be told.
#[must_use]
pub fn slowdown(rate: f64, window: Duration, used: Duration) -> Duration {
    /// Smallest usable rate, as a share of one CPU; below, the measurement is noise.
    const RATE_MIN: f64 = 0.1;
    if rate < RATE_MIN || window.is_zero() {
        return Duration::ZERO;
    }
    let kept = used.as_secs_f64() / (rate * window.as_secs_f64());
    window.mul_f64((1.0 - kept).clamp(0.0, 1.0))
}

/// Returns the delay of a snapshot after its time; `draw` is random from 0 to 1, `interval` the schedule's, if it has
/// one.
#[must_use]
pub fn delay(jitter: Jitter, interval: Option<Duration>, draw: f64) -> Duration {
    let most = match jitter {
        Jitter::Time(time) => time,
        Jitter::Share(share) => interval.map_or(Duration::ZERO, |interval| {
            from_seconds(interval.as_secs_f64() * share)
        }),
    };
    from_seconds(most.as_secs_f64() * draw.clamp(0.0, 1.0))
}

/// Formats a time as all messages do: `3 min 20 s`.
#[must_use]
pub fn rough(time: Duration) -> String {
    time_in_words(time.as_secs_f64())
}

/// Years of them are as good as any more.
fn from_seconds(seconds: f64) -> Duration {
    const MOST: f64 = 100.0 * 365.0 * 86_400.0;
    Duration::from_secs_f64(seconds.clamp(0.0, MOST))
}

#[cfg(test)]
mod tests;
