//! The decisions as tables, and the limits as properties.

use proptest::prelude::*;

use super::*;
use crate::config::Config;

const KILLED: ExitStatus = ExitStatus::Signaled(9);

fn rules() -> Restart {
    Config::default().restart
}

fn crashes(crashes: u32) -> Budget {
    Budget {
        restarts: crashes - 1,
        crashes,
        new_image: false,
    }
}

/// Images of which none was restored yet.
fn images(all: usize) -> Images {
    Images { all, older: all }
}

fn give_up(code: u8, reason: Reason) -> Decision {
    Decision::GiveUp { code, reason }
}

#[test]
fn each_policy_restarts_the_ends_of_its_name() {
    use ExitStatus::{Exited, Signaled};
    use RestartPolicy::{Always, No, OnAbnormal, OnFailure};
    for (policy, ended, restarted) in [
        (No, Exited(1), false),
        (No, Signaled(11), false),
        (OnFailure, Exited(1), true),
        (OnFailure, Signaled(11), true),
        (OnAbnormal, Exited(1), false),
        (OnAbnormal, Signaled(11), true),
        (Always, Exited(1), true),
        (Always, Signaled(11), true),
    ] {
        let rules = Restart { policy, ..rules() };
        let decision = decide(ended, &rules, crashes(1), images(1));
        let expected = if restarted {
            Decision::Restore {
                skip_newest: 0,
                delay: Duration::from_secs(1),
            }
        } else {
            give_up(ended.code(), Reason::Policy(ended))
        };
        assert_eq!(decision, expected, "{policy:?} {ended}");
    }
}

#[test]
fn a_success_is_the_end_except_under_always() {
    for policy in [
        RestartPolicy::No,
        RestartPolicy::OnFailure,
        RestartPolicy::OnAbnormal,
    ] {
        let rules = Restart { policy, ..rules() };
        let decision = decide(ExitStatus::Exited(0), &rules, Budget::default(), images(3));
        assert_eq!(decision, Decision::Finished { code: 0 });
    }
    let rules = Restart {
        policy: RestartPolicy::Always,
        ..rules()
    };
    let decision = decide(ExitStatus::Exited(0), &rules, Budget::default(), images(3));
    let delay = Duration::from_secs(1);
    assert_eq!(decision, Decision::StartAnew { delay });
}

#[test]
fn a_prevented_end_is_retried_only_if_there_is_an_image() {
    let mut rules = rules();
    for (listed, ended, code) in [
        (ExitStatus::Exited(2), ExitStatus::Exited(2), 2),
        (ExitStatus::Signaled(4), ExitStatus::Signaled(4), 132),
    ] {
        rules.prevent = vec![listed];
        let without = decide(ended, &rules, crashes(1), images(0));
        assert_eq!(without, give_up(code, Reason::Prevented(ended)));
        let with = decide(ended, &rules, crashes(1), images(1));
        assert!(matches!(with, Decision::Restore { skip_newest: 0, .. }));
    }
}

#[test]
fn crashes_without_progress_try_each_older_image_once() {
    // Crash, images, those older than the last restored one.
    for (crash, all, older, expected) in [
        (1, 5, 5, Some(0)),
        (1, 5, 2, Some(0)),
        (2, 5, 5, Some(0)),
        (2, 5, 4, Some(1)),
        // Those from the crashed attempt are passed over, too.
        (3, 5, 2, Some(3)),
        (5, 1, 1, Some(0)),
        (2, 1, 0, Some(0)),
        (2, 4, 0, Some(3)),
        (3, 1, 0, None),
        (6, 5, 0, None),
    ] {
        let decision = decide(KILLED, &rules(), crashes(crash), Images { all, older });
        let expected = match expected {
            Some(skip_newest) => Decision::Restore {
                skip_newest,
                delay: backoff(&rules(), crash - 1),
            },
            None => give_up(137, Reason::CrashedAgain(crash)),
        };
        assert_eq!(decision, expected, "crash {crash}, {all} images");
    }
}

#[test]
fn an_explicit_limit_ends_the_walk_through_the_images() {
    let rules = Restart {
        max: RestartLimit::Times(2),
        ..rules()
    };
    let images = Images { all: 5, older: 3 };
    let third = decide(KILLED, &rules, crashes(3), images);
    assert_eq!(third, give_up(137, Reason::RestartsSpent(2)));
    let second = decide(KILLED, &rules, crashes(2), images);
    assert!(matches!(second, Decision::Restore { skip_newest: 2, .. }));
}

#[test]
fn with_an_explicit_limit_the_oldest_image_is_restored_again() {
    let images = Images { all: 1, older: 0 };
    for (max, last) in [
        (RestartLimit::Times(20), Some(20)),
        (RestartLimit::Unlimited, None),
    ] {
        let rules = Restart { max, ..rules() };
        for crash in 1..100 {
            let decision = decide(KILLED, &rules, crashes(crash), images);
            if last.is_some_and(|last| crash > last) {
                assert_eq!(decision, give_up(137, Reason::RestartsSpent(20)));
            } else {
                let is_restored = matches!(decision, Decision::Restore { skip_newest: 0, .. });
                assert!(is_restored, "{max:?}, crash {crash}");
            }
        }
    }
}

#[test]
fn restarts_that_are_left_are_those_that_follow() {
    let played = |max, all: usize| {
        let without_image = WithoutImage::Start;
        let rules = Restart {
            max,
            without_image,
            ..rules()
        };
        let mut budget = Budget::default();
        let mut images = images(all);
        let left = restarts_left(&rules, budget, images).unwrap();
        for played in 0.. {
            budget.ended(KILLED);
            match decide(KILLED, &rules, budget, images) {
                Decision::Restore { skip_newest, .. } => {
                    images.all -= skip_newest;
                    images.older = images.all - 1;
                }
                Decision::StartAnew { .. } => {}
                Decision::GiveUp { .. } | Decision::Finished { .. } => return (left, played),
            }
            budget.restarted();
            let now = restarts_left(&rules, budget, images).unwrap();
            assert_eq!(now, left - played - 1);
        }
        unreachable!()
    };
    for (max, all, expected) in [
        (RestartLimit::Auto, 0, 3),
        (RestartLimit::Auto, 1, 2),
        (RestartLimit::Auto, 2, 2),
        (RestartLimit::Auto, 5, 5),
        (RestartLimit::Times(2), 5, 2),
        (RestartLimit::Times(9), 2, 9),
    ] {
        assert_eq!(played(max, all), (expected, expected), "{max:?}, {all}");
    }
}

#[test]
fn a_kill_from_outside_after_a_new_image_is_progress() {
    let after = |status, new_image| {
        let mut budget = Budget {
            new_image,
            ..crashes(3)
        };
        budget.ended(status);
        (budget.restarts, budget.crashes)
    };
    assert_eq!(after(KILLED, true), (0, 1));
    assert_eq!(after(KILLED, false), (2, 4));
    assert_eq!(after(ExitStatus::Signaled(15), true), (2, 4));
    let mut budget = crashes(3);
    budget.image_taken();
    budget.killed_for_fault();
    budget.ended(KILLED);
    assert_eq!(budget.crashes, 4);
}

#[test]
fn crash_without_image_starts_over_until_the_limit() {
    let rules = Restart {
        without_image: WithoutImage::Start,
        ..rules()
    };
    for restarts in 0..3 {
        let decision = decide(KILLED, &rules, crashes(restarts + 1), images(0));
        assert!(matches!(decision, Decision::StartAnew { .. }));
    }
    assert_eq!(
        decide(KILLED, &rules, crashes(4), images(0)),
        give_up(137, Reason::RestartsSpent(3))
    );
}

#[test]
fn a_crash_without_any_image_gives_up_if_so_configured() {
    let rules = Restart {
        without_image: WithoutImage::GiveUp,
        ..rules()
    };
    assert_eq!(
        decide(ExitStatus::Exited(7), &rules, crashes(1), images(0)),
        give_up(7, Reason::NoImage)
    );
}

#[test]
fn no_restarts_at_all_is_a_limit_too() {
    let rules = Restart {
        max: RestartLimit::Times(0),
        ..rules()
    };
    assert_eq!(
        decide(KILLED, &rules, crashes(1), images(1)),
        give_up(137, Reason::RestartsSpent(0))
    );
}

#[test]
fn signals_are_reported_as_a_shell_does() {
    for (signal, code) in [(1, 129), (9, 137), (15, 143), (64, 192), (4000, 255)] {
        assert_eq!(ExitStatus::Signaled(signal).code(), code);
    }
}

fn any_rules() -> impl Strategy<Value = Restart> {
    let waits = (0..=86_400_000_u64, 0..=86_400_000_u64, 1.0..=100.0_f64);
    let policies = [
        RestartPolicy::No,
        RestartPolicy::OnFailure,
        RestartPolicy::OnAbnormal,
        RestartPolicy::Always,
    ];
    let without = [WithoutImage::Start, WithoutImage::GiveUp];
    let max = prop_oneof![
        Just(RestartLimit::Unlimited),
        Just(RestartLimit::Auto),
        (0..6_u32).prop_map(RestartLimit::Times)
    ];
    (
        waits,
        max,
        proptest::sample::select(policies.to_vec()),
        proptest::sample::select(without.to_vec()),
    )
        .prop_map(
            |((one, other, factor), max, policy, without_image)| Restart {
                policy,
                max,
                backoff: Duration::from_millis(one.min(other)),
                backoff_factor: factor,
                backoff_max: Duration::from_millis(one.max(other)),
                prevent: vec![ExitStatus::Exited(2)],
                without_image,
            },
        )
}

fn any_end() -> impl Strategy<Value = ExitStatus> {
    prop_oneof![
        (0..5_u8).prop_map(ExitStatus::Exited),
        (1..65_i32).prop_map(ExitStatus::Signaled)
    ]
}

proptest! {
    #[test]
    fn waits_never_shrink_nor_pass_the_longest(rules in any_rules(), restarts: u32) {
        let wait = backoff(&rules, restarts);
        prop_assert!(wait <= backoff(&rules, restarts.saturating_add(1)));
        prop_assert!(wait <= rules.backoff_max);
        prop_assert!(wait >= backoff(&rules, 0));
    }

    #[test]
    fn the_first_wait_is_the_configured_one(rules in any_rules()) {
        let first = backoff(&rules, 0);
        prop_assert!(first.abs_diff(rules.backoff) < Duration::from_micros(1));
    }

    /// Plays a run: each end comes after so many new images, which are progress or not, and the decision is carried
    /// out. So many of the newest images cannot be restored.
    #[test]
    fn no_run_restarts_more_often_than_allowed(
        rules in any_rules(),
        ends in prop::collection::vec((any_end(), 0..2_u32, any::<bool>(), 0..3_usize), 1..40),
    ) {
        let mut budget = Budget::default();
        let (mut line, mut made) = (Vec::new(), 0);
        let mut last: Option<u32> = None;
        for (ended, new_images, is_progress, failures) in ends {
            for _ in 0..new_images {
                made += 1;
                line.push(made);
                budget.image_taken();
                if is_progress {
                    budget.refill();
                }
            }
            budget.ended(ended);
            let older = line.iter().filter(|id| last.is_none_or(|last| **id < last)).count();
            let decision = decide(ended, &rules, budget, Images { all: line.len(), older });
            match decision {
                Decision::Finished { code } => {
                    prop_assert_eq!(code, 0);
                    return Ok(());
                }
                Decision::GiveUp { code, .. } => {
                    prop_assert_eq!(code, ended.code());
                    return Ok(());
                }
                Decision::Restore { skip_newest, .. } => {
                    prop_assert!(skip_newest < line.len());
                    line.truncate(line.len() - skip_newest);
                    line.truncate(line.len().saturating_sub(failures).max(1));
                    let restored = line[line.len() - 1];
                    let is_older = last.is_none_or(|last| restored < last);
                    let is_bound = rules.max != RestartLimit::Auto;
                    prop_assert!(is_older || is_bound || budget.crashes < CRASHES_GIVE_UP_MIN);
                    last = Some(restored);
                }
                Decision::StartAnew { .. } => {
                    line.clear();
                    last = None;
                }
            }
            budget.restarted();
            if let RestartLimit::Times(max) = rules.max {
                prop_assert!(budget.restarts <= max);
            }
        }
    }
}
