//! Options of every verb, and the failures that verbs report.

use std::path::{Path, PathBuf};

use clap::Args;

use super::store::any_store::AnyStore;
use crate::config::{Config, ConfigError, Loaded, LogLevel, Override, Sources};
use crate::run::{OURS, chain, read_key};
use crate::store::Store;
use crate::store::remote::bucket::{is_address, without_secrets};

/// Options of every verb.
#[derive(Debug, Args)]
pub(super) struct Global {
    /// Folder of the images [default: ./.ckpt-run]; list, show, diff, verify, copy, pin, unpin,
    /// forget and prune also take the address of a run in object storage, such as
    /// `s3://BUCKET/FOLDER`
    #[arg(long, global = true, value_name = "PATH")]
    pub(super) store: Option<String>,
    /// File with settings, instead of ./ckpt-run.toml
    #[arg(long, global = true, value_name = "FILE")]
    pub(super) config: Option<PathBuf>,
    /// Path of the criu program, or its installation folder
    #[arg(long, global = true, value_name = "PATH")]
    pub(super) criu: Option<String>,
    /// Print data as JSON
    #[arg(long, global = true, overrides_with = "json")]
    pub(super) json: bool,
    /// Print only warnings and errors
    #[arg(
        short,
        long,
        global = true,
        conflicts_with = "verbose",
        overrides_with = "quiet"
    )]
    pub(super) quiet: bool,
    /// Print more details
    #[arg(short, long, global = true, overrides_with = "verbose")]
    pub(super) verbose: bool,
}

impl Global {
    /// Loads the settings of a verb whose store is a folder, with these flags in precedence over everything else.
    pub(super) fn load(&self, overrides: Vec<Override>) -> Result<Loaded, Failure> {
        let loaded = self.load_for_any_store(overrides)?;
        match object_storage(&loaded.config) {
            None => Ok(loaded),
            Some(url) => Err(refusal(url)),
        }
    }

    /// Loads the settings like [`load`](Self::load), also with a store in object storage.
    pub(super) fn load_for_any_store(
        &self,
        overrides: Vec<Override>,
    ) -> Result<Loaded, ConfigError> {
        let overrides = self.overrides(overrides);
        crate::config::load(&Sources::from_process(self.config.clone(), overrides)?)
    }

    /// Returns the overrides of a verb and those of all verbs.
    pub(super) fn overrides(&self, mut overrides: Vec<Override>) -> Vec<Override> {
        let flags = [
            ("store", "--store", &self.store),
            ("criu.path", "--criu", &self.criu),
        ];
        for (key, flag, value) in flags {
            overrides.extend(value.clone().map(|value| Override { key, flag, value }));
        }
        overrides
    }

    /// Returns the least important level that is printed on stderr.
    pub(super) fn log_level(&self, config: &Config) -> LogLevel {
        match (self.quiet, self.verbose) {
            (true, _) => LogLevel::Warn,
            (_, true) => LogLevel::Debug,
            (false, false) => config.log.level,
        }
    }

    /// Opens the existing store, which is a folder or in object storage.
    pub(super) fn open(&self) -> Result<AnyStore, Failure> {
        AnyStore::open(&self.load_for_any_store(Vec::new())?.config)
    }
}

/// Returns the address of the store if it is in object storage.
pub(super) fn object_storage(config: &Config) -> Option<&str> {
    config.store.to_str().filter(|store| is_address(store))
}

/// Returns the failure of a verb that needs a folder.
fn refusal(url: &str) -> Failure {
    let url = without_secrets(url);
    Failure {
        text: format!(
            "the store {url} is in object storage, and this verb needs a folder; to use an image from there, copy it: \
             ckpt-run --store {url} copy latest --to FOLDER; a run has its store in a folder and its copies there with \
             --remote {url}"
        ),
        code: OURS,
    }
}

/// Failure of ckpt-run: its message and the exit code.
pub(super) struct Failure {
    pub(super) text: String,
    pub(super) code: u8,
}

impl<E: std::error::Error> From<E> for Failure {
    fn from(error: E) -> Self {
        Self {
            text: chain(&error),
            code: OURS,
        }
    }
}

/// Opens the store that the settings name, with its key.
pub(super) fn open(config: &Config) -> Result<Store, Failure> {
    let key = read_key(&config.encryption)?;
    Ok(Store::open_with(&config.store, key.as_ref())?)
}

/// Returns a path as messages show it.
pub(super) fn shown(path: &Path) -> String {
    path.display().to_string()
}
