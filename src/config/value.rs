//! An unchecked value, and the typed readings of it.
//!
//! Files give typed values; variables and flags give words, which are read as the type that the key takes. Ranges are
//! checked here, so that every reading has its range checked.

use std::ops::RangeInclusive;
use std::time::Duration;

use toml::de::DeValue;

use super::Invalid;
use super::units::{format_duration, format_size, parse_duration, parse_size, shown};

/// An enum with one word per value in files and flags.
pub(crate) trait Choice: Copy + PartialEq + 'static {
    /// Every value with its word.
    const WORDS: &'static [(&'static str, Self)];

    /// Returns the words.
    fn words() -> Vec<&'static str> {
        Self::WORDS.iter().map(|(word, _)| *word).collect()
    }
}

/// A value that is not yet assigned to a key.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Value {
    /// A value from a variable or a flag; its type is unknown.
    Words(String),
    Text(String),
    Integer(i64),
    Float(f64),
    Bool(bool),
    List(Vec<Value>),
    /// A value of a type that no key takes, or a number too large for any key; holds the type's name.
    Other(&'static str),
}

impl Value {
    pub(super) fn from_toml(value: &DeValue<'_>) -> Self {
        match value {
            DeValue::String(text) => Self::Text(text.clone().into_owned()),
            DeValue::Integer(number) => i64::from_str_radix(number.as_str(), number.radix())
                .map_or(Self::Other("a number too large"), Self::Integer),
            DeValue::Float(number) => number
                .as_str()
                .parse()
                .map_or(Self::Other("a number too large"), Self::Float),
            DeValue::Boolean(bool) => Self::Bool(*bool),
            DeValue::Datetime(_) => Self::Other("a date"),
            DeValue::Array(items) => Self::List(
                items
                    .iter()
                    .map(|item| Self::from_toml(item.get_ref()))
                    .collect(),
            ),
            DeValue::Table(_) => Self::Other("a table"),
        }
    }

    pub(super) fn text(&self) -> Result<&str, Invalid> {
        match self {
            Self::Words(text) | Self::Text(text) => Ok(text),
            Self::Integer(_) | Self::Float(_) | Self::Bool(_) | Self::List(_) | Self::Other(_) => {
                Err(self.not("a string"))
            }
        }
    }

    pub(super) fn integer(&self, range: &RangeInclusive<i64>) -> Result<i64, Invalid> {
        let number = match self {
            Self::Integer(number) => *number,
            Self::Words(words) => words.trim().parse().map_err(|_| Invalid::Number {
                given: shown(words),
                expected: "a whole number",
            })?,
            Self::Text(_) | Self::Float(_) | Self::Bool(_) | Self::List(_) | Self::Other(_) => {
                return Err(self.not("a whole number"));
            }
        };
        within(number, range, ToString::to_string)
    }

    pub(super) fn float(&self, range: &RangeInclusive<f64>) -> Result<f64, Invalid> {
        let number = match self {
            Self::Float(number) => *number,
            // The conversion is exact below 2^53; the ranges of the keys are far below that.
            #[expect(clippy::cast_precision_loss, reason = "rounded only far out of range")]
            Self::Integer(number) => *number as f64,
            Self::Words(words) => words.trim().parse().map_err(|_| Invalid::Number {
                given: shown(words),
                expected: "a number",
            })?,
            Self::Text(_) | Self::Bool(_) | Self::List(_) | Self::Other(_) => {
                return Err(self.not("a number"));
            }
        };
        within(number, range, ToString::to_string)
    }

    pub(super) fn duration(&self, range: &RangeInclusive<Duration>) -> Result<Duration, Invalid> {
        within(parse_duration(&self.with_unit()?)?, range, |limit| {
            format_duration(*limit)
        })
    }

    pub(super) fn size(&self, range: &RangeInclusive<u64>) -> Result<u64, Invalid> {
        within(parse_size(&self.with_unit()?)?, range, |limit| {
            format_size(*limit)
        })
    }

    pub(super) fn boolean(&self) -> Result<bool, Invalid> {
        match self {
            Self::Bool(bool) => Ok(*bool),
            Self::Words(words) => words.trim().parse().map_err(|_| Invalid::Number {
                given: shown(words),
                expected: "\"true\" or \"false\"",
            }),
            Self::Text(_) | Self::Integer(_) | Self::Float(_) | Self::List(_) | Self::Other(_) => {
                Err(self.not("true or false"))
            }
        }
    }

    pub(super) fn choice<T: Choice>(&self) -> Result<T, Invalid> {
        let text = self.text()?.trim();
        let found = T::WORDS.iter().find(|(word, _)| *word == text);
        found
            .map(|(_, value)| *value)
            .ok_or_else(|| Invalid::Choice {
                given: shown(text),
                choices: T::WORDS
                    .iter()
                    .map(|(word, _)| format!("{word:?}"))
                    .collect::<Vec<_>>()
                    .join(", "),
            })
    }

    /// Returns the items of a list. Words are separated by commas; empty words are an empty list.
    pub(super) fn list(&self) -> Result<Vec<Value>, Invalid> {
        match self {
            Self::List(items) => Ok(items.clone()),
            Self::Words(words) if words.trim().is_empty() => Ok(Vec::new()),
            Self::Words(words) => Ok(words
                .split(',')
                .map(|word| Self::Words(word.trim().to_owned()))
                .collect()),
            Self::Text(_) | Self::Integer(_) | Self::Float(_) | Self::Bool(_) | Self::Other(_) => {
                Err(self.not("a list of strings"))
            }
        }
    }

    /// Returns `None` for the key's own word, otherwise the result of `read`.
    pub(super) fn unless<T>(
        &self,
        word: &'static str,
        read: impl FnOnce(&Self) -> Result<T, Invalid>,
    ) -> Result<Option<T>, Invalid> {
        if self.text().is_ok_and(|text| text.trim() == word) {
            return Ok(None);
        }
        read(self).map(Some).map_err(|problem| match problem {
            Invalid::Type { .. }
            | Invalid::Duration { .. }
            | Invalid::Size { .. }
            | Invalid::Number { .. } => Invalid::Neither {
                word,
                problem: Box::new(problem),
            },
            Invalid::NoUnit { .. }
            | Invalid::Range { .. }
            | Invalid::Percent { .. }
            | Invalid::Choice { .. }
            | Invalid::Neither { .. }
            | Invalid::Cron { .. }
            | Invalid::ExitStatus { .. }
            | Invalid::Pattern { .. }
            | Invalid::Command { .. }
            | Invalid::Path { .. } => problem,
        })
    }

    pub(super) fn not(&self, expected: &'static str) -> Invalid {
        let found = match self {
            Self::Words(_) | Self::Text(_) => "a string",
            Self::Integer(_) => "a whole number",
            Self::Float(_) => "a number with a fraction",
            Self::Bool(_) => "a boolean",
            Self::List(_) => "a list",
            Self::Other(name) => name,
        };
        Invalid::Type { expected, found }
    }

    /// Returns text, or a number as text: the parser then reports the missing unit.
    fn with_unit(&self) -> Result<String, Invalid> {
        match self {
            Self::Words(text) | Self::Text(text) => Ok(text.clone()),
            Self::Integer(number) => Ok(number.to_string()),
            Self::Float(number) => Ok(number.to_string()),
            Self::Bool(_) | Self::List(_) | Self::Other(_) => Err(self.not("a string with a unit")),
        }
    }
}

fn within<T: PartialOrd>(
    value: T,
    range: &RangeInclusive<T>,
    format: impl Fn(&T) -> String,
) -> Result<T, Invalid> {
    if range.contains(&value) {
        return Ok(value);
    }
    Err(Invalid::Range {
        given: format(&value),
        low: format(range.start()),
        high: format(range.end()),
    })
}
