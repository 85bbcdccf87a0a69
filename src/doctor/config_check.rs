//! The check for files and programs that the settings name and this machine does not have. `config check` reports them
//! before a run fails because of them.

use std::io;
use std::path::Path;

use crate::config::{Config, Encryption, HookCommand, Occasion};
use crate::criu::{Criu, Search};
use crate::run::encryption_key::{KeyError, read_key};
use crate::run::format::chain;
use crate::run::program;

/// The missing or unusable files and programs, each with its key and the recommended fix.
#[derive(Debug, Default)]
pub struct MissingParts {
    /// Problems that make a run fail.
    pub errors: Vec<String>,
    /// Problems that a run survives, without the missing part.
    pub warnings: Vec<String>,
}

impl MissingParts {
    /// Checks the files and programs that the settings name. Queries CRIU's version if a CRIU is named, and runs no
    /// other program.
    #[must_use]
    pub fn of(config: &Config) -> Self {
        let criu = lacking_criu(config.criu.path.as_deref());
        let key = lacking_key(&config.encryption);
        let textfile = config.metrics.textfile.as_deref().map(textfile);
        let hooks = Occasion::ALL.map(|occasion| {
            let program = lacking_program(occasion.command(&config.hooks)?)?;
            Some(format!(
                "hooks.{}: {program}; install it, or correct its path",
                occasion.as_str()
            ))
        });
        Self {
            errors: criu.into_iter().chain(key).collect(),
            warnings: textfile
                .into_iter()
                .flatten()
                .chain(hooks.into_iter().flatten())
                .collect(),
        }
    }
}

fn lacking_criu(path: Option<&Path>) -> Option<String> {
    let error = Criu::find(&Search::new(Some(path?.to_owned()))).err()?;
    Some(format!("criu.path: {}", chain(&error)))
}

/// Checks the key file. A key command is not run, because it may prompt the user for the key.
fn lacking_key(encryption: &Encryption) -> Option<String> {
    let Encryption::KeyFile(path) = encryption else {
        return None;
    };
    let error = read_key(encryption).err()?;
    let remedy = match &error {
        KeyError::Read { source, .. } if source.kind() == io::ErrorKind::NotFound => format!(
            "; put the store's key there, or create one for a new store: ckpt-run key generate {}",
            path.display()
        ),
        _ => String::new(),
    };
    Some(format!("encryption.key_file: {}{remedy}", chain(&error)))
}

/// Returns the problems that prevent the figures from being written or read.
fn textfile(path: &Path) -> Vec<String> {
    let mut lacks = Vec::new();
    let folder = path.parent().unwrap_or(path);
    if !folder.as_os_str().is_empty() && !folder.is_dir() {
        let folder = folder.display();
        lacks.push(format!(
            "metrics.textfile: there is no folder {folder}, so no metrics would be written; create it"
        ));
    }
    if path.extension().is_none_or(|name| name != "prom") {
        let path = path.display();
        lacks.push(format!(
            "metrics.textfile: the node exporter reads only files with names in .prom; rename {path}"
        ));
    }
    lacks
}

/// Checks the program of a hook. A shell line is not checked: its problems show only when the shell runs it.
fn lacking_program(command: &HookCommand) -> Option<String> {
    match command {
        HookCommand::Words(words) => {
            let error = program::check(words.first()?.as_ref()).err()?;
            Some(chain(&error))
        }
        HookCommand::Shell(_) => None,
    }
}
