//! Things that the settings name and this machine lacks. `config check` reports them before a run fails because of them.

use std::io;
use std::path::Path;

use crate::config::{Config, Encryption, HookCommand, Occasion};
use crate::criu::{Criu, Search};
use crate::run::encryption_key::{KeyError, read_key};
use crate::run::format::chain;
use crate::run::program;

/// Messages about missing or unusable things, each with its key and a remedy.
#[derive(Debug, Default)]
pub struct MissingParts {
    /// A run fails for these.
    pub errors: Vec<String>,
    /// A run does without these.
    pub warnings: Vec<String>,
}

impl MissingParts {
    /// Looks at the files and programs that the settings name. Asks CRIU for its version, where one is named, and runs
    /// nothing else.
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

/// A command may ask somebody for the key, and is not run.
fn lacking_key(encryption: &Encryption) -> Option<String> {
    let Encryption::KeyFile(path) = encryption else {
        return None;
    };
    let error = read_key(encryption).err()?;
    let remedy = match &error {
        KeyError::Read { source, .. } if source.kind() == io::ErrorKind::NotFound => format!(
            "; put the store's key there, or make one for a new store: ckpt-run key generate {}",
            path.display()
        ),
        _ => String::new(),
    };
    Some(format!("encryption.key_file: {}{remedy}", chain(&error)))
}

/// Returns the obstacles to writing or reading the metrics file.
fn textfile(path: &Path) -> Vec<String> {
    let mut lacks = Vec::new();
    let folder = path.parent().unwrap_or(path);
    if !folder.as_os_str().is_empty() && !folder.is_dir() {
        let folder = folder.display();
        lacks.push(format!(
            "metrics.textfile: there is no folder {folder}, so no figures would be written; make it"
        ));
    }
    if path.extension().is_none_or(|name| name != "prom") {
        let path = path.display();
        lacks.push(format!(
            "metrics.textfile: the node exporter reads only files whose name ends with .prom; give {path} such a name"
        ));
    }
    lacks
}

/// Returns a message if the program of a hook is missing. Lines that a shell interprets are not checked.
fn lacking_program(command: &HookCommand) -> Option<String> {
    match command {
        HookCommand::Words(words) => {
            let error = program::check(words.first()?.as_ref()).err()?;
            Some(chain(&error))
        }
        HookCommand::Shell(_) => None,
    }
}
