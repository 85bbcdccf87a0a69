//! Whether the end of the job, should it come now, was asked for.

use std::time::{Duration, Instant};

use crate::clock;

/// The share of the time until a stop that the hook of a snapshot may take: the rest is for the snapshot.
const HOOK_SHARE: u32 = 4;

/// Whether we were asked to end.
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
    /// Whether an end of the job now would be wanted. `grace`: how long after SIGINT it is.
    pub fn is_wanted(self, grace: Duration) -> bool {
        match self {
            Self::No => false,
            // A job that goes on after SIGINT and crashes much later has crashed.
            Self::ByTheJob(at) => at.elapsed() <= grace,
            Self::WhenSaved | Self::Until(_) => true,
        }
    }

    /// How long the hook of a snapshot may take from now on, if an end is near.
    pub fn hook_limit(self) -> Option<Duration> {
        match self {
            Self::No | Self::ByTheJob(_) | Self::WhenSaved => None,
            Self::Until(end) => Some(end.saturating_duration_since(clock::now()) / HOOK_SHARE),
        }
    }
}
