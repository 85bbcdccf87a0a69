//! Settings of a run's operation (automatic intervals, hang detection, hooks).
//!
//! The meaning of each setting is documented in `config/default.toml`, as for all of [`super::model`].

use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use serde::Deserialize;

use super::Invalid;
use super::reading::{duration, hook, optional_path, time_limit};
use super::units::{parse_duration, parse_percent};

/// Time from the end of one snapshot to the next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Interval {
    /// Snapshots only on request.
    Never,
    /// An interval computed from the cost of snapshots and the job's failure rate.
    Auto,
    /// A fixed interval of at least one second.
    Every(Duration),
}

impl FromStr for Interval {
    type Err = Invalid;

    fn from_str(text: &str) -> Result<Self, Invalid> {
        match text {
            "never" => Ok(Self::Never),
            "auto" => Ok(Self::Auto),
            _ => parse_duration(text)
                .map(Self::Every)
                .map_err(|problem| problem.nor("never\" or \"auto")),
        }
    }
}

/// The largest delay of a snapshot after its time.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Jitter {
    /// A delay of up to this part of the interval, 0 to 1.
    Share(f64),
    /// A delay of up to this time.
    Time(Duration),
}

impl FromStr for Jitter {
    type Err = Invalid;

    fn from_str(text: &str) -> Result<Self, Invalid> {
        if text.ends_with('%') {
            parse_percent(text).map(Self::Share)
        } else {
            parse_duration(text).map(Self::Time)
        }
    }
}

/// `[hang]`: the signs by which a job is treated as hung; `None` disables a sign.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Hang {
    /// Time without output.
    #[serde(deserialize_with = "time_limit")]
    pub output: Option<Duration>,
    /// Time without GPU work.
    #[serde(deserialize_with = "time_limit")]
    pub gpu: Option<Duration>,
    /// Time without CPU use.
    #[serde(deserialize_with = "time_limit")]
    pub cpu: Option<Duration>,
    /// A file that the job touches regularly.
    #[serde(deserialize_with = "optional_path")]
    pub heartbeat: Option<PathBuf>,
    /// Time without a touch of that file; used only if there is a file.
    #[serde(deserialize_with = "duration")]
    pub heartbeat_timeout: Duration,
    /// The reaction to a hang.
    pub action: HangAction,
}

impl Hang {
    /// Returns true if any sign is enabled.
    #[must_use]
    pub fn is_on(&self) -> bool {
        [self.output, self.gpu, self.cpu, self.heartbeat_limit()]
            .iter()
            .any(Option::is_some)
    }

    /// Returns the heartbeat's limit if there is a heartbeat file.
    #[must_use]
    pub fn heartbeat_limit(&self) -> Option<Duration> {
        self.heartbeat.as_ref().map(|_| self.heartbeat_timeout)
    }
}

/// Use of the store by several machines.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Sharing {
    /// A lease if its file system is one of those that several machines use.
    Auto,
    /// A lease, or an error.
    Yes,
    /// The store's lock alone.
    No,
}

/// The reaction to a job that hangs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum HangAction {
    /// The job is killed and restored; this counts as a crash.
    Restore,
    /// The hang is reported.
    Report,
}

/// The occasions on which a hook runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Occasion {
    /// A snapshot is about to be taken, while the job computes.
    BeforeSnapshot,
    /// An image became durable.
    AfterSnapshot,
    /// An image became the running job.
    AfterRestore,
    /// The run gave up.
    OnGiveUp,
    /// The job was found to hang.
    OnHang,
}

impl Occasion {
    /// Every occasion.
    pub const ALL: [Self; 5] = [
        Self::BeforeSnapshot,
        Self::AfterSnapshot,
        Self::AfterRestore,
        Self::OnGiveUp,
        Self::OnHang,
    ];

    /// Returns the command that the settings give for this occasion.
    #[must_use]
    pub fn command(self, settings: &Hooks) -> Option<&HookCommand> {
        match self {
            Self::BeforeSnapshot => settings.before_snapshot.as_ref(),
            Self::AfterSnapshot => settings.after_snapshot.as_ref(),
            Self::AfterRestore => settings.after_restore.as_ref(),
            Self::OnGiveUp => settings.on_give_up.as_ref(),
            Self::OnHang => settings.on_hang.as_ref(),
        }
    }

    /// Returns the key in `[hooks]`.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::BeforeSnapshot => "before_snapshot",
            Self::AfterSnapshot => "after_snapshot",
            Self::AfterRestore => "after_restore",
            Self::OnGiveUp => "on_give_up",
            Self::OnHang => "on_hang",
        }
    }
}

/// `[hooks]`: commands that run on occasions.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Hooks {
    /// Command before a snapshot, while the job computes; it may cancel the snapshot.
    #[serde(deserialize_with = "hook")]
    pub before_snapshot: Option<HookCommand>,
    /// Command after an image became durable.
    #[serde(deserialize_with = "hook")]
    pub after_snapshot: Option<HookCommand>,
    /// Command after an image became the running job.
    #[serde(deserialize_with = "hook")]
    pub after_restore: Option<HookCommand>,
    /// Command after the last restart of the job failed or is not attempted.
    #[serde(deserialize_with = "hook")]
    pub on_give_up: Option<HookCommand>,
    /// Command after a job was found to hang.
    #[serde(deserialize_with = "hook")]
    pub on_hang: Option<HookCommand>,
    /// Time limit of each command.
    #[serde(deserialize_with = "duration")]
    pub timeout: Duration,
}

/// A command line.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(untagged, expecting = "expected a string or a list of strings")]
pub enum HookCommand {
    /// A text for `sh -c`.
    Shell(String),
    /// A program and its arguments.
    Words(Vec<String>),
}
