//! The arithmetic of intervals: known values, and what holds for all.

use proptest::prelude::*;

use super::*;

const HOUR: Duration = Duration::from_secs(3600);

fn seconds(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

fn rules(mtbf: Duration, max_overhead: f64) -> Rules {
    Rules { mtbf, max_overhead }
}

fn seen(freeze: Duration, writing: Duration) -> Seen {
    Seen {
        cost: Some(Cost {
            freeze,
            slowdown: Duration::ZERO,
            writing,
        }),
        ..Seen::default()
    }
}

#[test]
fn the_optimum_is_dalys() {
    // sqrt(2 * 10 * 21600) = 657.27; with the two further terms 660.6, less the cost 650.65.
    let chosen = choose(rules(6 * HOUR, 0.5), seen(seconds(10), seconds(1)));
    assert!(
        (chosen.interval.as_secs_f64() - 650.61).abs() < 0.1,
        "{chosen:?}"
    );
    assert_eq!(chosen.reason, Reason::Optimum);
    // With a small cost it is Young's.
    let chosen = choose(
        rules(6 * HOUR, 0.5),
        seen(Duration::from_millis(100), Duration::ZERO),
    );
    assert!(
        (chosen.interval.as_secs_f64() - 65.7).abs() < 0.1,
        "{chosen:?}"
    );
}

#[test]
fn interval_of_costly_snapshots_is_the_time_between_failures() {
    let chosen = choose(rules(seconds(60), 0.5), seen(seconds(200), Duration::ZERO));
    assert_eq!(chosen.optimum, seconds(60));
}

#[test]
fn failures_shorten_the_mean_time_and_quiet_hours_lengthen_it() {
    let time = |computed, failures| mean_time(6 * HOUR, computed, failures);
    assert_eq!(time(Duration::ZERO, 0), 6 * HOUR);
    assert_eq!(time(24 * HOUR, 0), 30 * HOUR);
    assert_eq!(time(4 * HOUR, 4), 2 * HOUR);
    // After many it is what was seen: one an hour.
    let seen = time(1000 * HOUR, 1000).as_secs_f64();
    assert!((seen / 3600.0 - 1.0).abs() < 0.01);
}

#[test]
fn the_overhead_and_the_writing_are_bounds_from_below() {
    let chosen = choose(rules(6 * HOUR, 0.01), seen(seconds(20), seconds(1)));
    assert_eq!(
        (chosen.interval, chosen.reason),
        (seconds(2000), Reason::Overhead)
    );
    let chosen = choose(rules(6 * HOUR, 0.5), seen(seconds(1), seconds(1000)));
    assert_eq!(
        (chosen.interval, chosen.reason),
        (seconds(1000), Reason::Writing)
    );
}

#[test]
fn intervals_stay_between_the_shortest_and_the_longest() {
    let chosen = choose(
        rules(seconds(60), 0.5),
        seen(Duration::from_millis(1), Duration::ZERO),
    );
    assert_eq!(
        (chosen.interval, chosen.reason),
        (SHORTEST, Reason::Shortest)
    );
    let chosen = choose(rules(8000 * HOUR, 0.5), seen(seconds(60), Duration::ZERO));
    assert_eq!((chosen.interval, chosen.reason), (LONGEST, Reason::Longest));
    // What is given bounds more than that.
    let chosen = choose(
        rules(8000 * HOUR, 0.0001),
        seen(seconds(10), Duration::ZERO),
    );
    assert_eq!(
        (chosen.interval, chosen.reason),
        (seconds(100_000), Reason::Overhead)
    );
}

#[test]
fn before_the_first_snapshot_its_cost_is_assumed_and_said_to_be() {
    let chosen = choose(rules(6 * HOUR, 0.05), Seen::default());
    assert!(!chosen.measured);
    assert!(chosen.to_string().contains("(assumed)"), "{chosen}");
}

#[test]
fn only_a_change_by_a_fifth_is_news() {
    let chosen = choose(rules(6 * HOUR, 0.5), seen(seconds(10), Duration::ZERO));
    let near = |factor| chosen.is_news_after(chosen.interval.mul_f64(factor));
    assert_eq!(
        [1.0, 1.15, 0.9, 1.3, 0.5].map(near),
        [false, false, false, true, true]
    );
}

#[test]
fn warning_about_a_costly_interval_names_a_remedy() {
    let cost = seen(seconds(6), Duration::ZERO).cost.unwrap();
    assert_eq!(too_dear(rules(HOUR, 0.01), cost, seconds(600)), None);
    let warning = too_dear(rules(HOUR, 0.01), cost, seconds(60)).unwrap();
    for part in [
        "take 9.1 %",
        "(1%)",
        "6.0 s each, every 1 min",
        "at least 10 min",
    ] {
        assert!(warning.contains(part), "{warning}");
    }
}

#[test]
fn interval_near_the_wanted_overhead_gives_no_warning() {
    let cost = seen(seconds(1), Duration::ZERO).cost.unwrap();
    let warning = |interval| too_dear(rules(HOUR, 0.05), cost, Duration::from_secs_f64(interval));
    for interval in [20.0, 19.5, 19.0, 18.9, 17.5] {
        assert_eq!(warning(interval), None, "{interval}");
    }
    assert!(warning(17.0).unwrap().contains("take 5.6 %"));
}

#[test]
fn slowdown_to_half_costs_half_of_the_writing_time() {
    assert_eq!(slowdown(4.0, seconds(10), seconds(20)), seconds(5));
    assert_eq!(slowdown(4.0, seconds(10), seconds(50)), Duration::ZERO);
    // It waits for a GPU, most of the time: nothing can be told.
    assert_eq!(slowdown(0.05, seconds(10), Duration::ZERO), Duration::ZERO);
}

#[test]
fn a_delay_is_a_part_of_the_interval_or_a_time() {
    let interval = Some(seconds(1000));
    assert_eq!(delay(Jitter::Share(0.1), interval, 0.5), seconds(50));
    assert_eq!(delay(Jitter::Time(seconds(30)), interval, 0.5), seconds(15));
    assert_eq!(delay(Jitter::Share(0.1), None, 0.5), Duration::ZERO);
    assert_eq!(delay(Jitter::Time(seconds(30)), None, 1.0), seconds(30));
}

#[test]
fn times_are_as_exact_as_they_are_short() {
    let shown = [1.2345, 75.4, 7290.0].map(|time| rough(Duration::from_secs_f64(time)));
    assert_eq!(shown, ["1.2 s", "1 min 15 s", "2 h 2 min"]);
}

fn any_time(most: u64) -> impl Strategy<Value = Duration> {
    (0..=most * 1000).prop_map(Duration::from_millis)
}

proptest! {
    #[test]
    fn every_interval_keeps_all_bounds(
        mtbf in 60..=31_536_000_u64, share in 0.0001..=0.5, freeze in any_time(100_000), slowdown in any_time(1000),
        writing in any_time(100_000), computed in any_time(1 << 40), failures: u64,
    ) {
        let cost = Cost { freeze, slowdown, writing };
        let rules = rules(seconds(mtbf), share);
        let chosen = choose(rules, Seen { cost: Some(cost), computed, failures });
        prop_assert!(chosen.interval >= SHORTEST);
        prop_assert!(chosen.interval >= writing);
        prop_assert!(chosen.overhead() <= share * 1.000_001);
        prop_assert!(chosen.interval <= LONGEST.max(writing).max(chosen.least));
        prop_assert!((0.0..=1.0).contains(&chosen.lost()));
        prop_assert!(!chosen.to_string().is_empty());
    }

    #[test]
    fn interval_is_monotonic_in_failures_and_in_cost(
        mtbf in 60..=1_000_000_u64, freeze in any_time(100), more in any_time(100), computed in any_time(1 << 30),
        failures in 0..1000_u64,
    ) {
        let rules = rules(seconds(mtbf), 0.5);
        let interval = |freeze, failures| {
            choose(rules, Seen { computed, failures, ..seen(freeze, Duration::ZERO) }).interval
        };
        prop_assert!(interval(freeze, failures + 1) <= interval(freeze, failures));
        // Daly's estimate bends down where a snapshot takes as long as a failure is away; far below, it rises.
        let m = mean_time(rules.mtbf, computed, failures).as_secs_f64();
        if (freeze + more).as_secs_f64() < m / 2.0 {
            prop_assert!(interval(freeze + more, failures) >= interval(freeze, failures));
        }
    }

    #[test]
    fn no_other_interval_is_expected_to_waste_much_less(mtbf in 600..=1_000_000_u32, freeze in 1..30_u32) {
        // By the model that Daly's estimate approximates: exponential failures, no time for the restart.
        let (m, c) = (f64::from(mtbf), f64::from(freeze));
        let wall = |interval: f64| m * (((interval + c) / m).exp() - 1.0) / interval;
        let best = optimum(seconds(freeze.into()), seconds(mtbf.into())).as_secs_f64();
        for factor in [0.5, 0.8, 0.9, 1.1, 1.25, 2.0] {
            prop_assert!(wall(best) <= wall(best * factor) * 1.001);
        }
    }
}
