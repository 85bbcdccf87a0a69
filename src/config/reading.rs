//! Parsers of the keys that need more than [`Value`]'s own, and the display forms of values.

use std::net::SocketAddr;
use std::num::NonZeroUsize;
use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::time::Duration;

use toml::Value as Shown;

use super::limits::{BUFFER, CPUS, PATTERNS_MAX};
use super::units::{format_duration, format_size, shown};
use super::value::{Choice, Value};
use super::{Buffer, Cpus, CronExpression, Invalid, Tty};

pub(super) fn command(value: &Value) -> Result<Option<String>, Invalid> {
    let text = value.text()?;
    if text.contains('\0') {
        return Err(Invalid::Command { given: shown(text) });
    }
    Ok(Some(text.to_owned()).filter(|text| !text.trim().is_empty()))
}

/// Reads patterns of files.
pub(super) fn patterns(value: &Value) -> Result<Vec<String>, Invalid> {
    let items = value.list()?;
    if items.len() > PATTERNS_MAX {
        return Err(Invalid::Range {
            given: format!("a list of {}", items.len()),
            low: "0".to_owned(),
            high: format!("{PATTERNS_MAX} items"),
        });
    }
    let check = |item: &Value| {
        let text = item.text()?;
        let pattern = globset::Glob::new(text).map_err(|error| Invalid::Pattern {
            given: shown(text),
            reason: error.kind().to_string(),
        });
        pattern.map(|_| text.to_owned())
    };
    items.iter().map(check).collect()
}

pub(super) fn path(value: &Value) -> Result<PathBuf, Invalid> {
    let text = value.text()?;
    let refused = |reason| Invalid::Path {
        given: shown(text),
        reason,
    };
    if text.is_empty() {
        return Err(refused("is not a path"));
    }
    if text.contains('\0') {
        return Err(refused("holds a zero byte"));
    }
    if text == "~" || text.starts_with("~/") {
        return Err(refused("is not expanded here; write the home folder out"));
    }
    Ok(PathBuf::from(text))
}

pub(super) fn optional_path(value: &Value) -> Result<Option<PathBuf>, Invalid> {
    match value.text()? {
        "" => Ok(None),
        _ => path(value).map(Some),
    }
}

pub(super) fn optional_text(value: &Value) -> Result<Option<String>, Invalid> {
    let text = value.text()?;
    Ok(Some(text.to_owned()).filter(|text| !text.is_empty()))
}

pub(super) fn cron(value: &Value) -> Result<Option<CronExpression>, Invalid> {
    match value.text()?.trim() {
        "" => Ok(None),
        text => CronExpression::parse(text).map(Some),
    }
}

pub(super) fn tty(value: &Value) -> Result<Tty, Invalid> {
    Ok(match value.unless("auto", Value::boolean)? {
        None => Tty::Auto,
        Some(true) => Tty::Always,
        Some(false) => Tty::Never,
    })
}

pub(super) fn buffer(value: &Value) -> Result<Buffer, Invalid> {
    let bytes = value.unless("auto", |value| value.size(&BUFFER))?;
    Ok(bytes.map_or(Buffer::Auto, Buffer::Bytes))
}

pub(super) fn cpus(value: &Value) -> Result<Cpus, Invalid> {
    let count: Option<usize> = value.unless("auto", |value| narrow(value, &CPUS))?;
    Ok(count
        .and_then(NonZeroUsize::new)
        .map_or(Cpus::Auto, Cpus::Count))
}

/// Reads an integer in `range` as the type of its field, which must hold the range.
pub(super) fn narrow<T: TryFrom<i64>>(
    value: &Value,
    range: &RangeInclusive<i64>,
) -> Result<T, Invalid> {
    let number = value.integer(range)?;
    T::try_from(number).map_err(|_| Invalid::Range {
        given: number.to_string(),
        low: range.start().to_string(),
        high: range.end().to_string(),
    })
}

pub(super) fn word<T: Choice>(value: T) -> Shown {
    let found = T::WORDS.iter().find(|(_, choice)| *choice == value);
    Shown::from(found.map_or("", |(word, _)| word))
}

pub(super) fn duration(time: Duration) -> Shown {
    Shown::String(format_duration(time))
}

pub(super) fn size(bytes: u64) -> Shown {
    Shown::String(format_size(bytes))
}

pub(super) fn shown_path(path: Option<&PathBuf>) -> Shown {
    optional(path.map(|path| path.to_string_lossy().into_owned()))
}

/// Returns the text, or "" for none: TOML has no null.
pub(super) fn optional(text: Option<String>) -> Shown {
    Shown::String(text.unwrap_or_default())
}

/// Reads an address; "" is none. A host name is refused, because it could resolve to different addresses on different
/// machines.
pub(super) fn address(value: &Value) -> Result<Option<SocketAddr>, Invalid> {
    match value.text()?.trim() {
        "" => Ok(None),
        text => text.parse().map(Some).map_err(|_| Invalid::Number {
            given: shown(text),
            expected: "an address with a port, such as \"127.0.0.1:9464\"",
        }),
    }
}
