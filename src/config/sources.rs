//! The places of settings, and the search for those of a process.
//!
//! This module holds only the names and values as given: `file` reads the files, `layer` interprets their content.

use std::ffi::OsString;
use std::fmt;
use std::path::PathBuf;

use super::ConfigError;

/// The machine's settings file.
const SYSTEM_FILE: &str = "/etc/ckpt-run/config.toml";
/// The project's settings file, in the working directory.
pub(crate) const PROJECT_FILE: &str = "ckpt-run.toml";
/// The prefix of ckpt-run's variables.
pub(super) const PREFIX: &str = "CKPT_RUN_";
/// The variable that names the project's file.
pub(super) const CONFIG_VARIABLE: &str = "CKPT_RUN_CONFIG";

/// The origin of a value.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Origin {
    /// The embedded default.
    Default,
    /// A line of a file.
    File {
        /// The file.
        path: PathBuf,
        /// Line, from 1.
        line: usize,
    },
    /// An environment variable.
    Environment {
        /// The variable's name.
        variable: String,
    },
    /// The command line.
    Flag {
        /// The flag with its dashes.
        flag: &'static str,
    },
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Default => f.write_str("default"),
            Self::File { path, line } => write!(f, "{}:{line}", path.display()),
            Self::Environment { variable } => write!(f, "environment {variable}"),
            Self::Flag { flag } => f.write_str(flag),
        }
    }
}

/// A setting given on the command line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Override {
    /// The key's path, "snapshot.interval".
    pub key: &'static str,
    /// The flag in the form that the user typed, "--interval".
    pub flag: &'static str,
    /// The given value; a list is separated by commas.
    pub value: String,
}

/// The file with the project's settings.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ProjectFile {
    /// The file in the working directory: it may be missing, and must belong to the user or root.
    InWorkingDirectory(PathBuf),
    /// A file that the user named: it must exist, and is trusted.
    Named(PathBuf),
}

/// Every place that [`load`](super::load) reads.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sources {
    /// The machine's file; may be missing.
    pub system: PathBuf,
    /// The user's file; may be missing.
    pub user: Option<PathBuf>,
    /// The project's file.
    pub project: ProjectFile,
    /// Variables; those without ckpt-run's prefix are skipped.
    pub environment: Vec<(String, String)>,
    /// Settings from the command line.
    pub overrides: Vec<Override>,
}

impl Sources {
    /// Returns the places of this process: the usual files and the real environment.
    ///
    /// `config` is the file of `--config`, `overrides` the other flags.
    ///
    /// # Errors
    /// A variable of ckpt-run is not UTF-8.
    pub fn from_process(
        config: Option<PathBuf>,
        overrides: Vec<Override>,
    ) -> Result<Self, ConfigError> {
        Self::from_variables(std::env::vars_os(), config, overrides)
    }

    fn from_variables(
        variables: impl Iterator<Item = (OsString, OsString)>,
        config: Option<PathBuf>,
        overrides: Vec<Override>,
    ) -> Result<Self, ConfigError> {
        let mut environment = Vec::new();
        let (mut named, mut home, mut xdg) = (config, None, None);
        for (name, value) in variables {
            match name.to_str() {
                Some("HOME") => home = absolute(value),
                Some("XDG_CONFIG_HOME") => xdg = absolute(value),
                // A path need not be UTF-8.
                Some(CONFIG_VARIABLE) if !value.is_empty() => {
                    named = named.or_else(|| Some(PathBuf::from(value)));
                }
                Some(CONFIG_VARIABLE) => {}
                _ if name.as_encoded_bytes().starts_with(PREFIX.as_bytes()) => {
                    environment.push(text(name, value)?);
                }
                _ => {}
            }
        }
        let folder = xdg.or_else(|| home.map(|home| home.join(".config")));
        Ok(Self {
            system: PathBuf::from(SYSTEM_FILE),
            user: folder.map(|folder| folder.join("ckpt-run/config.toml")),
            project: named.map_or_else(
                || ProjectFile::InWorkingDirectory(PathBuf::from(PROJECT_FILE)),
                ProjectFile::Named,
            ),
            environment,
            overrides,
        })
    }
}

/// Returns the path if it is absolute: XDG requires that a relative path is ignored.
fn absolute(value: OsString) -> Option<PathBuf> {
    Some(PathBuf::from(value)).filter(|path| path.is_absolute())
}

fn text(name: OsString, value: OsString) -> Result<(String, String), ConfigError> {
    let shown = name.to_string_lossy().into_owned();
    match (name.into_string(), value.into_string()) {
        (Ok(name), Ok(value)) => Ok((name, value)),
        (Ok(_) | Err(_), Ok(_) | Err(_)) => Err(ConfigError::NotText { variable: shown }),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::ffi::OsStringExt;

    use super::*;

    fn sources(variables: &[(&str, &str)], config: Option<&str>) -> Sources {
        let variables = variables
            .iter()
            .map(|(name, value)| (OsString::from(name), OsString::from(value)));
        Sources::from_variables(variables, config.map(PathBuf::from), Vec::new()).unwrap()
    }

    #[test]
    fn the_users_file_is_found_by_xdg() {
        let file = |variables: &[_]| sources(variables, None).user;
        let home = ("HOME", "/home/u");
        let path = |text: &str| Some(PathBuf::from(text));
        assert_eq!(file(&[home]), path("/home/u/.config/ckpt-run/config.toml"));
        assert_eq!(
            file(&[home, ("XDG_CONFIG_HOME", "/xdg")]),
            path("/xdg/ckpt-run/config.toml")
        );
        assert_eq!(
            file(&[home, ("XDG_CONFIG_HOME", "relative")]),
            path("/home/u/.config/ckpt-run/config.toml")
        );
        assert_eq!(file(&[]), None);
    }

    #[test]
    fn the_flag_names_the_file_before_the_variable_does() {
        let variable = ("CKPT_RUN_CONFIG", "/variable.toml");
        let named = |text: &str| ProjectFile::Named(PathBuf::from(text));
        assert_eq!(sources(&[variable], Some("f")).project, named("f"));
        assert_eq!(sources(&[variable], None).project, named("/variable.toml"));
        assert_eq!(
            sources(&[("CKPT_RUN_CONFIG", "")], None).project,
            ProjectFile::InWorkingDirectory(PathBuf::from(PROJECT_FILE))
        );
    }

    #[test]
    fn only_variables_of_ours_are_kept() {
        let found = sources(&[("PATH", "/bin"), ("CKPT_RUN_STORE", "/s")], None);
        let store = ("CKPT_RUN_STORE".to_owned(), "/s".to_owned());
        assert_eq!(found.environment, [store]);
    }

    #[test]
    fn a_variable_that_is_not_text_is_refused() {
        let variable = (
            OsString::from("CKPT_RUN_STORE"),
            OsString::from_vec(vec![0xff]),
        );
        let refused = Sources::from_variables([variable].into_iter(), None, Vec::new());
        assert_eq!(
            refused.unwrap_err().to_string(),
            "environment CKPT_RUN_STORE: not UTF-8"
        );
    }
}
