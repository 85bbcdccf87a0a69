//! Settings of a run's operation (automatic intervals, hang detection, hooks) and their parsers.
//!
//! The meaning of each setting is documented in `config/default.toml`, as for all of [`super::model`].

use std::path::PathBuf;
use std::time::Duration;

use toml::Value as Shown;

use super::Invalid;
use super::limits::{HANG, HOOK_BYTES_MAX, HOOK_WORDS_MAX, INTERVAL, JITTER_SHARE, JITTER_TIME};
use super::units::{format_duration, format_percent, parse_percent, shown};
use super::value::{Choice, Value};

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

/// The largest delay of a snapshot after its time.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Jitter {
    /// A delay of up to this part of the interval, 0 to 1.
    Share(f64),
    /// A delay of up to this time.
    Time(Duration),
}

/// `[hang]`: the signs by which a job is treated as hung; `None` disables a sign.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Hang {
    /// Time without output.
    pub output: Option<Duration>,
    /// Time without GPU work.
    pub gpu: Option<Duration>,
    /// Time without CPU use.
    pub cpu: Option<Duration>,
    /// A file that the job touches regularly.
    pub heartbeat: Option<PathBuf>,
    /// Time without a touch of that file; used only if there is a file.
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

/// The reaction to a job that hangs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HangAction {
    /// The job is killed and restored; this counts as a crash.
    Restore,
    /// The hang is reported.
    Report,
}

impl Choice for HangAction {
    const WORDS: &'static [(&'static str, Self)] =
        &[("restore", Self::Restore), ("report", Self::Report)];
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
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Hooks {
    /// Command before a snapshot, while the job computes; it may cancel the snapshot.
    pub before_snapshot: Option<HookCommand>,
    /// Command after an image became durable.
    pub after_snapshot: Option<HookCommand>,
    /// Command after an image became the running job.
    pub after_restore: Option<HookCommand>,
    /// Command after the last restart of the job failed or is not attempted.
    pub on_give_up: Option<HookCommand>,
    /// Command after a job was found to hang.
    pub on_hang: Option<HookCommand>,
    /// Time limit of each command.
    pub timeout: Duration,
}

/// A command line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum HookCommand {
    /// A text for `sh -c`.
    Shell(String),
    /// A program and its arguments.
    Words(Vec<String>),
}

pub(super) fn interval(value: &Value) -> Result<Interval, Invalid> {
    match value.text().map(str::trim) {
        Ok("never") => return Ok(Interval::Never),
        Ok("auto") => return Ok(Interval::Auto),
        Ok(_) | Err(_) => {}
    }
    let time = value.unless("never\" or \"auto", |value| value.duration(&INTERVAL))?;
    Ok(time.map_or(Interval::Never, Interval::Every))
}

pub(super) fn jitter(value: &Value) -> Result<Jitter, Invalid> {
    if value.text().is_ok_and(|text| text.trim().ends_with('%')) {
        return Ok(Jitter::Share(value.percent(&JITTER_SHARE)?));
    }
    value.duration(&JITTER_TIME).map(Jitter::Time)
}

pub(super) fn show_jitter(jitter: Jitter) -> Shown {
    Shown::String(match jitter {
        Jitter::Share(share) => format_percent(share),
        Jitter::Time(time) => format_duration(time),
    })
}

/// Reads "off" or a time.
pub(super) fn limit(value: &Value) -> Result<Option<Duration>, Invalid> {
    value.unless("off", |value| value.duration(&HANG))
}

pub(super) fn show_limit(limit: Option<Duration>) -> Shown {
    Shown::String(limit.map_or_else(|| "off".to_owned(), format_duration))
}

/// Reads a string for the shell, a list of words, or "" for no command.
pub(super) fn hook(value: &Value) -> Result<Option<HookCommand>, Invalid> {
    let too_long = |given: usize, what: &str, most: usize| Invalid::Range {
        given: format!("a command of {given} {what}"),
        low: "0".to_owned(),
        high: format!("{most} {what}"),
    };
    let text = |value: &Value| {
        let text = value.text()?;
        if text.contains('\0') {
            return Err(Invalid::Command { given: shown(text) });
        }
        if text.len() > HOOK_BYTES_MAX {
            return Err(too_long(text.len(), "bytes", HOOK_BYTES_MAX));
        }
        Ok(text.to_owned())
    };
    let Value::List(items) = value else {
        let line = text(value)?;
        return Ok(Some(line)
            .filter(|line| !line.trim().is_empty())
            .map(HookCommand::Shell));
    };
    if items.len() > HOOK_WORDS_MAX {
        return Err(too_long(items.len(), "words", HOOK_WORDS_MAX));
    }
    let words = items.iter().map(text).collect::<Result<Vec<_>, _>>()?;
    Ok(Some(words)
        .filter(|words| !words.is_empty())
        .map(HookCommand::Words))
}

pub(super) fn show_hook(command: Option<&HookCommand>) -> Shown {
    match command {
        None => Shown::from(""),
        Some(HookCommand::Shell(line)) => Shown::from(line.as_str()),
        Some(HookCommand::Words(words)) => {
            Shown::Array(words.iter().map(|word| word.as_str().into()).collect())
        }
    }
}

impl Value {
    /// Reads a share, 0 to 1, written as a percentage.
    pub(super) fn percent(&self, range: &std::ops::RangeInclusive<f64>) -> Result<f64, Invalid> {
        let share = parse_percent(self.text()?)?;
        if range.contains(&share) {
            return Ok(share);
        }
        Err(Invalid::Range {
            given: format_percent(share),
            low: format_percent(*range.start()),
            high: format_percent(*range.end()),
        })
    }
}
