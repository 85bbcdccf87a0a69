//! `ckpt-run key`: generates keys for encrypted stores.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Subcommand;

use super::global::{Failure, shown};
use super::print;
use crate::run::generate_key;

#[derive(Debug, Subcommand)]
pub(super) enum KeyVerb {
    /// Write a new key to a new file that only you can read
    Generate {
        /// New file, for `encryption.key_file` in the settings
        file: PathBuf,
    },
}

pub(super) fn run(verb: &KeyVerb) -> Result<ExitCode, Failure> {
    match verb {
        KeyVerb::Generate { file } => {
            generate_key(file)?;
            print::say(&format!(
                "wrote a new key to {}: keep a copy in another place: without the key no image can be restored",
                shown(file)
            ));
            Ok(ExitCode::SUCCESS)
        }
    }
}
