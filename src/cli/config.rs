//! `ckpt-run config`: the settings in force, and the defaults.

use std::collections::BTreeMap;
use std::process::ExitCode;

use clap::Subcommand;
use serde::Serialize;

use super::{Failure, Global, output};
use crate::config::{Config, DEFAULT_TOML};

#[derive(Debug, Subcommand)]
pub(super) enum ConfigVerb {
    /// Print the settings in force here, as a file that would set them
    Show {
        /// Say where each value came from
        #[arg(long)]
        origin: bool,
    },
    /// Print the commented file of all settings with their defaults
    Default,
}

/// The settings as `config show --origin --json` prints them.
#[derive(Serialize)]
struct WithOrigins<'a> {
    settings: &'a Config,
    /// By the key's path.
    origins: BTreeMap<&'a str, String>,
}

pub(super) fn run(global: &Global, verb: &ConfigVerb) -> Result<ExitCode, Failure> {
    match verb {
        ConfigVerb::Default => output::print(DEFAULT_TOML),
        ConfigVerb::Show { origin } => show(global, *origin),
    }
}

fn show(global: &Global, with_origins: bool) -> Result<ExitCode, Failure> {
    let loaded = global.load(Vec::new())?;
    match (global.json, with_origins) {
        (false, false) => output::print(&loaded.config.to_toml()),
        (false, true) => output::print(&loaded.to_toml_with_origins()),
        (true, false) => output::print_json(&loaded.config),
        (true, true) => output::print_json(&WithOrigins {
            settings: &loaded.config,
            origins: loaded
                .origins
                .iter()
                .map(|(path, origin)| (path.as_str(), origin.to_string()))
                .collect(),
        }),
    }
}
