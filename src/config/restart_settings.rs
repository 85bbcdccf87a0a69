//! Settings of `[restart]`: the exits of the job that are followed by a restart, and the limits on restarts.
//!
//! The meaning of each setting is documented in `config/default.toml`, as for all of [`super::model`].

use std::str::FromStr;
use std::time::Duration;

use clap::ValueEnum;
use serde::Deserialize;

use super::Invalid;
use super::limits::{RESTARTS, within};
use super::reading::{duration, exit_statuses, number, parsed, unless};
use super::units::{ExitStatus, not};

/// `[restart]`.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Restart {
    /// The ends that are restarted.
    pub policy: RestartPolicy,
    /// Limit on restarts without progress between them.
    #[serde(deserialize_with = "parsed")]
    pub max: RestartLimit,
    /// Wait before the first restart, at most `backoff_max`.
    #[serde(deserialize_with = "duration")]
    pub backoff: Duration,
    /// Factor from each wait to the next: 1 to 100, finite.
    #[serde(deserialize_with = "number")]
    pub backoff_factor: f64,
    /// The longest wait.
    #[serde(deserialize_with = "duration")]
    pub backoff_max: Duration,
    /// Ends after which the job is never restarted.
    #[serde(deserialize_with = "exit_statuses")]
    pub prevent: Vec<ExitStatus>,
    /// The reaction if there is no image to restore.
    pub without_image: WithoutImage,
}

/// The ends of the job that are restarted, in systemd's words.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum RestartPolicy {
    /// No end.
    No,
    /// Exit codes other than 0, and signals.
    OnFailure,
    /// Signals only.
    OnAbnormal,
    /// Every end.
    Always,
}

/// Limit on the job's restarts without progress.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RestartLimit {
    /// No given limit: 3 restarts of a job without an image; otherwise each older image is tried once.
    Auto,
    /// No limit.
    Unlimited,
    /// A limit of this many restarts.
    Times(u32),
}

/// The reaction if there is no image to restore.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum WithoutImage {
    /// The job starts from the beginning.
    Start,
    /// The run ends with the job's exit code.
    GiveUp,
}

impl FromStr for RestartLimit {
    type Err = Invalid;

    fn from_str(text: &str) -> Result<Self, Invalid> {
        let number = |text: &str| {
            let times: i64 = text.parse().map_err(|_| not(text, "a whole number"))?;
            within(times, &RESTARTS, i64::to_string)
        };
        let times = unless("auto", text, number)?;
        Ok(times.map_or(Self::Auto, |times| {
            u32::try_from(times).map_or(Self::Unlimited, Self::Times)
        }))
    }
}
