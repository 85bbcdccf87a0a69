//! The decision after the job has ended by itself: a pure function of its exit status, the rules, and the crashes since
//! the job last made progress (`crash_progress`).
//!
//! ```text
//! crashes without  images to          decision
//! getting further  restore
//!      1           some               restore the newest
//!      2           some               restore the one before it, if there is one
//!      3           some               give up
//!     any          none               start anew, or give up, as configured
//! ```
//! Ends that are not to be restarted, and a spent number of restarts, give up
//! before that. An end that we were asked for is no crash and must not come here.
//! The decision is carried out, and the [`Budget`] kept, by the supervisor's loop.

use std::fmt;
use std::time::{Duration, Instant};

pub use crate::config::ExitStatus;
use crate::config::{Restart, RestartLimit, RestartPolicy, WithoutImage};

/// The crash that goes one image further back: the newest may hold its cause.
const CRASHES_FURTHER_BACK: u32 = 2;
/// The crash that gives up: two images did not get past it.
const CRASHES_GIVE_UP: u32 = 3;

/// Restarts spent since the last progress: an image past the point of a crash.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Budget {
    /// Restarts, from an image or from the beginning.
    pub restarts: u32,
    /// Ends other than a success.
    pub crashes: u32,
}

impl Budget {
    /// Counts an end, once, before [`decide`] is asked about it.
    pub fn ended(&mut self, status: ExitStatus) {
        if !status.is_success() {
            self.crashes = self.crashes.saturating_add(1);
        }
    }

    /// Counts a restart that is carried out.
    pub fn restarted(&mut self) {
        self.restarts = self.restarts.saturating_add(1);
    }

    /// An image is durable of what was not computed before: the job got further than last time.
    pub fn refill(&mut self) {
        *self = Self::default();
    }
}

/// The next step.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Decision {
    /// The job has done its work.
    Finished {
        /// The code to exit with.
        code: u8,
    },
    /// Wait, then restore the newest available image but `skip_newest`, or where that
    /// fails the next older one.
    Restore {
        /// Less than the number of available images.
        skip_newest: usize,
        /// Wait before it.
        delay: Duration,
    },
    /// Wait, then start the job from the beginning.
    StartAnew {
        /// Wait before it.
        delay: Duration,
    },
    /// Leave the images as they are and exit.
    GiveUp {
        /// The code to exit with: the job's own.
        code: u8,
        /// Why.
        reason: Reason,
    },
}

/// Why the job is not restarted. Reads after "giving up: ".
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reason {
    /// The policy does not restart such an end.
    Policy(ExitStatus),
    /// The end is on the list of those that are never retried.
    Prevented(ExitStatus),
    /// This many restarts without getting further are all there may be.
    RestartsSpent(u32),
    /// The job crashed this many times without progress.
    CrashedAgain(u32),
    /// No image can be restored.
    NoImage,
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Policy(status) => write!(f, "restart.policy does not restart after {status}"),
            Self::Prevented(status) => write!(f, "restart.prevent lists {status}"),
            Self::RestartsSpent(max) => write!(
                f,
                "restarted {max} times without getting further, as often as restart.max allows"
            ),
            Self::CrashedAgain(crashes) => {
                write!(f, "crashed {crashes} times without getting further")
            }
            Self::NoImage => f.write_str("there is no image yet"),
        }
    }
}

/// Decides what follows on the job's end, when so many images are there to restore.
#[must_use]
pub fn decide(ended: ExitStatus, rules: &Restart, budget: Budget, images: usize) -> Decision {
    if ended.is_success() && rules.policy != RestartPolicy::Always {
        return Decision::Finished { code: ended.code() };
    }
    if let Some(reason) = refusal(ended, rules, budget) {
        return Decision::GiveUp {
            code: ended.code(),
            reason,
        };
    }
    let delay = backoff(rules, budget.restarts);
    if ended.is_success() {
        return Decision::StartAnew { delay };
    }
    choose(ended, rules, budget, images, delay)
}

/// Why this end is not restarted at all, whatever images there are.
fn refusal(ended: ExitStatus, rules: &Restart, budget: Budget) -> Option<Reason> {
    let restarted = match rules.policy {
        RestartPolicy::No => false,
        RestartPolicy::OnFailure => !ended.is_success(),
        RestartPolicy::OnAbnormal => matches!(ended, ExitStatus::Signaled(_)),
        RestartPolicy::Always => true,
    };
    if !restarted {
        return Some(Reason::Policy(ended));
    }
    if rules.prevent.contains(&ended) {
        return Some(Reason::Prevented(ended));
    }
    match rules.max {
        RestartLimit::Times(max) if budget.restarts >= max => Some(Reason::RestartsSpent(max)),
        RestartLimit::Times(_) | RestartLimit::Unlimited => None,
    }
}

/// Chooses what a crashed job is restarted from.
fn choose(
    ended: ExitStatus,
    rules: &Restart,
    budget: Budget,
    images: usize,
    delay: Duration,
) -> Decision {
    let give_up = |reason| Decision::GiveUp {
        code: ended.code(),
        reason,
    };
    let Some(oldest) = images.checked_sub(1) else {
        return match rules.without_image {
            WithoutImage::Start => Decision::StartAnew { delay },
            WithoutImage::GiveUp => give_up(Reason::NoImage),
        };
    };
    if budget.crashes >= CRASHES_GIVE_UP {
        return give_up(Reason::CrashedAgain(budget.crashes));
    }
    let further_back = usize::from(budget.crashes >= CRASHES_FURTHER_BACK);
    Decision::Restore {
        skip_newest: further_back.min(oldest),
        delay,
    }
}

/// The wait before the restart after `restarts` others: geometric, up to the longest.
#[must_use]
pub fn backoff(rules: &Restart, restarts: u32) -> Duration {
    if rules.backoff.is_zero() {
        return Duration::ZERO;
    }
    let growth = rules
        .backoff_factor
        .powi(i32::try_from(restarts).unwrap_or(i32::MAX));
    // Infinite growth is no error here: the longest wait is smaller.
    let seconds = (rules.backoff.as_secs_f64() * growth).min(rules.backoff_max.as_secs_f64());
    Duration::try_from_secs_f64(seconds)
        .unwrap_or(rules.backoff_max)
        .min(rules.backoff_max)
}

/// The share of the time until a stop that the hook of a snapshot may take: the rest is for the snapshot.
const HOOK_SHARE: u32 = 4;

/// A requested end of the run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stopping {
    /// No.
    No,
    /// SIGINT and the like went to the job, at this time: its end within the grace period is no crash.
    ByTheJob(Instant),
    /// SIGUSR2 or `ckpt-run stop`: as soon as an image is durable.
    WhenSaved,
    /// SIGTERM: saved or not, at this time.
    Until(Instant),
}

impl Stopping {
    /// Returns true if an exit of the job now would be a requested one. `grace`: limit on its time after SIGINT.
    pub fn is_wanted(self, now: Instant, grace: Duration) -> bool {
        match self {
            Self::No => false,
            // A job that goes on after SIGINT and crashes much later has crashed.
            Self::ByTheJob(at) => now.saturating_duration_since(at) <= grace,
            Self::WhenSaved | Self::Until(_) => true,
        }
    }

    /// Returns the time for the hook of a snapshot from now on, if the end is near.
    pub fn hook_limit(self, now: Instant) -> Option<Duration> {
        match self {
            Self::No | Self::ByTheJob(_) | Self::WhenSaved => None,
            Self::Until(end) => Some(end.saturating_duration_since(now) / HOOK_SHARE),
        }
    }
}

#[cfg(test)]
mod tests {
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
        }
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
            let decision = decide(ended, &rules, crashes(1), 1);
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
            let decision = decide(ExitStatus::Exited(0), &rules, Budget::default(), 3);
            assert_eq!(decision, Decision::Finished { code: 0 });
        }
        let rules = Restart {
            policy: RestartPolicy::Always,
            ..rules()
        };
        let decision = decide(ExitStatus::Exited(0), &rules, Budget::default(), 3);
        let delay = Duration::from_secs(1);
        assert_eq!(decision, Decision::StartAnew { delay });
    }

    #[test]
    fn a_prevented_end_is_not_retried() {
        let mut rules = rules();
        let usage = ExitStatus::Exited(2);
        assert_eq!(
            decide(usage, &rules, crashes(1), 1),
            give_up(2, Reason::Prevented(usage))
        );
        rules.prevent = vec![ExitStatus::Signaled(4)];
        let illegal = ExitStatus::Signaled(4);
        assert_eq!(
            decide(illegal, &rules, crashes(1), 1),
            give_up(132, Reason::Prevented(illegal))
        );
        let killed = decide(KILLED, &rules, crashes(1), 1);
        assert!(matches!(killed, Decision::Restore { .. }));
    }

    #[test]
    fn crashes_without_a_new_image_go_back_once_and_then_give_up() {
        let seconds = Duration::from_secs;
        for (crash, images, expected) in [
            (1, 3, Some((0, seconds(1)))),
            (2, 3, Some((1, seconds(2)))),
            (2, 1, Some((0, seconds(2)))),
            (3, 3, None),
            (3, 1, None),
        ] {
            let rules = Restart {
                max: RestartLimit::Unlimited,
                ..rules()
            };
            let decision = decide(KILLED, &rules, crashes(crash), images);
            let expected = match expected {
                Some((skip_newest, delay)) => Decision::Restore { skip_newest, delay },
                None => give_up(137, Reason::CrashedAgain(3)),
            };
            assert_eq!(decision, expected, "crash {crash} with {images} images");
        }
    }

    #[test]
    fn a_crash_without_any_image_starts_anew_until_the_restarts_are_spent() {
        let rules = Restart {
            without_image: WithoutImage::Start,
            ..rules()
        };
        for restarts in 0..3 {
            let decision = decide(KILLED, &rules, crashes(restarts + 1), 0);
            assert!(matches!(decision, Decision::StartAnew { .. }));
        }
        assert_eq!(
            decide(KILLED, &rules, crashes(4), 0),
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
            decide(ExitStatus::Exited(7), &rules, crashes(1), 0),
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
            decide(KILLED, &rules, crashes(1), 1),
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

        /// Plays a run: each end comes after so many new images, and the decision
        /// is carried out; so many of the images fail to restore and are gone each time.
        #[test]
        fn no_run_restarts_more_often_than_allowed(
            rules in any_rules(),
            ends in prop::collection::vec((any_end(), 0..2_usize, 0..3_usize), 1..40),
        ) {
            let mut budget = Budget::default();
            let mut available = 0;
            for (ended, new_images, failures) in ends {
                if new_images > 0 {
                    budget.refill();
                    available += new_images;
                }
                budget.ended(ended);
                let decision = decide(ended, &rules, budget, available);
                if let Decision::Restore { skip_newest, .. } = decision {
                    prop_assert!(skip_newest < available);
                    available -= failures.min(available);
                }
                match decision {
                    Decision::Finished { code } => {
                        prop_assert_eq!(code, 0);
                        return Ok(());
                    }
                    Decision::GiveUp { code, .. } => {
                        prop_assert_eq!(code, ended.code());
                        return Ok(());
                    }
                    Decision::Restore { .. } => prop_assert!(budget.crashes < CRASHES_GIVE_UP),
                    Decision::StartAnew { .. } => {}
                }
                budget.restarted();
                if let RestartLimit::Times(max) = rules.max {
                    prop_assert!(budget.restarts <= max);
                }
            }
        }
    }
}
