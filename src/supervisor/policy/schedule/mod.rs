//! The time of the next snapshot: a pure function of the schedule, the last snapshot and the present time.
//!
//! Intervals count monotonic time from the end of the last snapshot, so neither a
//! slow snapshot nor a suspended machine is followed by a burst. After failures in a
//! row the pause doubles each time, up to an hour. Cron expressions
//! count local time from the last snapshot: times that passed since then are one
//! snapshot, late. Waiting itself is the supervisor's loop, which asks
//! [`Schedule::wait`] again each time it wakes.
//!
//! Where local time is not a straight line:
//! ```text
//! the clock jumps forward   what was missed runs once, at once
//! set back up to 3 h        the times that come again are not run again
//! set back further          a wrong clock was put right: the new one counts
//! summer time begins        fixed times in the hour that is missing run at its end
//! summer time ends          fixed times in the hour that comes twice run the first
//!                           time; expressions with `*` for the hour run both times
//! ```

use std::time::{Duration, Instant};

use cron::TimeUnitSpec;
use jiff::Timestamp;
use jiff::tz::{AmbiguousOffset, TimeZone};

use super::interval::{Rules, Seen, choose};
use crate::config::{CronExpression, Interval, Snapshot};

/// Limit on the delay until a wait for local time notices that the clock was set.
const LOOK_AT_CLOCK: Duration = Duration::from_secs(60);
/// Longest step back of the clock that is waited out, as in cron(8): a larger one is a correction.
const SIT_OUT_MS_MAX: u64 = 3 * 3600 * 1000;
/// Twice a year until 2100, where crate `cron` ends, and room for odd zones.
const TRANSITIONS_MAX: usize = 1000;

/// Longest pause after failures, unless the interval is longer: what keeps a job from being snapshotted often lasts
/// as long as the job, and each attempt costs it a little time.
const PAUSE_MAX: Duration = Duration::from_secs(3600);
/// Pause after the first failure of a cron schedule: its finest step without seconds.
const CRON_PAUSE: Duration = Duration::from_secs(60);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Moment {
    pub monotonic: Instant,
    /// The wall clock, milliseconds since 1970 UTC.
    pub unix_ms: u64,
}

/// The last attempt at a snapshot, failed or not; before the first one, the
/// moment from which the job has been running.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LastSnapshot {
    pub begun: Moment,
    /// Time of its end, when the job computed again.
    pub ended: Moment,
    /// Number of failures in a row, this one included; 0 after a success.
    pub failures: u32,
}

impl LastSnapshot {
    /// No snapshot yet: the job started, or was restored, now.
    #[must_use]
    pub fn not_yet(now: Moment) -> Self {
        Self {
            begun: now,
            ended: now,
            failures: 0,
        }
    }

    /// Time after its end that must pass before another is tried without being asked for.
    fn pause(self, interval: Duration) -> Duration {
        let Some(doublings) = self.failures.checked_sub(1) else {
            return Duration::ZERO;
        };
        let longest = PAUSE_MAX.max(interval);
        let factor = 1_u32.checked_shl(doublings).filter(|factor| *factor > 0);
        factor.map_or(longest, |factor| {
            interval.saturating_mul(factor).min(longest)
        })
    }
}

#[derive(Debug, Clone)]
pub enum Schedule {
    Never,
    /// This long after the end of the last one.
    Every(Duration),
    /// Snapshots at local times.
    Cron(Box<LocalTimes>),
}

#[derive(Debug, Clone)]
pub struct LocalTimes {
    expression: CronExpression,
    zone: TimeZone,
}

impl Schedule {
    /// The schedule of the settings; `zone` is where cron's times are local.
    #[must_use]
    pub fn new(settings: &Snapshot, zone: TimeZone) -> Self {
        if let Some(expression) = settings.cron.clone() {
            return Self::Cron(Box::new(LocalTimes { expression, zone }));
        }
        match settings.interval {
            Interval::Never => Self::Never,
            Interval::Auto => Self::Every(choose(Rules::from(settings), Seen::default()).interval),
            Interval::Every(time) => Self::Every(time),
        }
    }

    /// Time until the next snapshot, zero when it is due; `None` when there is none.
    #[must_use]
    pub fn next(&self, last: LastSnapshot, now: Moment) -> Option<Duration> {
        let (now_at, ended) = (now.monotonic, last.ended.monotonic);
        let left = |wait: Duration| {
            // `now` may be before the end: of a delayed snapshot it is asked for as if it were earlier.
            let early = ended.saturating_duration_since(now_at);
            let passed = now_at.saturating_duration_since(ended);
            wait.saturating_add(early).saturating_sub(passed)
        };
        match self {
            Self::Never => None,
            Self::Every(interval) => Some(left(last.pause(*interval).max(*interval))),
            Self::Cron(times) => {
                let due_ms = times.next_after_ms(counted_from_ms(last, now))?;
                let due = Duration::from_millis(due_ms.saturating_sub(now.unix_ms));
                Some(due.max(left(last.pause(CRON_PAUSE))))
            }
        }
    }

    /// Returns the time to sleep before the next call; zero when a snapshot is due, `None` to sleep until another
    /// event.
    #[must_use]
    pub fn wait(&self, last: LastSnapshot, now: Moment) -> Option<Duration> {
        let left = self.next(last, now)?;
        match self {
            Self::Never | Self::Every(_) => Some(left),
            Self::Cron(_) => Some(left.min(LOOK_AT_CLOCK)),
        }
    }
}

/// The wall-clock time after which cron's times count, in milliseconds.
fn counted_from_ms(last: LastSnapshot, now: Moment) -> u64 {
    // The later of the two: a clock set back during the snapshot repeats nothing.
    let last_ms = last.begun.unix_ms.max(last.ended.unix_ms);
    let passed = now
        .monotonic
        .saturating_duration_since(last.ended.monotonic);
    let passed_ms = u64::try_from(passed.as_millis()).unwrap_or(u64::MAX);
    let set_back_ms = last_ms
        .saturating_add(passed_ms)
        .saturating_sub(now.unix_ms);
    if set_back_ms > SIT_OUT_MS_MAX {
        now.unix_ms.saturating_sub(passed_ms)
    } else {
        last_ms
    }
}

/// Arithmetic in whole seconds: `unix` counts since 1970 UTC, `local` as a wall clock would, which is `unix` plus the
/// zone's offset at that time.
impl LocalTimes {
    fn next_after_ms(&self, after_ms: u64) -> Option<u64> {
        let after = i64::try_from(after_ms / 1000).ok()?;
        let due = self.expression.schedules().iter().filter_map(|schedule| {
            if schedule.hours().is_all() {
                self.next_of_every_hour(schedule, after)
            } else {
                self.next_of_fixed_hours(schedule, after)
            }
        });
        u64::try_from(due.min()?).ok()?.checked_mul(1000)
    }

    /// Goes from one change of the offset to the next: in between, local time is a
    /// straight line, and an hour that comes twice is two such pieces.
    fn next_of_every_hour(&self, schedule: &cron::Schedule, after: i64) -> Option<i64> {
        let mut piece = after;
        let mut local = after + self.offset(after)?;
        for _ in 0..TRANSITIONS_MAX {
            let due = next_local(schedule, local)? - self.offset(piece)?;
            match self.next_transition(piece) {
                Some(transition) if transition <= due => {
                    piece = transition;
                    // The first second of the piece counts too.
                    local = transition + self.offset(transition)? - 1;
                }
                Some(_) | None => return Some(due),
            }
        }
        None
    }

    /// Takes each local time once, however often it occurs.
    fn next_of_fixed_hours(&self, schedule: &cron::Schedule, after: i64) -> Option<i64> {
        let local = after + self.offset(after)?;
        let repeated = after - self.first_unix(local)?;
        let has_been = if repeated == 0 {
            local
        } else {
            // In the second pass of an hour that comes twice, all of it has been.
            let second_pass = self.last_transition(after)?;
            second_pass + self.offset(second_pass)? + repeated - 1
        };
        self.first_unix(next_local(schedule, has_been)?)
    }

    /// Returns the first occurrence of a local time; for a skipped one, the time at which it would be over.
    fn first_unix(&self, local: i64) -> Option<i64> {
        let civil = TimeZone::UTC.to_datetime(Timestamp::from_second(local).ok()?);
        match self.zone.to_ambiguous_timestamp(civil).offset() {
            AmbiguousOffset::Unambiguous { offset }
            | AmbiguousOffset::Fold { before: offset, .. } => {
                Some(local - i64::from(offset.seconds()))
            }
            AmbiguousOffset::Gap { before, .. } => {
                self.last_transition(local - i64::from(before.seconds()))
            }
        }
    }

    /// The last change of the offset, at `unix` or before.
    fn last_transition(&self, unix: i64) -> Option<i64> {
        let past = Timestamp::from_second(unix + 1).ok()?;
        let last = self.zone.preceding(past).next()?;
        Some(last.timestamp().as_second())
    }

    fn offset(&self, unix: i64) -> Option<i64> {
        let at = Timestamp::from_second(unix).ok()?;
        Some(self.zone.to_offset(at).seconds().into())
    }

    fn next_transition(&self, unix: i64) -> Option<i64> {
        let at = Timestamp::from_second(unix).ok()?;
        let next = self.zone.following(at).next()?;
        Some(next.timestamp().as_second())
    }
}

/// The first time of a schedule after `local`. Crate `cron` is only ever told of
/// UTC, in which every time is there exactly once.
fn next_local(schedule: &cron::Schedule, local: i64) -> Option<i64> {
    let after = chrono::DateTime::from_timestamp(local, 0)?;
    schedule.after(&after).next().map(|next| next.timestamp())
}

#[cfg(test)]
mod tests;
