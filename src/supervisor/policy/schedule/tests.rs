//! The schedule on two clocks that a test can set, and in zones written out.

use proptest::prelude::*;

use super::*;

/// Rules of central Europe: 2026-03-29 02:00 becomes 03:00, 2026-10-25 03:00
/// becomes 02:00. Written out, so that no zone has to be installed.
fn zone() -> TimeZone {
    TimeZone::posix("CET-1CEST,M3.5.0,M10.5.0/3").unwrap()
}

fn cron(text: &str) -> Schedule {
    Schedule::Cron(Box::new(LocalTimes {
        expression: CronExpression::parse(text).unwrap(),
        zone: zone(),
    }))
}

/// Both clocks, which a test can set; a wall clock at `text`, in UTC.
fn clock(text: &str) -> Moment {
    let wall: Timestamp = text.parse().unwrap();
    Moment {
        monotonic: crate::clock::now(),
        unix_ms: wall.as_millisecond().try_into().unwrap(),
    }
}

fn later(now: Moment, seconds: u64) -> Moment {
    Moment {
        monotonic: now.monotonic + Duration::from_secs(seconds),
        unix_ms: now.unix_ms + seconds * 1000,
    }
}

/// The wall clock set by so many seconds, the other one continuing.
fn set(now: Moment, seconds: i64) -> Moment {
    Moment {
        unix_ms: now.unix_ms.saturating_add_signed(seconds * 1000),
        ..now
    }
}

/// The first `count` times, in UTC, of a job that is snapshotted whenever due.
fn times(text: &str, from: &str, count: usize) -> Vec<String> {
    let schedule = cron(text);
    let mut now = clock(from);
    let mut found = Vec::new();
    for _ in 0..count {
        let left = schedule.next(LastSnapshot::not_yet(now), now).unwrap();
        now = later(now, left.as_secs());
        let at = Timestamp::from_millisecond(now.unix_ms.try_into().unwrap()).unwrap();
        found.push(at.strftime("%m-%d %H:%M").to_string());
    }
    found
}

const MINUTES: u64 = 60;
const HOUR: u64 = 3600;

#[test]
fn never_waits_for_something_else() {
    let now = clock("2026-01-01T00:00:00Z");
    assert_eq!(Schedule::Never.wait(LastSnapshot::not_yet(now), now), None);
}

#[test]
fn the_settings_give_the_schedule() {
    let mut settings = crate::config::Config::default().snapshot;
    let quarter = Duration::from_secs(15 * MINUTES);
    let schedule = Schedule::new(&settings, zone());
    assert!(matches!(schedule, Schedule::Every(interval) if interval == quarter));
    settings.interval = Interval::Never;
    assert!(matches!(Schedule::new(&settings, zone()), Schedule::Never));
    settings.cron = Some(CronExpression::parse("@daily").unwrap());
    assert!(matches!(
        Schedule::new(&settings, zone()),
        Schedule::Cron(_)
    ));
}

#[test]
fn an_interval_counts_from_the_end_of_a_slow_snapshot() {
    let begun = clock("2026-01-01T00:00:00Z");
    let ended = later(begun, 20 * MINUTES);
    let schedule = Schedule::Every(Duration::from_secs(15 * MINUTES));
    let last = LastSnapshot {
        begun,
        ended,
        failures: 0,
    };
    let quarter = Duration::from_secs(15 * MINUTES);
    assert_eq!(schedule.wait(last, ended), Some(quarter));
    let due = later(ended, 15 * MINUTES);
    assert_eq!(schedule.wait(last, due), Some(Duration::ZERO));
}

#[test]
fn an_interval_does_not_notice_the_clock_being_set() {
    let start = clock("2026-01-01T00:00:00Z");
    let schedule = Schedule::Every(Duration::from_secs(15 * MINUTES));
    for seconds in [-86_400, 86_400] {
        let now = set(later(start, MINUTES), seconds);
        let left = schedule.next(LastSnapshot::not_yet(start), now).unwrap();
        assert_eq!(left, Duration::from_secs(14 * MINUTES));
    }
}

#[test]
fn a_missed_interval_is_due_once() {
    let start = clock("2026-01-01T00:00:00Z");
    let schedule = Schedule::Every(Duration::from_secs(MINUTES));
    let late = later(start, HOUR);
    let last = LastSnapshot::not_yet(start);
    assert_eq!(schedule.next(last, late), Some(Duration::ZERO));
    let last = LastSnapshot::not_yet(late);
    assert_eq!(schedule.next(last, late), Some(Duration::from_secs(60)));
}

#[test]
fn cron_times_are_local() {
    assert_eq!(
        times("0 3 * * *", "2026-01-01T00:00:00Z", 2),
        ["01-01 02:00", "01-02 02:00"]
    );
    assert_eq!(
        times("30 0 3 * * *", "2026-07-01T00:00:00Z", 1),
        ["07-01 01:00"]
    );
}

#[test]
fn day_and_weekday_together_are_either() {
    assert_eq!(
        times("0 12 1 * mon", "2026-02-28T12:00:00Z", 3),
        ["03-01 11:00", "03-02 11:00", "03-09 11:00"]
    );
}

#[test]
fn a_wait_for_local_time_looks_at_the_clock_every_minute() {
    let now = clock("2026-01-01T00:00:00Z");
    let last = LastSnapshot::not_yet(now);
    let schedule = cron("0 3 * * *");
    assert_eq!(
        schedule.next(last, now),
        Some(Duration::from_secs(2 * HOUR))
    );
    assert_eq!(schedule.wait(last, now), Some(LOOK_AT_CLOCK));
    let soon = later(now, 2 * HOUR - 5);
    assert_eq!(schedule.wait(last, soon), Some(Duration::from_secs(5)));
    let due = later(now, 2 * HOUR);
    assert_eq!(schedule.wait(last, due), Some(Duration::ZERO));
}

#[test]
fn pause_after_failures_doubles_up_to_an_hour_until_a_success() {
    let now = clock("2026-01-01T00:00:30Z");
    let waits = |schedule: &Schedule, failures: &[u32]| {
        let failed = |failures: &u32| LastSnapshot {
            failures: *failures,
            ..LastSnapshot::not_yet(now)
        };
        let wait = |failures| schedule.next(failed(failures), now).unwrap().as_secs();
        failures.iter().map(wait).collect::<Vec<_>>()
    };
    let failures = [0, 1, 2, 3, 4, 40, u32::MAX];
    let every = |seconds| Schedule::Every(Duration::from_secs(seconds));
    assert_eq!(
        waits(&every(900), &failures),
        [900, 900, 1800, 3600, 3600, 3600, 3600]
    );
    assert_eq!(waits(&every(2 * HOUR), &failures), [2 * HOUR; 7]);
    let minutely = waits(&cron("* * * * *"), &failures);
    assert_eq!(minutely, [30, 60, 120, 240, 480, 3600, 3600]);
}

#[test]
fn missed_cron_times_run_once_late() {
    let start = clock("2026-01-01T00:00:00Z");
    let schedule = cron("*/10 * * * *");
    // A suspended machine: the wall clock continues, the monotonic one does not.
    let woken = set(start, 5 * 3600 + 61);
    let last = LastSnapshot::not_yet(start);
    assert_eq!(schedule.wait(last, woken), Some(Duration::ZERO));
    let last = LastSnapshot {
        begun: woken,
        ended: later(woken, 30),
        failures: 0,
    };
    let left = schedule.next(last, last.ended).unwrap();
    assert_eq!(left, Duration::from_secs(10 * MINUTES - 91));
}

#[test]
fn times_that_pass_during_a_snapshot_do_not_follow_it_at_once() {
    let begun = clock("2026-01-01T00:10:00Z");
    let ended = later(begun, 25 * MINUTES);
    let left = cron("*/10 * * * *").next(
        LastSnapshot {
            begun,
            ended,
            failures: 0,
        },
        ended,
    );
    assert_eq!(left, Some(Duration::from_secs(5 * MINUTES)));
}

#[test]
fn a_clock_set_back_does_not_fire_twice() {
    let fired = clock("2026-01-01T02:00:00Z");
    let schedule = cron("0 3 * * *");
    for during in [0, 600] {
        // Set back by an hour, right after the snapshot or while it was taken.
        let ended = set(later(fired, 10), -during);
        let last = LastSnapshot {
            begun: fired,
            ended,
            failures: 0,
        };
        let now = set(later(fired, 20), -3600);
        let again = later(now, HOUR);
        assert_ne!(schedule.next(last, again), Some(Duration::ZERO));
        let tomorrow = later(fired, 24 * HOUR);
        assert_eq!(schedule.next(last, tomorrow), Some(Duration::ZERO));
    }
}

#[test]
fn a_clock_put_right_by_years_does_not_end_the_schedule() {
    let wrong = clock("2035-06-01T00:00:00Z");
    let right = Moment {
        monotonic: wrong.monotonic + Duration::from_secs(60),
        ..clock("2026-01-01T00:01:00Z")
    };
    let schedule = cron("0 3 * * *");
    let last = LastSnapshot::not_yet(wrong);
    let left = schedule.next(last, right).unwrap();
    assert_eq!(left, Duration::from_secs(2 * HOUR - 60));
    let due = schedule.next(last, later(right, 2 * HOUR - 60));
    assert_eq!(due, Some(Duration::ZERO));
}

#[test]
fn a_fixed_time_in_the_missing_hour_runs_at_its_end() {
    assert_eq!(
        times("30 2 * * *", "2026-03-28T00:00:00Z", 3),
        ["03-28 01:30", "03-29 01:00", "03-30 00:30"]
    );
    assert_eq!(
        times("0,20,40 2 * * *", "2026-03-29T00:00:00Z", 2),
        ["03-29 01:00", "03-30 00:00"]
    );
}

#[test]
fn a_fixed_time_in_the_repeated_hour_runs_once() {
    assert_eq!(
        times("30 2 * * *", "2026-10-24T12:00:00Z", 2),
        ["10-25 00:30", "10-26 01:30"]
    );
    // Asked for by hand in the second pass: the time has been.
    assert_eq!(
        times("30 2 * * *", "2026-10-25T01:10:00Z", 1),
        ["10-26 01:30"]
    );
    assert_eq!(
        times("0 3 * * *", "2026-10-25T01:10:00Z", 1),
        ["10-25 02:00"]
    );
}

#[test]
fn every_hour_includes_the_repeated_and_not_the_missing_one() {
    assert_eq!(
        times("30 * * * *", "2026-10-24T23:40:00Z", 3),
        ["10-25 00:30", "10-25 01:30", "10-25 02:30"]
    );
    assert_eq!(
        times("30 * * * *", "2026-03-29T00:00:00Z", 3),
        ["03-29 00:30", "03-29 01:30", "03-29 02:30"]
    );
    assert_eq!(
        times("0 * * * *", "2026-10-25T00:00:00Z", 2),
        ["10-25 01:00", "10-25 02:00"]
    );
}

#[test]
fn a_year_that_is_over_leaves_nothing_to_wait_for() {
    let now = clock("2026-01-01T00:00:00Z");
    let schedule = cron("0 0 3 * * * 2025");
    assert_eq!(schedule.wait(LastSnapshot::not_yet(now), now), None);
}

proptest! {
    #[test]
    fn a_snapshot_when_due_is_never_due_again_at_once(
        text in proptest::sample::select(vec![
            "* * * * *", "30 2 * * *", "*/20 * * * mon", "0 0-5 1 * 3", "15 2,3 25-31 3,10 *",
        ]),
        second in 1_700_000_000_u64..2_000_000_000,
    ) {
        let schedule = cron(text);
        let start = Moment { monotonic: crate::clock::now(), unix_ms: second * 1000 + 999 };
        let left = schedule.next(LastSnapshot::not_yet(start), start).unwrap();
        prop_assert!(!left.is_zero());
        let due = Moment {
            monotonic: start.monotonic + left,
            unix_ms: start.unix_ms + u64::try_from(left.as_millis()).unwrap(),
        };
        prop_assert_eq!(schedule.next(LastSnapshot::not_yet(start), due), Some(Duration::ZERO));
        let next = schedule.next(LastSnapshot::not_yet(due), due).unwrap();
        prop_assert!(next >= Duration::from_secs(60));
    }
}

/// Minutes after which to look, most of them near a change of the offset in 2026.
fn any_minute() -> impl Strategy<Value = i64> {
    let changes = [
        "2026-03-29T01:00:00Z",
        "2026-10-25T01:00:00Z",
        "2026-04-04T15:00:00Z",
        "2026-10-03T15:30:00Z",
    ];
    let near = changes.map(|text| text.parse::<Timestamp>().unwrap().as_second());
    (proptest::sample::select(near.to_vec()), -300..300_i64)
        .prop_map(|(change, minutes)| change + minutes * 60)
}

/// The next time, found by trying every minute of three days.
fn by_trying(schedule: &cron::Schedule, zone: &TimeZone, after: i64) -> Option<i64> {
    let at = |unix| Timestamp::from_second(unix).unwrap();
    let offset = |unix| i64::from(zone.to_offset(at(unix)).seconds());
    let holds = |local| {
        let local = chrono::DateTime::from_timestamp(local, 0).unwrap();
        schedule.includes(local)
    };
    (1..3 * 24 * 60)
        .map(|minute| after + minute * 60)
        .find(|&unix| {
            let local = unix + offset(unix);
            if schedule.hours().is_all() {
                return holds(local);
            }
            let has_been = (1..180).any(|ago| unix - ago * 60 + offset(unix - ago * 60) == local);
            let left_out = unix - 60 + offset(unix - 60) + 60;
            (holds(local) && !has_been) || (left_out..local).step_by(60).any(holds)
        })
}

proptest! {
    // Each case tries thousands of minutes.
    #![proptest_config(ProptestConfig::with_cases(48))]
    #[test]
    fn every_minute_around_a_change_agrees_with_trying_them_all(
        zone in proptest::sample::select(vec![
            "CET-1CEST,M3.5.0,M10.5.0/3",
            // Half an hour of summer time, in the southern summer.
            "<+1030>-10:30<+11>-11,M10.1.0,M4.1.0",
        ]),
        text in proptest::sample::select(vec![
            "*/7 * * * *", "30 * * * *", "30 2 * * *", "0 3 * * *", "*/20 1-3 * * *",
            "15 1,2 * * *", "0 2 * * *", "45 1 * * sun",
        ]),
        after in any_minute(),
    ) {
        let times = LocalTimes {
            expression: CronExpression::parse(text).unwrap(),
            zone: TimeZone::posix(zone).unwrap(),
        };
        let tried = by_trying(&times.expression.schedules()[0], &times.zone, after);
        prop_assume!(tried.is_some());
        let after_ms = u64::try_from(after * 1000).unwrap();
        let found = times.next_after_ms(after_ms).map(|ms| i64::try_from(ms / 1000).unwrap());
        prop_assert_eq!(found, tried);
    }
}
