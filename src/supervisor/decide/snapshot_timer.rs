//! Timer of scheduled snapshots: the schedule with its jitter, and the interval of `--interval auto`.
//!
//! This file adds up the cost of snapshots and counts failures. The arithmetic is in `policy/interval`.

use std::time::Duration;

use xxhash_rust::xxh3::xxh3_64_with_seed;

use super::state_machine::Machine;
use crate::config::{self, Interval};
use crate::run::image_facts::ImageFacts;
use crate::run::run_state::RunState;
use crate::snapshot::error::SnapshotError;
use crate::snapshot::take_snapshot::Snapshotted;
use crate::store::{ImageEntry, Store};
use crate::supervisor::error::RunError;
use crate::supervisor::notice::Notice;
use crate::supervisor::policy::interval::{self, Cost, Rules, Seen};
use crate::supervisor::policy::schedule::{LastSnapshot, Moment, Schedule};

/// Number of images whose freezes are the first mean: as many as the mean remembers.
const IMAGES_ASKED: usize = 5;

/// Measurements and state of the snapshot timer.
#[derive(Debug)]
pub(crate) struct SnapshotTimer {
    schedule: Schedule,
    jitter: config::Jitter,
    last: LastSnapshot,
    cost: Option<Cost>,
    /// Computing time of this run before this supervisor.
    before: Duration,
    /// The interval that was reported last.
    reported: Option<Duration>,
    /// True if the cost of the configured interval was reported.
    warned: bool,
    /// Random number: the delays of this supervisor are a function of it.
    seed: u64,
}

impl SnapshotTimer {
    /// Makes the timer of a run from its state and the costs of its images.
    pub fn new(
        settings: &config::Snapshot,
        state: &RunState,
        images: &[ImageEntry],
        seed: u64,
        now: Moment,
    ) -> Self {
        Self {
            schedule: Schedule::new(settings, jiff::tz::TimeZone::system()),
            jitter: settings.jitter,
            last: LastSnapshot::not_yet(now),
            cost: cost_of(images.iter().filter(|image| state.goes_on_from(image))),
            before: Duration::from_millis(state.computed_ms),
            reported: None,
            warned: false,
            seed,
        }
    }

    pub fn begin_anew(&mut self, now: Moment) {
        self.last = LastSnapshot::not_yet(now);
    }

    /// Leaves out a time in which nothing computed and no timer ran.
    pub fn skip(&mut self, stopped: Duration) {
        self.last.ended.monotonic += stopped;
    }

    /// Notes the end of a snapshot. One that a hook called off is no failure.
    pub fn ended(&mut self, begun: Moment, ended: Moment, error: Option<&SnapshotError>) {
        let failures = match error {
            None => 0,
            Some(SnapshotError::Vetoed) => self.last.failures,
            Some(_) => self.last.failures.saturating_add(1),
        };
        self.last = LastSnapshot {
            begun,
            ended,
            failures,
        };
    }

    pub fn failures(&self) -> u32 {
        self.last.failures
    }

    /// Notes the cost of a snapshot. `slowdown` is the computing time that writing the image took from the job.
    pub fn learn(&mut self, done: &Snapshotted, slowdown: Duration) {
        let cost = Cost {
            freeze: done.freeze,
            slowdown,
            writing: done.total.saturating_sub(done.freeze),
        };
        self.cost = Some(self.cost.map_or(cost, |mean| mean.with(cost)));
    }

    pub fn next(&self, now: Moment) -> Option<Duration> {
        self.schedule.next(self.last, self.delayed(now))
    }

    /// Returns the time until the schedule is to be asked again.
    pub fn wait(&self, now: Moment) -> Option<Duration> {
        self.schedule.wait(self.last, self.delayed(now))
    }

    /// Returns the time from the next scheduled snapshot to the one after it, if it took no time.
    pub fn interval(&self, now: Moment) -> Option<Duration> {
        let wait = self.schedule.next(LastSnapshot::not_yet(now), now)?;
        let ms = u64::try_from(wait.as_millis()).ok()?;
        let then = Moment {
            monotonic: now.monotonic.checked_add(wait)?,
            unix_ms: now.unix_ms.checked_add(ms)?,
        };
        self.schedule.next(LastSnapshot::not_yet(then), then)
    }

    /// Returns the moment for which the schedule is asked: a random delay earlier, so that the snapshot comes later by
    /// that delay.
    fn delayed(&self, now: Moment) -> Moment {
        let interval = match self.schedule {
            Schedule::Every(interval) => Some(interval),
            Schedule::Never | Schedule::Cron(_) => None,
        };
        // One draw for each snapshot, the same however often it is asked for.
        let drawn = xxh3_64_with_seed(&self.last.ended.unix_ms.to_le_bytes(), self.seed) >> 11;
        #[expect(clippy::cast_precision_loss, reason = "53 bits are exact")]
        let draw = drawn as f64 / (1_u64 << 53) as f64;
        let delay = interval::delay(self.jitter, interval, draw);
        let ms = u64::try_from(delay.as_millis()).unwrap_or(u64::MAX);
        Moment {
            monotonic: now.monotonic.checked_sub(delay).unwrap_or(now.monotonic),
            unix_ms: now.unix_ms.saturating_sub(ms),
        }
    }
}

impl Machine {
    /// Chooses the interval anew, reports it if it changed, and reports once if snapshots cost too much.
    pub(super) fn adapt_interval(&mut self) {
        let computed = self.timer.before + self.clock.total(self.now.monotonic());
        self.state.computed_ms = u64::try_from(computed.as_millis()).unwrap_or(u64::MAX);
        let settings = &self.settings.snapshot;
        let rules = Rules::from(settings);
        let timer = &mut self.timer;
        match (&settings.cron, settings.interval) {
            (Some(_), _) | (None, Interval::Never) => {}
            (None, Interval::Every(interval)) => {
                let cost = timer.cost.filter(|_| !timer.warned);
                if let Some(text) = cost.and_then(|cost| interval::too_dear(rules, cost, interval))
                {
                    timer.warned = true;
                    self.notify(Notice::TooDear(text));
                }
            }
            (None, Interval::Auto) => {
                let seen = Seen {
                    cost: timer.cost,
                    computed,
                    failures: self.state.failures,
                };
                let chosen = interval::choose(rules, seen);
                timer.schedule = Schedule::Every(chosen.interval);
                if timer
                    .reported
                    .is_none_or(|reported| chosen.is_news_after(reported))
                {
                    timer.reported = Some(chosen.interval);
                    self.notify(Notice::Interval(chosen));
                }
            }
        }
    }
}

/// Returns the mean cost of the newest images, as far as it was recorded.
fn cost_of<'a>(images: impl DoubleEndedIterator<Item = &'a ImageEntry>) -> Option<Cost> {
    let mut freezes: Vec<Duration> = images
        .rev()
        .filter_map(|image| serde_json::from_slice::<ImageFacts>(&image.meta).ok())
        .filter_map(|facts| Duration::try_from_secs_f64(facts.freeze_seconds).ok())
        .take(IMAGES_ASKED)
        .collect();
    freezes.reverse();
    let costs = freezes.into_iter().map(|freeze| Cost {
        freeze,
        slowdown: Duration::ZERO,
        writing: Duration::ZERO,
    });
    costs.reduce(Cost::with)
}

/// Returns a store's measurements of its run, for `ckpt-run plan`.
///
/// # Errors
/// When the store or the run's state cannot be read.
pub fn seen_in(store: &Store) -> Result<Seen, RunError> {
    let Some(state) = RunState::load(store.path())? else {
        return Ok(Seen::default());
    };
    let images = store.images()?;
    Ok(Seen {
        cost: cost_of(images.iter().filter(|image| state.goes_on_from(image))),
        computed: Duration::from_millis(state.computed_ms),
        failures: state.failures,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock;
    use crate::config::Jitter;

    fn moment(unix_ms: u64) -> Moment {
        Moment {
            monotonic: clock::now() + Duration::from_secs(86_400),
            unix_ms,
        }
    }

    fn timer(interval: u64, jitter: Jitter, last: LastSnapshot, seed: u64) -> SnapshotTimer {
        SnapshotTimer {
            schedule: Schedule::Every(Duration::from_secs(interval)),
            jitter,
            last,
            cost: None,
            before: Duration::ZERO,
            reported: None,
            warned: false,
            seed,
        }
    }

    #[test]
    fn jitter_delays_each_snapshot_once_and_spreads_a_fleet() {
        let start = moment(1_000_000_000);
        let last = LastSnapshot::not_yet(start);
        let delay = |seed, last| {
            let timer = timer(1000, Jitter::Share(0.1), last, seed);
            let at = timer.delayed(start);
            assert_eq!(at, timer.delayed(start));
            start.monotonic - at.monotonic
        };
        let fleet: Vec<Duration> = (0..100).map(|seed| delay(seed, last)).collect();
        assert!(fleet.iter().all(|delay| *delay <= Duration::from_secs(100)));
        let early = fleet
            .iter()
            .filter(|delay| **delay < Duration::from_secs(50))
            .count();
        assert!((25..=75).contains(&early), "{early}");
        let next = LastSnapshot::not_yet(moment(1_000_000_001));
        assert_ne!(delay(7, last), delay(7, next));
    }

    #[test]
    fn a_delayed_snapshot_is_due_after_its_delay_and_not_before() {
        let start = moment(1_000_000_000);
        let last = LastSnapshot::not_yet(start);
        let timer = timer(1000, Jitter::Time(Duration::from_secs(100)), last, 3);
        let delay = start.monotonic - timer.delayed(start).monotonic;
        let left = |seconds: Duration| {
            let now = Moment {
                monotonic: start.monotonic + seconds,
                unix_ms: start.unix_ms + u64::try_from(seconds.as_millis()).unwrap(),
            };
            timer.next(now).unwrap()
        };
        let due = Duration::from_secs(1000) + delay;
        for before in [Duration::ZERO, delay / 2, Duration::from_millis(1)] {
            assert_eq!(left(due.saturating_sub(before)), before);
        }
        assert_eq!(left(Duration::ZERO), due, "told as it will be");
    }
}
