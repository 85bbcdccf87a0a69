//! The combination of all places, and its result.
//!
//! Later places have precedence, key by key. The schedule is one decision in two keys: a place that gives
//! `snapshot.interval` overrides a `snapshot.cron` of an earlier place, and a place that gives both is refused. The
//! same applies to the two keys for the location of the store's encryption key.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::Path;

use serde::Deserialize;
use toml::{Table, Value};

use super::file::{Place, read_if_there, read_project};
use super::layer::{Entry, KEYS, Key, Layer, environment_layer, flag_layer, toml_layer};
use super::{Config, ConfigError, Memory, Nccl, Origin, Override, Sources, limits};

/// The commented file with every key, built into the program.
pub const DEFAULT_TOML: &str = include_str!("../../config/default.toml");

/// The key of the schedule that has a default.
pub(super) const INTERVAL: &str = "snapshot.interval";
/// The key of the schedule that has precedence.
const CRON: &str = "snapshot.cron";
const KEY_FILE: &str = "encryption.key_file";
const KEY_COMMAND: &str = "encryption.key_command";
/// Pairs of keys of which a place can give only one.
const EXCLUSIVE: [[&str; 2]; 2] = [[INTERVAL, CRON], [KEY_FILE, KEY_COMMAND]];
/// Pairs of keys of which the first ends a value of the second from an earlier place.
const ENDING: [[&str; 2]; 3] = [
    [INTERVAL, CRON],
    [KEY_FILE, KEY_COMMAND],
    [KEY_COMMAND, KEY_FILE],
];

/// Settings with the origin of each.
#[derive(Debug, Clone, PartialEq)]
pub struct Loaded {
    /// The settings.
    pub config: Config,
    /// The origin of every key, by its path ("snapshot.interval").
    pub origins: BTreeMap<String, Origin>,
    /// The value of every key as it was given, by its path.
    values: BTreeMap<&'static str, Value>,
}

/// Loads the settings from all places.
///
/// # Errors
/// The first problem, with its place; no settings are loaded then.
pub fn load(sources: &Sources) -> Result<Loaded, ConfigError> {
    let mut loaded = Loaded::default();
    first(loaded.lay_all(sources))?;
    Ok(loaded)
}

/// Returns every problem with the settings of all places, place by place; empty for settings that [`load`] accepts.
#[must_use]
pub fn check(sources: &Sources) -> Vec<ConfigError> {
    Loaded::default().lay_all(sources)
}

fn in_file(path: &Path) -> impl Fn(usize) -> Origin {
    |line| Origin::File {
        path: path.to_owned(),
        line,
    }
}

/// The settings of the embedded file.
impl Default for Loaded {
    fn default() -> Self {
        let values = KEYS
            .iter()
            .map(|key| (key.path.as_str(), key.value.clone()));
        let values = values.collect();
        Self {
            config: settings(&values).expect("the embedded settings are valid"),
            origins: KEYS
                .iter()
                .map(|key| (key.path.clone(), Origin::Default))
                .collect(),
            values,
        }
    }
}

impl Default for Config {
    fn default() -> Self {
        Loaded::default().config
    }
}

impl Loaded {
    /// Returns the settings as a file that would set them, without comments.
    #[must_use]
    pub fn to_toml(&self) -> String {
        self.render(|_| String::new())
    }

    /// Returns the text of [`Self::to_toml`] with the origin of each value as a comment.
    #[must_use]
    pub fn to_toml_with_origins(&self) -> String {
        self.render(|key| format!("  # {}", self.origins[&key.path]).replace('\n', " "))
    }

    /// Returns the tables and values of the file that [`Self::to_toml`] writes.
    #[must_use]
    pub fn to_table(&self) -> Table {
        table(&self.values)
    }

    /// Returns these settings with some replaced, as if by flags.
    ///
    /// # Errors
    /// The first problem.
    pub fn with(&self, overrides: &[Override]) -> Result<Self, ConfigError> {
        let mut loaded = self.clone();
        first(loaded.lay(flag_layer(overrides)))?;
        Ok(loaded)
    }

    /// Applies the valid settings of all other places; returns the errors of the others.
    fn lay_all(&mut self, sources: &Sources) -> Vec<ConfigError> {
        let mut refused = Vec::new();
        let trusted = [
            (Some(&sources.system), Place::System),
            (sources.user.as_ref(), Place::User),
        ];
        for (path, place) in trusted {
            let Some(path) = path else { continue };
            let text =
                read_if_there(path, place).map(|text| text.map(|text| (path.as_path(), text)));
            refused.extend(self.lay_file(text));
        }
        refused.extend(self.lay_file(read_project(&sources.project)));
        refused.extend(self.lay(environment_layer(&sources.environment)));
        refused.extend(self.lay(flag_layer(&sources.overrides)));
        refused.extend(self.contradictions());
        refused
    }

    fn lay_file(&mut self, file: Result<Option<(&Path, String)>, ConfigError>) -> Vec<ConfigError> {
        match file {
            Ok(Some((path, text))) => self.lay(toml_layer(&text, in_file(path))),
            Ok(None) => Vec::new(),
            Err(error) => vec![error],
        }
    }

    /// Applies the valid settings of one place; returns the errors of the others.
    fn lay(&mut self, layer: Layer) -> Vec<ConfigError> {
        let mut refused = Vec::new();
        let mut here: BTreeMap<&'static str, Origin> = BTreeMap::new();
        for entry in layer {
            let set = entry.and_then(|entry| {
                let (path, origin) = (entry.key.path.as_str(), entry.origin.clone());
                self.set(entry)?;
                match here.insert(path, origin) {
                    Some(first) => {
                        let why = "both set the same key; keep one";
                        Err(contradiction(
                            (first, path),
                            (here[path].clone(), path),
                            why,
                        ))
                    }
                    None => Ok(()),
                }
            });
            refused.extend(set.err());
        }
        let given_here = |loaded: &Self, path| here.get(path).filter(|_| loaded.is_given(path));
        for [first, second] in EXCLUSIVE {
            if let (Some(one), Some(other)) = (given_here(self, first), given_here(self, second)) {
                let why = "only one can be given; remove the other";
                let (one, other) = ((one.clone(), first), (other.clone(), second));
                refused.push(contradiction(one, other, why));
            }
        }
        for [path, ended] in ENDING {
            if let Some(origin) = given_here(self, path)
                && self.is_given(ended)
                && !here.contains_key(ended)
            {
                self.values.insert(ended, Value::from(""));
                self.origins.insert(ended.to_owned(), origin.clone());
            }
        }
        self.config = settings(&self.values).unwrap_or_else(|_| self.config.clone());
        refused
    }

    /// Returns true if the key has a value with content.
    fn is_given(&self, path: &str) -> bool {
        let text = self.values.get(path).and_then(Value::as_str);
        text.is_some_and(|text| !text.trim().is_empty())
    }

    /// Sets one key; a refused value changes nothing.
    fn set(&mut self, entry: Entry) -> Result<(), ConfigError> {
        let path = entry.key.path.as_str();
        let mut values = self.values.clone();
        values.insert(path, entry.value);
        self.config = settings(&values).map_err(|problem| ConfigError::Value {
            origin: entry.origin.clone(),
            key: path.to_owned(),
            problem,
        })?;
        self.values = values;
        self.origins.insert(path.to_owned(), entry.origin);
        Ok(())
    }

    /// Returns the contradictions between settings of any places.
    fn contradictions(&self) -> Vec<ConfigError> {
        let Config {
            restart,
            cuda,
            metrics,
            ..
        } = &self.config;
        let listens_beyond = metrics
            .listen
            .is_some_and(|listen| !listen.ip().is_loopback());
        let possible = [
            (
                restart.backoff > restart.backoff_max,
                ["restart.backoff", "restart.backoff_max"],
                "the first wait is longer than the maximum",
            ),
            (
                // Only agents can restore memory that GPUs share.
                (cuda.nccl, cuda.memory) == (Nccl::Peer, Memory::Driver),
                ["cuda.nccl", "cuda.memory"],
                "the driver alone cannot restore memory that GPUs share: set cuda.memory = \"auto\" or \"resident\"",
            ),
            (
                listens_beyond && !metrics.allow_remote,
                ["metrics.listen", "metrics.allow_remote"],
                "other machines could read the metrics: listen on 127.0.0.1, or set metrics.allow_remote = true",
            ),
        ];
        let found = possible.into_iter().filter(|(is_wrong, ..)| *is_wrong);
        found
            .map(|(_, keys, why)| {
                let [first, second] = keys.map(|key| (self.origins[key].clone(), key));
                contradiction(first, second, why)
            })
            .collect()
    }

    /// Writes the keys in the order of the default file, under their sections.
    fn render(&self, comment: impl Fn(&Key) -> String) -> String {
        let mut text = String::new();
        let mut open = "";
        for key in KEYS.iter() {
            if key.path == INTERVAL && self.config.snapshot.cron.is_some() {
                // The interval has no effect, and a file with both would be refused.
                continue;
            }
            let (section, name) = key.split();
            if section != open {
                open = section;
                // Writing to a string cannot fail.
                let _ = writeln!(text, "\n[{section}]");
            }
            let value = &self.values[key.path.as_str()];
            let _ = writeln!(text, "{name} = {value}{}", comment(key));
        }
        text
    }
}

/// Returns the settings that have these values.
fn settings(values: &BTreeMap<&'static str, Value>) -> Result<Config, String> {
    let config = Config::deserialize(table(values)).map_err(|error| error.message().to_owned())?;
    limits::check(&config).map_err(|problem| problem.to_string())?;
    Ok(config)
}

/// Returns the values in the sections of a file.
fn table(values: &BTreeMap<&'static str, Value>) -> Table {
    let mut table = Table::new();
    for (path, value) in values {
        let Some((section, name)) = path.split_once('.') else {
            table.insert((*path).to_owned(), value.clone());
            continue;
        };
        let section = table.entry(section).or_insert(Value::Table(Table::new()));
        if let Value::Table(section) = section {
            section.insert(name.to_owned(), value.clone());
        }
    }
    table
}

/// Returns the first of the errors.
fn first(refused: Vec<ConfigError>) -> Result<(), ConfigError> {
    refused.into_iter().next().map_or(Ok(()), Err)
}

fn contradiction(
    (first, first_key): (Origin, &'static str),
    (second, second_key): (Origin, &'static str),
    why: &'static str,
) -> ConfigError {
    ConfigError::Contradiction {
        first,
        first_key,
        second,
        second_key,
        why,
    }
}
