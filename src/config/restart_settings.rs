//! Settings of `[restart]` (the ends of the job that are restarted, and how often) and their parsers.
//!
//! The meaning of each setting is documented in `config/default.toml`, as for all of [`super::model`].

use std::time::Duration;

use super::Invalid;
use super::limits::{PREVENT_ITEMS_MAX, RESTARTS};
use super::units::{ExitStatus, parse_exit_status};
use super::value::Value;

/// `[restart]`.
#[derive(Debug, Clone, PartialEq)]
pub struct Restart {
    /// The ends that are restarted.
    pub policy: RestartPolicy,
    /// Limit on restarts without progress between them.
    pub max: RestartLimit,
    /// Wait before the first restart, at most `backoff_max`.
    pub backoff: Duration,
    /// Factor from each wait to the next: 1 to 100, finite.
    pub backoff_factor: f64,
    /// The longest wait.
    pub backoff_max: Duration,
    /// Ends after which the job is never restarted.
    pub prevent: Vec<ExitStatus>,
    /// The reaction if there is no image to restore.
    pub without_image: WithoutImage,
}

/// The ends of the job that are restarted, in systemd's words.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
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
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WithoutImage {
    /// The job starts from the beginning.
    Start,
    /// The run ends with the job's exit code.
    GiveUp,
}

pub(super) fn restarts(value: &Value) -> Result<RestartLimit, Invalid> {
    let times = value.unless("auto", |value| value.integer(&RESTARTS))?;
    Ok(times.map_or(RestartLimit::Auto, |times| {
        u32::try_from(times).map_or(RestartLimit::Unlimited, RestartLimit::Times)
    }))
}

pub(super) fn prevent(value: &Value) -> Result<Vec<ExitStatus>, Invalid> {
    let items = value.list()?;
    if items.len() > PREVENT_ITEMS_MAX {
        return Err(Invalid::Range {
            given: format!("a list of {}", items.len()),
            low: "0".to_owned(),
            high: format!("{PREVENT_ITEMS_MAX} items"),
        });
    }
    items
        .iter()
        .map(|item| parse_exit_status(item.text()?))
        .collect()
}
