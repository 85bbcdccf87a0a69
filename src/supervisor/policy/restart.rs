//! What to do when the job has ended by itself: a pure function of how it ended,
//! the rules, and what happened since the job last got further (`ground`).
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
use std::time::Duration;

pub use crate::config::ExitStatus;
use crate::config::{Restart, RestartLimit, RestartPolicy, WithoutImage};

/// The crash that goes one image further back: the newest may hold its cause.
const CRASHES_FURTHER_BACK: u32 = 2;
/// The crash that gives up: two images did not get past it.
const CRASHES_GIVE_UP: u32 = 3;

/// What was spent since the job last got further: to an image of what it had not computed before a crash.
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

/// What to do next.
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
        /// How long to wait first.
        delay: Duration,
    },
    /// Wait, then start the job from the beginning.
    StartAnew {
        /// How long to wait first.
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
    /// It crashed this many times without getting further.
    CrashedAgain(u32),
    /// There is no image to restore.
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

#[cfg(test)]
mod tests;
