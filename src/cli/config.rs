//! `ckpt-run config`: the settings in force, and the defaults.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::Subcommand;
use serde::Serialize;

use super::global::{Failure, Global};
use super::print;
use crate::config::{self, DEFAULT_TOML, Sources};
use crate::doctor::MissingParts;
use crate::run::OURS;
use crate::run::chain;

#[derive(Debug, Subcommand)]
pub(super) enum ConfigVerb {
    /// Print the current settings in the format of a settings file
    Show {
        /// Print the origin of each value
        #[arg(long)]
        origin: bool,
    },
    /// Check all settings and the files that they name; report every error
    Check {
        /// File to check instead of ./ckpt-run.toml
        file: Option<PathBuf>,
    },
    /// Print all settings with their defaults and comments
    Default,
}

/// The settings in the form that `config show --origin --json` prints.
#[derive(Serialize)]
struct WithOrigins<'a> {
    settings: toml::Table,
    /// The origins by the path of the key.
    origins: BTreeMap<&'a str, String>,
}

pub(super) fn run(global: &Global, verb: &ConfigVerb) -> Result<ExitCode, Failure> {
    match verb {
        ConfigVerb::Default => print::print(DEFAULT_TOML),
        ConfigVerb::Show { origin } => show(global, *origin),
        ConfigVerb::Check { file } => check(global, file.clone()),
    }
}

/// The output of `config check --json`.
#[derive(Serialize)]
struct Checked {
    good: bool,
    errors: Vec<String>,
    warnings: Vec<String>,
}

fn check(global: &Global, file: Option<PathBuf>) -> Result<ExitCode, Failure> {
    let file = file.or_else(|| global.config.clone());
    let overrides = global.overrides(Vec::new());
    let missing = Sources::from_process(file, overrides)
        .map_err(|error| vec![error])
        .and_then(|sources| {
            let errors = config::check(&sources);
            if errors.is_empty() {
                let loaded = config::load(&sources).map_err(|error| vec![error])?;
                return Ok(MissingParts::of(&loaded.config));
            }
            Err(errors)
        });
    let MissingParts { errors, warnings } = missing.unwrap_or_else(|errors| MissingParts {
        errors: errors.iter().map(|error| chain(error)).collect(),
        warnings: Vec::new(),
    });
    let good = errors.is_empty();
    if global.json {
        print::print_json(&Checked {
            good,
            errors,
            warnings,
        })?;
    } else {
        for error in &errors {
            print::say(error);
        }
        for warning in &warnings {
            print::say(&format!("warning: {warning}"));
        }
        let count = errors.len();
        print::say(&match count {
            0 => "the settings are valid; `ckpt-run config show --origin` shows them".to_owned(),
            _ => format!("errors in the settings: {count}"),
        });
    }
    Ok(if good {
        ExitCode::SUCCESS
    } else {
        ExitCode::from(OURS)
    })
}

fn show(global: &Global, with_origins: bool) -> Result<ExitCode, Failure> {
    let loaded = global.load_for_any_store(Vec::new())?;
    match (global.json, with_origins) {
        (false, false) => print::print(&loaded.to_toml()),
        (false, true) => print::print(&loaded.to_toml_with_origins()),
        (true, false) => print::print_json(&loaded.to_table()),
        (true, true) => print::print_json(&WithOrigins {
            settings: loaded.to_table(),
            origins: loaded
                .origins
                .iter()
                .map(|(path, origin)| (path.as_str(), origin.to_string()))
                .collect(),
        }),
    }
}
