//! Errors of refused settings: the place, the key, the problem and the correct form.
//!
//! All of them occur before the job exists, so nothing has to be undone.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

use super::Origin;

/// The reason why settings could not be loaded.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// A file exists but cannot be read, or a named file does not exist.
    #[error("cannot read configuration file {} ({remedy})", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The action for the user.
        remedy: &'static str,
        /// The system's error.
        #[source]
        source: io::Error,
    },
    /// A file is larger than any configuration.
    #[error(
        "{}: too large for a configuration file (limit {limit} bytes)",
        path.display()
    )]
    TooLarge {
        /// The file.
        path: PathBuf,
        /// The limit.
        limit: u64,
    },
    /// Another user could have written the project's file.
    #[error(
        "{0}: refused: {trust}, so others could choose the commands that ckpt-run executes; {remedy}, or trust it by \
         `--config {0}`",
        path.display(),
        remedy = trust.remedy(path)
    )]
    Untrusted {
        /// The file.
        path: PathBuf,
        /// The reason for the distrust.
        trust: Distrust,
    },
    /// A file is not TOML.
    #[error("{origin}: {message}")]
    Syntax {
        /// The place of the error.
        origin: Origin,
        /// The parser's message.
        message: String,
    },
    /// A key does not exist.
    #[error("{origin}: {key}: unknown key{}", did_you_mean(suggestion.as_deref()))]
    UnknownKey {
        /// The place of the value.
        origin: Origin,
        /// The key as given.
        key: String,
        /// A similar key.
        suggestion: Option<String>,
    },
    /// A variable has the prefix of ckpt-run's variables but sets nothing.
    #[error(
        "environment {variable}: no such setting{}",
        did_you_mean(suggestion.as_deref())
    )]
    UnknownVariable {
        /// The variable's name.
        variable: String,
        /// A similar variable.
        suggestion: Option<String>,
    },
    /// A variable's name or value is not UTF-8.
    #[error("environment {variable}: not UTF-8")]
    NotText {
        /// The variable's name.
        variable: String,
    },
    /// A value is not valid for its key.
    #[error("{origin}: {key}: {problem}")]
    Value {
        /// The place of the value.
        origin: Origin,
        /// The key.
        key: String,
        /// The problem with the value, in serde's words or those of [`Invalid`].
        problem: String,
    },
    /// Two settings exclude each other.
    #[error("{first}: {first_key} and {second}: {second_key}: {why}")]
    Contradiction {
        /// The place of the first setting.
        first: Origin,
        /// The key of the first setting.
        first_key: &'static str,
        /// The place of the second setting.
        second: Origin,
        /// The key of the second setting.
        second_key: &'static str,
        /// The reason of the contradiction.
        why: &'static str,
    },
}

/// The reason why other users may have written a project's file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Distrust {
    /// The file belongs to this user, who is neither the current user nor root.
    Owner(u32),
    /// Every user may write to the file.
    WorldWritable,
    /// A group of several users may write to the file.
    GroupWritable,
}

impl Distrust {
    fn remedy(self, path: &Path) -> String {
        match self {
            Self::Owner(_) => "`chown` it to yourself".to_owned(),
            Self::WorldWritable => format!("`chmod o-w {}`", path.display()),
            Self::GroupWritable => format!("`chmod g-w {}`", path.display()),
        }
    }
}

impl fmt::Display for Distrust {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Owner(uid) => write!(f, "it belongs to user {uid}"),
            Self::WorldWritable => f.write_str("everybody may write to it"),
            Self::GroupWritable => f.write_str("its group may write to it"),
        }
    }
}

/// The problem with one value. The text follows "`key`: ".
#[derive(Debug, thiserror::Error)]
pub enum Invalid {
    /// The value is a bare number instead of a duration or a size.
    #[error("{given} has no unit; write for example \"{given}{unit}\"")]
    NoUnit {
        /// The number.
        given: String,
        /// A suitable unit.
        unit: &'static str,
    },
    /// The text does not have the form of the key's values.
    #[error("{given:?} is not {expected}")]
    Form {
        /// The text.
        given: String,
        /// The form that the key takes.
        expected: &'static str,
    },
    /// The value is outside the key's limits.
    #[error("{given} is not between {low} and {high}")]
    Range {
        /// The value.
        given: String,
        /// The smallest allowed value.
        low: String,
        /// The largest allowed value.
        high: String,
    },
    /// The text is neither the key's word nor a value of its other kind.
    #[error("{problem}, nor is it \"{word}\"")]
    Neither {
        /// The word.
        word: &'static str,
        /// The reason why the text is not a value of the other kind. It is part of the message, so there is no
        /// `#[source]`.
        problem: Box<Invalid>,
    },
    /// The text is not a cron expression.
    #[error("{given:?} is not a cron expression: {reason}")]
    Cron {
        /// The text.
        given: String,
        /// The problem with the expression.
        reason: String,
    },
    /// The text is not a pattern of files.
    #[error("{given:?} is not a pattern of files: {reason}")]
    Pattern {
        /// The text.
        given: String,
        /// The reason.
        reason: String,
    },
    /// The list or the command is longer than any useful one.
    #[error("{given} {what} are more than {limit}")]
    TooMuch {
        /// The given number.
        given: usize,
        /// The largest allowed number.
        limit: usize,
        /// The items that are counted.
        what: &'static str,
    },
    /// The text cannot be passed to the system.
    #[error("{given:?} contains a zero byte")]
    ZeroByte {
        /// The text.
        given: String,
    },
    /// The path begins with the shell's short form of the home folder.
    #[error("`~` in {given:?} is not expanded; write the path of the home folder")]
    Home {
        /// The text.
        given: String,
    },
}

impl Invalid {
    /// Returns the problem of text that could also have been this word.
    pub(super) fn nor(self, word: &'static str) -> Self {
        match self {
            Self::Form { .. } => Self::Neither {
                word,
                problem: Box::new(self),
            },
            other => other,
        }
    }
}

fn did_you_mean(suggestion: Option<&str>) -> String {
    suggestion.map_or_else(String::new, |name| format!("; did you mean `{name}`?"))
}
