//! The decision after the job has ended by itself: a pure function of its exit status, the rules, the crashes since the
//! job last made progress (`crash_progress`), and the images.
//!
//! ```text
//! crashes without  images older than   decision
//! progress         the last tried
//!      1           any                 restore the newest
//!   2 or more      some                restore the newest of them: each image is tried once
//!      2           none                restore the oldest once more
//!   3 or more      none                give up; with an explicit limit, restore the oldest again
//!     any          no image at all     start anew, or give up, as configured
//! ```
//! Ends that the policy does not restart give up before that, and so do a spent explicit limit on restarts and, if there is
//! no image, the default limit and ends in `restart.prevent`. A requested end is no crash and must not come here.
//! The supervisor's loop carries the decision out and keeps the [`Budget`].

use std::fmt;
use std::time::{Duration, Instant};

pub use crate::config::ExitStatus;
use crate::config::{Restart, RestartLimit, RestartPolicy, WithoutImage};

/// The crash from which on older images are restored: the newest may hold its cause.
const CRASHES_FURTHER_BACK: u32 = 2;
/// The first crash that may give up: a job with one or two images is restored as often as one with three.
const CRASHES_GIVE_UP_MIN: u32 = 3;
/// Limit on the restarts of a job without an image, if `restart.max` is not given.
const RESTARTS_WITHOUT_IMAGE: u32 = 3;

/// Restarts spent since the last progress: an image past the point of a crash.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Budget {
    /// Restarts, from an image or from the beginning.
    pub restarts: u32,
    /// Ends other than a success.
    pub crashes: u32,
    /// True if the present attempt has made an image.
    pub new_image: bool,
}

/// The images that a crashed job can be restored from, in numbers.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Images {
    pub all: usize,
    /// Those that were not tried since the last progress: they are older than the image of the last restore, and than all
    /// images that were refused.
    pub older: usize,
}

impl Budget {
    /// Counts an end, once, before [`decide`] is asked about it. A SIGKILL from outside says nothing about the place of
    /// the job: an image made since the last restore is progress.
    pub fn ended(&mut self, status: ExitStatus) {
        let made_image = std::mem::take(&mut self.new_image);
        if made_image && status == ExitStatus::Signaled(nix::libc::SIGKILL) {
            self.refill();
        }
        if !status.is_success() {
            self.crashes = self.crashes.saturating_add(1);
        }
    }

    pub fn image_taken(&mut self) {
        self.new_image = true;
    }

    /// Notes that ckpt-run itself is about to kill the job, because of a fault of the job.
    pub fn killed_for_fault(&mut self) {
        self.new_image = false;
    }

    pub fn restarted(&mut self) {
        self.restarts = self.restarts.saturating_add(1);
    }

    /// Forgets restarts and crashes: a durable image is past the place of the last crash.
    pub fn refill(&mut self) {
        (self.restarts, self.crashes) = (0, 0);
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Decision {
    Finished {
        code: u8,
    },
    /// Wait, then restore the newest available image but `skip_newest`, or where that
    /// fails the next older one.
    Restore {
        /// Less than the number of available images.
        skip_newest: usize,
        delay: Duration,
    },
    /// Wait, then start the job from the beginning.
    StartAnew {
        delay: Duration,
    },
    /// Leave the images as they are and exit.
    GiveUp {
        /// The code to exit with: the job's own.
        code: u8,
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
                "restarted {max} times without progress, the limit of restart.max"
            ),
            Self::CrashedAgain(crashes) => {
                write!(
                    f,
                    "crashed {crashes} times without progress; its output shows why, and the same command continues from \
                     the newest image"
                )
            }
            Self::NoImage => f.write_str("there is no image yet"),
        }
    }
}

/// Decides what follows on the job's end.
#[must_use]
pub fn decide(ended: ExitStatus, rules: &Restart, budget: Budget, images: Images) -> Decision {
    if ended.is_success() && rules.policy != RestartPolicy::Always {
        return Decision::Finished { code: ended.code() };
    }
    let from_image = !ended.is_success() && images.all > 0;
    if let Some(reason) = refusal(ended, rules, budget, from_image) {
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

/// Returns the reason why this end is not restarted, whatever images there are. `from_image`: the job would be restored
/// from an image.
fn refusal(ended: ExitStatus, rules: &Restart, budget: Budget, from_image: bool) -> Option<Reason> {
    let restarted = match rules.policy {
        RestartPolicy::No => false,
        RestartPolicy::OnFailure => !ended.is_success(),
        RestartPolicy::OnAbnormal => matches!(ended, ExitStatus::Signaled(_)),
        RestartPolicy::Always => true,
    };
    if !restarted {
        return Some(Reason::Policy(ended));
    }
    if !from_image && rules.prevent.contains(&ended) {
        return Some(Reason::Prevented(ended));
    }
    let max = match rules.max {
        RestartLimit::Times(max) => Some(max),
        RestartLimit::Auto => (!from_image).then_some(RESTARTS_WITHOUT_IMAGE),
        RestartLimit::Unlimited => None,
    };
    max.filter(|max| budget.restarts >= *max)
        .map(Reason::RestartsSpent)
}

/// Chooses what a crashed job is restarted from.
fn choose(
    ended: ExitStatus,
    rules: &Restart,
    budget: Budget,
    images: Images,
    delay: Duration,
) -> Decision {
    let give_up = |reason| Decision::GiveUp {
        code: ended.code(),
        reason,
    };
    let Some(oldest) = images.all.checked_sub(1) else {
        return match rules.without_image {
            WithoutImage::Start => Decision::StartAnew { delay },
            WithoutImage::GiveUp => give_up(Reason::NoImage),
        };
    };
    let skip_newest = if budget.crashes < CRASHES_FURTHER_BACK {
        0
    } else if images.older > 0 {
        images.all.saturating_sub(images.older)
    } else if rules.max != RestartLimit::Auto || budget.crashes < CRASHES_GIVE_UP_MIN {
        oldest
    } else {
        return give_up(Reason::CrashedAgain(budget.crashes));
    };
    Decision::Restore { skip_newest, delay }
}

/// Returns the number of restarts that are left until there is progress; `None` if there is no limit.
#[must_use]
pub fn restarts_left(rules: &Restart, budget: Budget, images: Images) -> Option<u32> {
    let left = |max: u32| max.saturating_sub(budget.restarts);
    match rules.max {
        RestartLimit::Unlimited => None,
        RestartLimit::Times(max) => Some(left(max)),
        RestartLimit::Auto if images.all == 0 => Some(left(RESTARTS_WITHOUT_IMAGE)),
        RestartLimit::Auto => {
            let untried = if budget.crashes == 0 {
                images.all
            } else {
                images.older
            };
            let untried = u32::try_from(untried).unwrap_or(u32::MAX);
            let at_least = (CRASHES_GIVE_UP_MIN - 1).saturating_sub(budget.crashes);
            Some(untried.max(at_least))
        }
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
    No,
    /// SIGINT and the like went to the job, at this time: its end within the grace period is no crash.
    ByTheJob(Instant),
    /// SIGUSR2 or `ckpt-run stop`: as soon as an image is durable.
    WhenSaved,
    /// SIGTERM or the notice of a cloud: saved or not, at this time.
    Until(Instant),
}

impl Stopping {
    /// Returns true if an exit of the job now would be a requested one. `grace`: limit on its time after SIGINT.
    pub fn is_wanted(self, now: Instant, grace: Duration) -> bool {
        match self {
            Self::No => false,
            // A job that continues after SIGINT and crashes much later has crashed.
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
mod tests;
