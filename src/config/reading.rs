//! Readers of values for serde: text with a unit, text with a word of its own, text whose empty form means none.
//!
//! Variables and flags give text only, so every reader of a number takes its text too.

use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use serde::de::{Deserialize, Deserializer, Error};

use super::limits::{HOOK_BYTES_MAX, HOOK_WORDS_MAX, LIST_ITEMS_MAX};
use super::units::{not, parse_duration, parse_percent, parse_size, shown};
use super::{ExitStatus, HookCommand, Invalid};

/// A value of a file, or the text of a variable or a flag.
#[derive(serde::Deserialize)]
#[serde(untagged, expecting = "expected a string or a number")]
enum Scalar {
    Text(String),
    Integer(i64),
    Float(f64),
    Boolean(bool),
}

impl fmt::Display for Scalar {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Text(text) => f.write_str(text.trim()),
            Self::Integer(number) => number.fmt(f),
            Self::Float(number) => number.fmt(f),
            Self::Boolean(boolean) => boolean.fmt(f),
        }
    }
}

fn read<'de, D: Deserializer<'de>, T, E: fmt::Display>(
    value: D,
    parse: impl FnOnce(&str) -> Result<T, E>,
) -> Result<T, D::Error> {
    parse(&Scalar::deserialize(value)?.to_string()).map_err(D::Error::custom)
}

/// Reads a value whose type parses its text.
pub(super) fn parsed<'de, D: Deserializer<'de>, T>(value: D) -> Result<T, D::Error>
where
    T: FromStr<Err: fmt::Display>,
{
    read(value, str::parse)
}

/// Reads a number; `limits` checks its range.
pub(super) fn number<'de, D: Deserializer<'de>, T: FromStr>(value: D) -> Result<T, D::Error> {
    read(value, |text| {
        let expected = match text.parse::<f64>() {
            Ok(_) => "a whole number within the limits of this key",
            Err(_) => "a number",
        };
        text.parse().map_err(|_| not(text, expected))
    })
}

pub(super) fn duration<'de, D: Deserializer<'de>>(value: D) -> Result<Duration, D::Error> {
    read(value, parse_duration)
}

/// Reads "off" or a time.
pub(super) fn time_limit<'de, D: Deserializer<'de>>(
    value: D,
) -> Result<Option<Duration>, D::Error> {
    read(value, |text| unless("off", text, parse_duration))
}

pub(super) fn size<'de, D: Deserializer<'de>>(value: D) -> Result<u64, D::Error> {
    read(value, parse_size)
}

/// Reads "off" or a size.
pub(super) fn size_limit<'de, D: Deserializer<'de>>(value: D) -> Result<Option<u64>, D::Error> {
    read(value, |text| unless("off", text, parse_size))
}

pub(super) fn percent<'de, D: Deserializer<'de>>(value: D) -> Result<f64, D::Error> {
    read(value, parse_percent)
}

/// Returns `None` for the key's own word, otherwise the result of `parse`.
pub(super) fn unless<T>(
    word: &'static str,
    text: &str,
    parse: impl FnOnce(&str) -> Result<T, Invalid>,
) -> Result<Option<T>, Invalid> {
    if text == word {
        return Ok(None);
    }
    parse(text).map(Some).map_err(|problem| problem.nor(word))
}

/// Reads a string; one without content is none.
pub(super) fn optional<'de, D: Deserializer<'de>>(value: D) -> Result<Option<String>, D::Error> {
    let text = String::deserialize(value)?;
    if text.contains('\0') {
        return Err(D::Error::custom(Invalid::ZeroByte {
            given: shown(&text),
        }));
    }
    Ok(Some(text).filter(|text| !text.trim().is_empty()))
}

fn path_of(text: String) -> Result<PathBuf, Invalid> {
    if text == "~" || text.starts_with("~/") {
        return Err(Invalid::Home {
            given: shown(&text),
        });
    }
    Ok(PathBuf::from(text))
}

pub(super) fn optional_path<'de, D: Deserializer<'de>>(
    value: D,
) -> Result<Option<PathBuf>, D::Error> {
    let path = optional(value)?.map(path_of).transpose();
    path.map_err(D::Error::custom)
}

pub(super) fn path<'de, D: Deserializer<'de>>(value: D) -> Result<PathBuf, D::Error> {
    optional_path(value)?.ok_or_else(|| D::Error::custom(not("", "a path")))
}

/// Reads text that a type parses; text without content is none.
pub(super) fn optional_parsed<'de, D: Deserializer<'de>, T>(value: D) -> Result<Option<T>, D::Error>
where
    T: FromStr<Err: fmt::Display>,
{
    let text = optional(value)?;
    text.map(|text| text.trim().parse())
        .transpose()
        .map_err(D::Error::custom)
}

/// Reads an address. A host name is refused, because it could resolve to different addresses on different machines.
pub(super) fn address<'de, D: Deserializer<'de>>(value: D) -> Result<Option<SocketAddr>, D::Error> {
    let parse = |text: String| {
        let expected = "an address with a port, such as \"127.0.0.1:9464\"";
        text.trim().parse().map_err(|_| not(&text, expected))
    };
    let address = optional(value)?.map(parse).transpose();
    address.map_err(D::Error::custom)
}

fn list<'de, D: Deserializer<'de>>(value: D) -> Result<Vec<String>, D::Error> {
    let items = Vec::<String>::deserialize(value)?;
    if items.len() <= LIST_ITEMS_MAX {
        return Ok(items);
    }
    Err(D::Error::custom(Invalid::TooMuch {
        given: items.len(),
        limit: LIST_ITEMS_MAX,
        what: "items",
    }))
}

/// Reads patterns of files.
pub(super) fn patterns<'de, D: Deserializer<'de>>(value: D) -> Result<Vec<String>, D::Error> {
    let patterns = list(value)?;
    for text in &patterns {
        globset::Glob::new(text).map_err(|error| {
            D::Error::custom(Invalid::Pattern {
                given: shown(text),
                reason: error.kind().to_string(),
            })
        })?;
    }
    Ok(patterns)
}

pub(super) fn exit_statuses<'de, D: Deserializer<'de>>(
    value: D,
) -> Result<Vec<ExitStatus>, D::Error> {
    let items = list(value)?;
    let statuses: Result<_, Invalid> = items.iter().map(|text| text.trim().parse()).collect();
    statuses.map_err(D::Error::custom)
}

/// Reads a string for the shell, a list of words, or "" for no command.
pub(super) fn hook<'de, D: Deserializer<'de>>(value: D) -> Result<Option<HookCommand>, D::Error> {
    let command = HookCommand::deserialize(value)?;
    let words = match &command {
        HookCommand::Shell(line) if line.trim().is_empty() => return Ok(None),
        HookCommand::Words(words) if words.is_empty() => return Ok(None),
        HookCommand::Shell(line) => std::slice::from_ref(line),
        HookCommand::Words(words) => words,
    };
    let too_much = |given, limit, what| Invalid::TooMuch { given, limit, what };
    let problem = if words.len() > HOOK_WORDS_MAX {
        too_much(words.len(), HOOK_WORDS_MAX, "words")
    } else if let Some(word) = words.iter().find(|word| word.len() > HOOK_BYTES_MAX) {
        too_much(word.len(), HOOK_BYTES_MAX, "bytes")
    } else if let Some(word) = words.iter().find(|word| word.contains('\0')) {
        Invalid::ZeroByte { given: shown(word) }
    } else {
        return Ok(Some(command));
    };
    Err(D::Error::custom(problem))
}
