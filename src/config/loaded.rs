//! The combination of all places, and its result.
//!
//! Later places have precedence, key by key. The schedule is one decision in two keys: a place that gives
//! `snapshot.interval` ends a `snapshot.cron` of an earlier place, and a place that gives both contradicts itself. The
//! same applies to the two keys for the location of the store's encryption key.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::Path;

use serde::{Serialize, Serializer};

use super::file::{Place, read_if_there, read_project};
use super::keys::{
    ALLOW_REMOTE_PATH, BACKOFF_MAX_PATH, BACKOFF_PATH, CRON_PATH, INTERVAL_PATH, KEY_COMMAND_PATH,
    KEY_FILE_PATH, KEYS, Key, LISTEN_PATH, MEMORY_PATH, NCCL_PATH, encryption_path,
};
use super::layer::{Entry, Layer, environment_layer, flag_layer, toml_layer};
use super::{Config, ConfigError, Memory, Nccl, Origin, Sources};

/// The commented file with every key, built into the program.
pub const DEFAULT_TOML: &str = include_str!("../../config/default.toml");

/// The reason why two keys exclude each other.
const ONE_OF_TWO: &str = "only one can be given; remove the other";

/// Settings with the origin of each.
#[derive(Debug, Clone, PartialEq)]
pub struct Loaded {
    /// The settings.
    pub config: Config,
    /// The origin of every key, by its path ("snapshot.interval").
    pub origins: BTreeMap<String, Origin>,
}

/// Loads the settings from all places.
///
/// # Errors
/// The first problem, with its place; no settings are loaded then.
pub fn load(sources: &Sources) -> Result<Loaded, ConfigError> {
    let mut loaded = Loaded::defaults()?;
    loaded.lay_all(sources)?;
    Ok(loaded)
}

/// Returns every problem with the settings of all places, place by place; empty for settings that [`load`] accepts.
#[must_use]
pub fn check(sources: &Sources) -> Vec<ConfigError> {
    match Loaded::defaults() {
        Ok(mut loaded) => loaded.lay_and_tell(sources),
        Err(error) => vec![error],
    }
}

fn in_file(path: &Path) -> impl Fn(usize) -> Origin {
    |line| Origin::File {
        path: path.to_owned(),
        line,
    }
}

impl Loaded {
    /// Returns the text of [`Config::to_toml`] with the origin of each value as a comment.
    #[must_use]
    pub fn to_toml_with_origins(&self) -> String {
        render(&self.config, |key| {
            let origin = self.origins.get(key.path);
            origin.map(|origin| format!("  # {origin}").replace('\n', " "))
        })
    }

    /// Loads the embedded defaults.
    pub(super) fn defaults() -> Result<Self, ConfigError> {
        let mut loaded = Self {
            config: Config::default(),
            origins: BTreeMap::new(),
        };
        first(loaded.lay(toml_layer(DEFAULT_TOML, |_| Origin::Default)))?;
        Ok(loaded)
    }

    /// Applies the settings of all other places.
    pub(super) fn lay_all(&mut self, sources: &Sources) -> Result<(), ConfigError> {
        first(self.lay_and_tell(sources))
    }

    /// Applies the valid settings of all other places; returns the errors of the others.
    fn lay_and_tell(&mut self, sources: &Sources) -> Vec<ConfigError> {
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
        refused.extend(self.check_backoff().err());
        refused.extend(self.check_nccl().err());
        refused.extend(self.check_remote().err());
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
        let mut key_given: Option<(Origin, &'static str)> = None;
        for entry in layer {
            let set = entry.and_then(|entry| self.set(entry, &mut here, &mut key_given));
            refused.extend(set.err());
        }
        if let Some(interval) = here.get(INTERVAL_PATH) {
            let ended = self.end_cron(interval.clone(), here.get(CRON_PATH).cloned());
            refused.extend(ended.err());
        }
        if let Some((origin, _)) = key_given {
            // The value of the other key also comes from here: it is unset.
            here.insert(KEY_FILE_PATH, origin.clone());
            here.insert(KEY_COMMAND_PATH, origin);
        }
        let here = here.into_iter();
        self.origins
            .extend(here.map(|(path, origin)| (path.to_owned(), origin)));
        refused
    }

    /// Sets one key. `here` holds the keys that its place has given so far, `key_given` the one among them that locates
    /// the store's encryption key.
    fn set(
        &mut self,
        entry: Entry,
        here: &mut BTreeMap<&'static str, Origin>,
        key_given: &mut Option<(Origin, &'static str)>,
    ) -> Result<(), ConfigError> {
        let path = entry.key.path;
        (entry.key.set)(&mut self.config, &entry.value).map_err(|problem| ConfigError::Value {
            origin: entry.origin.clone(),
            key: path.to_owned(),
            problem: Box::new(problem),
        })?;
        if let Some(first) = here.insert(path, entry.origin.clone()) {
            let why = "both set the same key; keep one";
            return Err(contradiction((first, path), (entry.origin, path), why));
        }
        if encryption_path(&self.config.encryption) == Some(path) {
            let second = (entry.origin, path);
            if let Some(first) = key_given.replace(second.clone()) {
                return Err(contradiction(first, second, ONE_OF_TWO));
            }
        }
        Ok(())
    }

    /// Removes a cron expression of an earlier place if this place gives an interval.
    fn end_cron(&mut self, interval: Origin, cron: Option<Origin>) -> Result<(), ConfigError> {
        let (first, second) = match (&self.config.snapshot.cron, cron) {
            (Some(_), Some(cron)) => ((interval, INTERVAL_PATH), (cron, CRON_PATH)),
            (Some(_), None) => {
                self.config.snapshot.cron = None;
                self.origins.insert(CRON_PATH.to_owned(), interval);
                return Ok(());
            }
            (None, _) => return Ok(()),
        };
        Err(contradiction(first, second, ONE_OF_TWO))
    }

    fn check_backoff(&self) -> Result<(), ConfigError> {
        let restart = &self.config.restart;
        if restart.backoff <= restart.backoff_max {
            return Ok(());
        }
        let why = "the first wait is longer than the longest";
        Err(contradiction(
            self.place(BACKOFF_PATH),
            self.place(BACKOFF_MAX_PATH),
            why,
        ))
    }

    /// Refuses peer memory without agents, because only agents can restore memory that GPUs share.
    fn check_nccl(&self) -> Result<(), ConfigError> {
        let cuda = &self.config.cuda;
        if (cuda.nccl, cuda.memory) != (Nccl::Peer, Memory::Driver) {
            return Ok(());
        }
        let why = "the driver alone cannot bring back memory that GPUs share: choose \"auto\" or \"resident\"";
        Err(contradiction(
            self.place(NCCL_PATH),
            self.place(MEMORY_PATH),
            why,
        ))
    }

    /// Refuses to serve metrics to other machines unless the user has allowed it.
    fn check_remote(&self) -> Result<(), ConfigError> {
        let metrics = &self.config.metrics;
        if metrics.allow_remote
            || metrics
                .listen
                .is_none_or(|listen| listen.ip().is_loopback())
        {
            return Ok(());
        }
        let why = "other machines could read the metrics: listen on 127.0.0.1, or allow it";
        Err(contradiction(
            self.place(LISTEN_PATH),
            self.place(ALLOW_REMOTE_PATH),
            why,
        ))
    }

    /// Returns a key with the origin of its value.
    fn place(&self, path: &'static str) -> (Origin, &'static str) {
        let origin = self.origins.get(path).cloned();
        (origin.unwrap_or(Origin::Default), path)
    }
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

impl Config {
    /// Returns the settings as a file that would set them, without comments.
    #[must_use]
    pub fn to_toml(&self) -> String {
        render(self, |_| None)
    }
}

/// Serializes the tables and values of the file that [`Config::to_toml`] writes.
impl Serialize for Config {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut sections: BTreeMap<&str, BTreeMap<&str, toml::Value>> = BTreeMap::new();
        for key in KEYS {
            let (section, name) = key.split();
            sections
                .entry(section)
                .or_default()
                .insert(name, (key.get)(self));
        }
        let mut table: BTreeMap<&str, toml::Value> = sections.remove("").unwrap_or_default();
        for (section, values) in sections {
            let values = values
                .into_iter()
                .map(|(name, value)| (name.to_owned(), value));
            table.insert(section, toml::Value::Table(values.collect()));
        }
        table.serialize(serializer)
    }
}

/// Writes the keys in the order of the default file, under their sections.
fn render(config: &Config, comment: impl Fn(&Key) -> Option<String>) -> String {
    let mut text = String::new();
    let mut open = "";
    for key in KEYS {
        if key.path == INTERVAL_PATH && config.snapshot.cron.is_some() {
            // The interval has no effect, and a file with both would be refused.
            continue;
        }
        let (section, name) = key.split();
        if section != open {
            open = section;
            // Writing to a string cannot fail.
            let _ = writeln!(text, "\n[{section}]");
        }
        let comment = comment(key).unwrap_or_default();
        let _ = writeln!(text, "{name} = {}{comment}", (key.get)(config));
    }
    text
}
