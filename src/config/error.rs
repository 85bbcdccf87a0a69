//! Why settings are refused: the place, the key, what is wrong and what to write.
//!
//! All of it happens before there is a job, so nothing has to be undone.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

use super::Origin;

/// Why settings could not be loaded.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// A file is there but cannot be read, or was named and is not there.
    #[error("cannot read configuration file {} ({remedy})", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// What to do.
        remedy: &'static str,
        /// What the system said.
        #[source]
        source: io::Error,
    },
    /// A file is larger than a configuration can be.
    #[error(
        "{}: larger than {limit} bytes, not a configuration file",
        path.display()
    )]
    TooLarge {
        /// The file.
        path: PathBuf,
        /// The limit.
        limit: u64,
    },
    /// The project's file could have been written by someone else.
    #[error(
        "{0}: refused, {trust}, so others decide what we run; {remedy}, or trust it by `--config {0}`",
        path.display(),
        remedy = trust.remedy(path)
    )]
    Untrusted {
        /// The file.
        path: PathBuf,
        /// What makes it so.
        trust: Distrust,
    },
    /// A file is not TOML.
    #[error("{origin}: {message}")]
    Syntax {
        /// Where.
        origin: Origin,
        /// What the parser said.
        message: String,
    },
    /// No such key.
    #[error("{origin}: {key}: unknown key{}", did_you_mean(suggestion.as_deref()))]
    UnknownKey {
        /// Where it is.
        origin: Origin,
        /// The key as given.
        key: String,
        /// A key that looks like it.
        suggestion: Option<String>,
    },
    /// A variable begins as ours do but sets nothing.
    #[error(
        "environment {variable}: no such setting{}",
        did_you_mean(suggestion.as_deref())
    )]
    UnknownVariable {
        /// Its name.
        variable: String,
        /// A variable that looks like it.
        suggestion: Option<String>,
    },
    /// A variable's name or value is not UTF-8.
    #[error("environment {variable}: not UTF-8")]
    NotText {
        /// Its name.
        variable: String,
    },
    /// A value is not one the key can have.
    #[error("{origin}: {key}: {problem}")]
    Value {
        /// Where it is.
        origin: Origin,
        /// The key.
        key: String,
        /// What is wrong with it. Part of the message, so no `#[source]`.
        problem: Box<Invalid>,
    },
    /// Two settings cannot both hold.
    #[error("{first}: {first_key} and {second}: {second_key}: {why}")]
    Contradiction {
        /// Where the one is.
        first: Origin,
        /// Its key.
        first_key: &'static str,
        /// Where the other is.
        second: Origin,
        /// Its key.
        second_key: &'static str,
        /// Why not.
        why: &'static str,
    },
}

/// What makes a project's file one that others may have written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Distrust {
    /// It belongs to this user, who is neither us nor root.
    Owner(u32),
    /// Everybody may write to it.
    WorldWritable,
}

impl Distrust {
    fn remedy(self, path: &Path) -> String {
        match self {
            Self::Owner(_) => "`chown` it to yourself".to_owned(),
            Self::WorldWritable => format!("`chmod o-w {}`", path.display()),
        }
    }
}

impl fmt::Display for Distrust {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Owner(uid) => write!(f, "it belongs to user {uid}"),
            Self::WorldWritable => f.write_str("everybody may write to it"),
        }
    }
}

/// What is wrong with one value. Reads after "`key`: ".
#[derive(Debug, thiserror::Error)]
pub enum Invalid {
    /// A value of another type.
    #[error("expected {expected}, found {found}")]
    Type {
        /// What the key takes.
        expected: &'static str,
        /// What was given.
        found: &'static str,
    },
    /// A bare number for a duration or a size.
    #[error("{given} has no unit; write for example \"{given}{unit}\"")]
    NoUnit {
        /// The number.
        given: String,
        /// A unit that would do.
        unit: &'static str,
    },
    /// Not a duration.
    #[error("{given:?} is not a duration such as \"90s\" or \"1h 30m\"")]
    Duration {
        /// The text.
        given: String,
        /// What the parser said.
        #[source]
        source: jiff::Error,
    },
    /// Not a size.
    #[error("{given:?} is not a size such as \"512MiB\" or \"8GiB\"")]
    Size {
        /// The text.
        given: String,
    },
    /// Not a percentage.
    #[error("{given:?} is not a percentage such as \"1%\"")]
    Percent {
        /// The text.
        given: String,
    },
    /// Not a number.
    #[error("{given:?} is not {expected}")]
    Number {
        /// The text.
        given: String,
        /// What the key takes.
        expected: &'static str,
    },
    /// Beyond the limits of the key.
    #[error("{given} is not within {low} and {high}")]
    Range {
        /// The value.
        given: String,
        /// The smallest.
        low: String,
        /// The largest.
        high: String,
    },
    /// Not one of the key's words.
    #[error("{given:?} is not one of {choices}")]
    Choice {
        /// The text.
        given: String,
        /// The words.
        choices: String,
    },
    /// Neither the key's word nor a value of its other kind.
    #[error("{problem}, nor is it \"{word}\"")]
    Neither {
        /// The word.
        word: &'static str,
        /// Why it is not the other. Part of the message, so no `#[source]`.
        problem: Box<Invalid>,
    },
    /// Not a cron expression.
    #[error("{given:?} is not a cron expression: {reason}")]
    Cron {
        /// The text.
        given: String,
        /// What is wrong.
        reason: String,
    },
    /// Neither an exit code nor a signal.
    #[error("{given:?} is neither an exit code (0 to 255) nor a signal such as SIGILL")]
    ExitStatus {
        /// The text.
        given: String,
    },
    /// Not a command that a shell can be given.
    #[error("{given:?} holds a zero byte")]
    Command {
        /// The text.
        given: String,
    },
    /// Not a path that can be used as it is.
    #[error("{given:?} {reason}")]
    Path {
        /// The text.
        given: String,
        /// What is wrong.
        reason: &'static str,
    },
}

fn did_you_mean(suggestion: Option<&str>) -> String {
    suggestion.map_or_else(String::new, |name| format!("; did you mean `{name}`?"))
}
