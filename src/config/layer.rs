//! The content of one place: keys with their origins and values that are not checked yet.
//!
//! This module knows the existing keys and suggests a similar one for an unknown key. It does not know which place has
//! precedence.

use std::sync::LazyLock;

use serde::Deserialize;
use serde::de::IntoDeserializer;
use toml::de::{DeTable, DeValue};
use toml::{Spanned, Value};

use super::loaded::{DEFAULT_TOML, INTERVAL};
use super::sources::{CONFIG_VARIABLE, PREFIX};
use super::units::shown;
use super::{ConfigError, Origin, Override};

/// The short variable of `criu.path`.
const CRIU_VARIABLE: &str = "CKPT_RUN_CRIU";
/// Variables set for the job, and thereby for a ckpt-run that the job starts. They set no settings.
const JOB_VARIABLES: [&str; 2] = ["CKPT_RUN_JOB", "CKPT_RUN_SOCKET"];
/// Limit on the reported errors of a text: one error leads to others, and the first few are sufficient.
const SYNTAX_ERRORS_MAX: usize = 10;
/// Variables set for a hook, and thereby for a ckpt-run that the hook starts. They set no settings either.
pub(crate) const HOOK_VARIABLES: [&str; 7] = [
    "CKPT_RUN_HOOK",
    "CKPT_RUN_IMAGE",
    "CKPT_RUN_TRIGGER",
    "CKPT_RUN_FREEZE_SECONDS",
    "CKPT_RUN_EXIT_CODE",
    "CKPT_RUN_REASON",
    "CKPT_RUN_DIAGNOSIS",
];
/// Limit on the length of a name that gets a suggestion: a suggestion compares every key with the name, and a longer
/// name is not a typing error.
const SUGGEST_BYTES_MAX: usize = 64;
/// The smallest similarity (0 to 1) of a suggestion; a less similar one only confuses.
const LIKENESS_MIN: f64 = 0.7;

/// A key of the embedded file.
pub(super) struct Key {
    /// The key's path: "section.name", or "name".
    pub(super) path: String,
    /// The default.
    pub(super) value: Value,
}

/// Every key, in the order of the embedded file.
pub(super) static KEYS: LazyLock<Vec<Key>> = LazyLock::new(|| {
    let mut keys = Vec::new();
    let table = DeTable::parse(DEFAULT_TOML).expect("the embedded file is TOML");
    for (name, value) in table.get_ref() {
        let offset = name.span().start;
        match value.get_ref() {
            DeValue::Table(section) => keys.extend(section.iter().map(|(key, value)| {
                let path = format!("{}.{}", name.get_ref(), key.get_ref());
                (key.span().start, path, value)
            })),
            _ => keys.push((offset, name.get_ref().to_string(), value)),
        }
    }
    // A table orders its keys alphabetically.
    keys.sort_by_key(|(offset, _, _)| *offset);
    let key = |(_, path, value): (usize, String, &Spanned<DeValue<'_>>)| Key {
        path,
        value: plain(value).expect("the embedded values are TOML"),
    };
    keys.into_iter().map(key).collect()
});

impl Key {
    /// Returns the section (empty for the keys above all sections) and the name within it.
    pub(super) fn split(&self) -> (&str, &str) {
        self.path.rsplit_once('.').unwrap_or(("", &self.path))
    }

    /// Returns the name of the environment variable that sets the key.
    pub(super) fn variable(&self) -> String {
        format!("{PREFIX}{}", self.path.replace('.', "_").to_uppercase())
    }

    /// Returns the value of a text from a variable or a flag, in the type of the default if it has that form. Items of
    /// a list are separated by commas; text without content is an empty list.
    fn value(&self, text: &str) -> Value {
        let word = text.trim();
        let typed = match &self.value {
            Value::Integer(_) => word.parse().ok().map(Value::Integer),
            Value::Float(_) => word.parse().ok().map(Value::Float),
            Value::Boolean(_) => word.parse().ok().map(Value::Boolean),
            Value::Array(_) if word.is_empty() => Some(Value::Array(Vec::new())),
            Value::Array(_) => Some(Value::Array(
                word.split(',').map(|item| item.trim().into()).collect(),
            )),
            Value::String(_) | Value::Datetime(_) | Value::Table(_) => None,
        };
        typed.unwrap_or_else(|| Value::from(text))
    }
}

/// A key with its value from one place.
pub(super) struct Entry {
    pub(super) key: &'static Key,
    pub(super) value: Value,
    pub(super) origin: Origin,
}

/// The content of one place in its order: the keys, and the errors among them.
pub(super) type Layer = Vec<Result<Entry, ConfigError>>;

/// Returns the settings of the environment variables, in the given order.
pub(super) fn environment_layer(variables: &[(String, String)]) -> Layer {
    let ours = variables
        .iter()
        .filter(|(name, _)| name.starts_with(PREFIX))
        .filter(|(name, _)| name != CONFIG_VARIABLE && !JOB_VARIABLES.contains(&name.as_str()))
        .filter(|(name, _)| !HOOK_VARIABLES.contains(&name.as_str()));
    ours.map(|(name, value)| {
        let key = KEYS.iter().find(|key| {
            key.variable() == *name || (key.path == "criu.path" && name == CRIU_VARIABLE)
        });
        let key = key.ok_or_else(|| ConfigError::UnknownVariable {
            variable: name.clone(),
            suggestion: closest(&name[PREFIX.len()..].to_lowercase()).map(Key::variable),
        })?;
        let variable = name.clone();
        Ok(Entry {
            key,
            value: key.value(value),
            origin: Origin::Environment { variable },
        })
    })
    .collect()
}

/// Returns the settings of the command line.
pub(super) fn flag_layer(overrides: &[Override]) -> Layer {
    overrides
        .iter()
        .map(|given| {
            let origin = Origin::Flag { flag: given.flag };
            let key = find(given.key).ok_or_else(|| unknown(given.key, origin.clone()))?;
            let digits = given.value.bytes().all(|byte| byte.is_ascii_digit());
            // The only place where a bare number has a unit: `--interval 900`.
            let value = if key.path == INTERVAL && digits && !given.value.is_empty() {
                Value::String(format!("{}s", given.value))
            } else {
                key.value(&given.value)
            };
            Ok(Entry { key, value, origin })
        })
        .collect()
}

/// Returns the settings of a file with this text; `origin` maps a line to its origin. If the text is not TOML, the
/// layer holds only the syntax errors, because the rest of the text may mean anything.
pub(super) fn toml_layer(text: &str, origin: impl Fn(usize) -> Origin) -> Layer {
    let origin = |offset| origin(line(text, offset));
    let (table, errors) = DeTable::parse_recoverable(text);
    if !errors.is_empty() {
        let refused = errors.iter().take(SYNTAX_ERRORS_MAX).map(|error| {
            Err(ConfigError::Syntax {
                origin: origin(error.span().map_or(0, |span| span.start)),
                message: error.message().replace('\n', ", "),
            })
        });
        return refused.collect();
    }
    let mut found = Vec::new();
    collect(table.get_ref(), "", &origin, &mut found);
    // A table orders its keys alphabetically.
    found.sort_by_key(|(offset, _)| *offset);
    found.into_iter().map(|(_, entry)| entry).collect()
}

/// Adds the keys of a table and of its sections to `found`, each with its offset in the text.
fn collect(
    table: &DeTable<'_>,
    section: &str,
    origin: &impl Fn(usize) -> Origin,
    found: &mut Vec<(usize, Result<Entry, ConfigError>)>,
) {
    for (name, value) in table {
        let offset = name.span().start;
        let origin_here = origin(offset);
        let path = if section.is_empty() {
            name.get_ref().to_string()
        } else {
            format!("{section}.{}", name.get_ref())
        };
        let refused = |problem: String| ConfigError::Value {
            origin: origin_here.clone(),
            key: path.clone(),
            problem,
        };
        if let Some(key) = find(&path) {
            let entry = plain(value).map(|value| Entry {
                key,
                value,
                origin: origin_here.clone(),
            });
            // Everything else that TOML allows is a value of `toml` too.
            let entry = entry.map_err(|_| refused("a number is too large".to_owned()));
            found.push((offset, entry));
        } else if !KEYS.iter().any(|key| key.split().0 == path) {
            found.push((offset, Err(unknown(&path, origin_here))));
        } else if let DeValue::Table(inner) = value.get_ref() {
            collect(inner, &path, origin, found);
        } else {
            let problem = format!("expected a table of settings, `[{path}]`");
            found.push((offset, Err(refused(problem))));
        }
    }
}

/// Returns the value without its places in the text.
fn plain(value: &Spanned<DeValue<'_>>) -> Result<Value, toml::de::Error> {
    Value::deserialize(value.clone().into_deserializer())
}

fn find(path: &str) -> Option<&'static Key> {
    KEYS.iter().find(|key| key.path == path)
}

fn unknown(path: &str, origin: Origin) -> ConfigError {
    let section = path.rsplit_once('.').map_or("", |(section, _)| section);
    let suggestion = match closest(path) {
        Some(key) if key.split().0 == section => Some(key.split().1),
        Some(key) => Some(key.path.as_str()),
        None => closest_section(path),
    };
    ConfigError::UnknownKey {
        origin,
        // A quoted key can contain any character, including line ends.
        key: shown(path).escape_debug().to_string(),
        suggestion: suggestion.map(str::to_owned),
    }
}

/// Returns the key most similar to the given one, compared as a whole or by its last name.
fn closest(given: &str) -> Option<&'static Key> {
    /// The weight of a match by name alone: a name in the wrong section is slightly less likely than a typing error.
    const NAME_ALONE: f64 = 0.9;
    let given_name = given.rsplit_once('.').map_or(given, |(_, name)| name);
    most_alike(KEYS.iter(), |key| {
        let whole = likeness(given, &key.path);
        whole.max(NAME_ALONE * likeness(given_name, key.split().1))
    })
}

fn closest_section(given: &str) -> Option<&'static str> {
    let sections = KEYS.iter().map(|key| key.split().0);
    most_alike(sections, |section| likeness(given, section))
}

fn most_alike<T: Copy>(
    candidates: impl Iterator<Item = T>,
    likeness: impl Fn(T) -> f64,
) -> Option<T> {
    candidates
        .map(|candidate| (likeness(candidate), candidate))
        .filter(|(likeness, _)| *likeness >= LIKENESS_MIN)
        .max_by(|(one, _), (other, _)| one.total_cmp(other))
        .map(|(_, candidate)| candidate)
}

/// Returns the similarity from 0 to 1; the same name in capitals or with other separators has 1.
fn likeness(given: &str, name: &str) -> f64 {
    if given.len() > SUGGEST_BYTES_MAX {
        return 0.0;
    }
    let plain = |text: &str| text.to_lowercase().replace(['.', '-'], "_");
    strsim::normalized_damerau_levenshtein(&plain(given), &plain(name))
}

fn line(text: &str, offset: usize) -> usize {
    let before = text.as_bytes().iter().take(offset);
    before.filter(|byte| **byte == b'\n').count() + 1
}
