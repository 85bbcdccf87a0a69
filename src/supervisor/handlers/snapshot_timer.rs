//! The timer of scheduled snapshots: the schedule with its jitter, and the interval of `--interval auto`.
//!
//! This file measures the cost of snapshots and counts failures. The arithmetic is in `policy/interval`.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use xxhash_rust::xxh3::xxh3_64_with_seed;

use crate::clock;
use crate::config::{Interval, Jitter};
use crate::history;
use crate::run::image_facts::ImageFacts;
use crate::run::run_context::RunContext;
use crate::run::run_state::RunState;
use crate::run::running_job::Job;
use crate::snapshot::take_snapshot::Snapshotted;
use crate::store::{ImageEntry, Store};
use crate::supervisor::error::RunError;
use crate::supervisor::event_loop::{Supervisor, now};
use crate::supervisor::policy::interval::{self, Cost, Rules, Seen};
use crate::supervisor::policy::schedule::{Now, Schedule, Snapshotted as LastSnapshot};
use crate::sync::locked;

/// Images whose freezes are the first mean: as many as the mean remembers.
const IMAGES_ASKED: usize = 5;

/// Measurements and state of the snapshot timer.
#[derive(Debug)]
pub(crate) struct Timing {
    cost: Option<Cost>,
    /// Computing time of this run before this supervisor.
    before: Duration,
    /// The interval that was said last.
    said: Option<Duration>,
    warned: bool,
    /// Chance: the delays of this supervisor are a function of it.
    seed: u64,
    meter: Arc<Mutex<Meter>>,
}

impl Timing {
    /// Makes the timer of a run from its state and the costs of its images.
    pub fn new(context: &RunContext, state: &RunState, seed: u64) -> Self {
        let images = context.store.images().unwrap_or_default();
        Self {
            cost: cost_of(images.iter().filter(|image| state.goes_on_from(image))),
            before: Duration::from_millis(state.computed_ms),
            said: None,
            warned: false,
            seed,
            meter: Arc::default(),
        }
    }

    /// Returns the meter for the snapshot that begins now.
    pub fn meter(&self) -> Arc<Mutex<Meter>> {
        Arc::clone(&self.meter)
    }

    fn learn(&mut self, done: &Snapshotted) {
        let slowdown = lock(&self.meter).slowdown.take();
        let cost = Cost {
            freeze: done.freeze,
            slowdown: slowdown.unwrap_or_default(),
            writing: done.total.saturating_sub(done.freeze),
        };
        self.cost = Some(self.cost.map_or(cost, |mean| mean.with(cost)));
    }

    /// The moment for which the schedule is to be asked: that of a snapshot comes later by chance, so the schedule is
    /// asked as if it were earlier.
    pub fn delayed(
        &self,
        schedule: &Schedule,
        jitter: Jitter,
        last: LastSnapshot,
        now: Now,
    ) -> Now {
        let interval = match schedule {
            Schedule::Every(interval) => Some(*interval),
            Schedule::Never | Schedule::Cron(_) => None,
        };
        // One draw for each snapshot, the same however often it is asked for.
        let drawn = xxh3_64_with_seed(&last.ended.unix_ms.to_le_bytes(), self.seed) >> 11;
        #[expect(clippy::cast_precision_loss, reason = "53 bits are exact")]
        let draw = drawn as f64 / (1_u64 << 53) as f64;
        let delay = interval::delay(jitter, interval, draw);
        let ms = u64::try_from(delay.as_millis()).unwrap_or(u64::MAX);
        Now {
            monotonic: now.monotonic.checked_sub(delay).unwrap_or(now.monotonic),
            unix_ms: now.unix_ms.saturating_sub(ms),
        }
    }
}

/// The mean cost of the newest images; what they did not record is not known.
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

/// Measures, on a snapshot's thread, what writing the image slows the job down by.
#[derive(Debug, Default)]
pub(crate) struct Meter {
    /// CPU time at the end of the last snapshot, or when the job was first looked at.
    idle_from: Option<(Instant, Duration)>,
    /// CPU seconds a second while no image is written.
    rate: f64,
    released: Option<(Instant, Duration)>,
    slowdown: Option<Duration>,
}

impl Meter {
    /// The snapshot begins.
    fn begins(&mut self, at: Instant, used: Duration) {
        if let Some((since, before)) = self.idle_from {
            let passed = at.saturating_duration_since(since).as_secs_f64();
            self.rate = used.saturating_sub(before).as_secs_f64() / passed.max(f64::EPSILON);
        }
        (self.released, self.slowdown) = (None, None);
    }

    /// The image is durable.
    fn ends(&mut self, at: Instant, used: Duration) {
        if let Some((since, before)) = self.released.take()
            && self.idle_from.is_some()
        {
            let window = at.saturating_duration_since(since);
            let slowdown = interval::slowdown(self.rate, window, used.saturating_sub(before));
            self.slowdown = Some(slowdown);
        }
        self.idle_from = Some((at, used));
    }
}

/// Informs the [`Meter`] that a snapshot of the job begins. A job that cannot be inspected has exited.
pub(crate) fn snapshot_begins(meter: &Mutex<Meter>, job: &Job) {
    if let Some(used) = job.cpu_time() {
        lock(meter).begins(clock::now(), used);
    }
}

/// The job computes again.
pub(crate) fn job_released(meter: &Mutex<Meter>, job: &Job) {
    lock(meter).released = job.cpu_time().map(|used| (clock::now(), used));
}

/// The snapshot has ended.
pub(crate) fn snapshot_ends(meter: &Mutex<Meter>, job: &Job) {
    if let Some(used) = job.cpu_time() {
        lock(meter).ends(clock::now(), used);
    }
}

fn lock(meter: &Mutex<Meter>) -> std::sync::MutexGuard<'_, Meter> {
    locked(meter)
}

impl Supervisor {
    /// The schedule's answers for now: time until the next snapshot is due, and until it is to be asked again.
    pub fn schedule_now(&self) -> (Option<Duration>, Option<Duration>) {
        let jitter = self.context.config.snapshot.jitter;
        let timing = &self.background.timing;
        let at = timing.delayed(&self.schedule, jitter, self.last, now());
        (
            self.schedule.next(self.last, at),
            self.schedule.wait(self.last, at),
        )
    }

    /// A snapshot became an image: what it cost decides about the next.
    pub fn learn_cost(&mut self, done: &Snapshotted) {
        self.background.timing.learn(done);
        self.adapt_interval();
        self.remember();
    }

    /// The job, or what ran it, failed.
    pub fn learn_failure(&mut self) {
        self.state.failures = self.state.failures.saturating_add(1);
        self.adapt_interval();
    }

    /// Chooses the interval anew, says so if it is another one, and warns once of one that costs too much.
    pub fn adapt_interval(&mut self) {
        let computed = self.background.timing.before + self.background.clock.total(clock::now());
        self.state.computed_ms = u64::try_from(computed.as_millis()).unwrap_or(u64::MAX);
        let settings = &self.context.config.snapshot;
        let rules = Rules::from(settings);
        let timing = &mut self.background.timing;
        match (&settings.cron, settings.interval) {
            (Some(_), _) | (None, Interval::Never) => {}
            (None, Interval::Every(interval)) => {
                let cost = timing.cost.filter(|_| !timing.warned);
                if let Some(text) = cost.and_then(|cost| interval::too_dear(rules, cost, interval))
                {
                    timing.warned = true;
                    tracing::warn!("{text}");
                }
            }
            (None, Interval::Auto) => {
                let seen = Seen {
                    cost: timing.cost,
                    computed,
                    failures: self.state.failures,
                };
                let chosen = interval::choose(rules, seen);
                self.schedule = Schedule::Every(chosen.interval);
                if timing.said.is_none_or(|said| chosen.is_news_after(said)) {
                    timing.said = Some(chosen.interval);
                    let every = interval::rough(chosen.interval);
                    tracing::info!("interval auto: a snapshot every {every}: {chosen}");
                    self.tell(history::Event::Interval {
                        seconds: chosen.interval.as_secs_f64(),
                        why: chosen.to_string(),
                    });
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn moment(unix_ms: u64) -> Now {
        Now {
            monotonic: clock::now() + Duration::from_secs(86_400),
            unix_ms,
        }
    }

    fn timing(seed: u64) -> Timing {
        Timing {
            cost: None,
            before: Duration::ZERO,
            said: None,
            warned: false,
            seed,
            meter: Arc::default(),
        }
    }

    #[test]
    fn chance_delays_each_snapshot_once_within_its_bounds_and_spreads_a_fleet() {
        let every = Schedule::Every(Duration::from_secs(1000));
        let start = moment(1_000_000_000);
        let last = LastSnapshot::not_yet(start);
        let delay = |timing: &Timing, last| {
            let at = timing.delayed(&every, Jitter::Share(0.1), last, start);
            assert_eq!(at, timing.delayed(&every, Jitter::Share(0.1), last, start));
            start.monotonic - at.monotonic
        };
        let fleet: Vec<Duration> = (0..100).map(|seed| delay(&timing(seed), last)).collect();
        assert!(fleet.iter().all(|delay| *delay <= Duration::from_secs(100)));
        let early = fleet
            .iter()
            .filter(|delay| **delay < Duration::from_secs(50))
            .count();
        assert!((25..=75).contains(&early), "{early}");
        let next = LastSnapshot::not_yet(moment(1_000_000_001));
        assert_ne!(delay(&timing(7), last), delay(&timing(7), next));
    }

    #[test]
    fn a_delayed_snapshot_is_due_after_its_delay_and_not_before() {
        let every = Schedule::Every(Duration::from_secs(1000));
        let start = moment(1_000_000_000);
        let last = LastSnapshot::not_yet(start);
        let jitter = Jitter::Time(Duration::from_secs(100));
        let timing = timing(3);
        let delay = start.monotonic - timing.delayed(&every, jitter, last, start).monotonic;
        let left = |seconds: Duration| {
            let now = Now {
                monotonic: start.monotonic + seconds,
                unix_ms: start.unix_ms + u64::try_from(seconds.as_millis()).unwrap(),
            };
            every
                .next(last, timing.delayed(&every, jitter, last, now))
                .unwrap()
        };
        let due = Duration::from_secs(1000) + delay;
        for before in [Duration::ZERO, delay / 2, Duration::from_millis(1)] {
            assert_eq!(left(due.saturating_sub(before)), before);
        }
        assert_eq!(left(Duration::ZERO), due, "told as it will be");
    }

    #[test]
    fn a_meter_tells_what_writing_took_from_the_job() {
        let start = clock::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let used = Duration::from_secs;
        let mut meter = Meter::default();
        // The first snapshot only begins to measure.
        meter.begins(at(10), used(40));
        meter.released = Some((at(11), used(40)));
        meter.ends(at(20), used(60));
        assert_eq!(meter.slowdown, None);
        // Four CPUs for 100 s, then two of them for 10 s.
        meter.begins(at(120), used(460));
        meter.released = Some((at(121), used(460)));
        meter.ends(at(131), used(480));
        assert_eq!(meter.slowdown, Some(Duration::from_secs(5)));
    }
}
