//! Search for a usable CRIU, and the command that starts it.
//!
//! The search is the first step of every run, and every start of CRIU uses its command. A CRIU is either a plain
//! program or a *prefix*: a folder with CRIU and its own C library, started through that folder's dynamic loader, so
//! that a newer CRIU runs on an older system. This module does not depend on dumps, restores and images.

use std::env;
use std::ffi::OsString;
use std::fs;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use super::criu_version::Version;
pub use error::{CheckError, FindError};
use prefix::{LOCAL_PREFIX, Prefix};

mod error;
mod prefix;

/// Oldest accepted CRIU. CRIU 3.x fails on current kernels, and the image store does not support its `--stream`.
const OLDEST: Version = Version {
    major: 4,
    minor: 0,
    patch: 0,
};

/// Time limit for `criu --version` and `criu check`. Both take well under a second, but CRIU may be on a network file
/// system that hangs.
const ANSWER_LIMIT: Duration = Duration::from_secs(20);

/// Limit on the output read from CRIU in bytes. `criu check` writes a few lines.
const ANSWER_BYTES: u64 = 64 * 1024;

/// Limit on the characters of CRIU's output in an error message.
const QUOTED_CHARS: usize = 400;

/// `PATH` for CRIU if ckpt-run has none, because CRIU starts network and mount tools.
const FALLBACK_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// Folders searched after those of `PATH`. CRIU is often installed there, and users' `PATH`s often lack them.
const SYSTEM_FOLDERS: [&str; 2] = ["/usr/sbin", "/sbin"];

/// A CRIU with an accepted version.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Criu {
    argv: Vec<OsString>,
    /// The reported version.
    pub version: Version,
}

/// Places to search, in this order: `explicit`, `prefixes`, the folders of `PATH`.
#[derive(Debug, Clone, Default)]
pub struct Search {
    /// A program or prefix named by the user. The search is limited to it.
    pub explicit: Option<PathBuf>,
    /// Prefixes to try. A prefix is skipped if it does not exist or another user can have created its content.
    pub prefixes: Vec<PathBuf>,
}

impl Search {
    /// Returns a search with the usual prefixes of this program's installation. `explicit` is the value of the flag or
    /// setting; `None` or empty to search.
    #[must_use]
    pub fn new(explicit: Option<PathBuf>) -> Search {
        let program = env::current_exe().unwrap_or_default();
        let mut prefixes = prefix::beside(&program);
        prefixes.push(PathBuf::from(LOCAL_PREFIX));
        Search {
            explicit: explicit.filter(|path| !path.as_os_str().is_empty()),
            prefixes,
        }
    }
}

impl Criu {
    /// Returns the first CRIU of the search with an accepted version.
    ///
    /// # Errors
    /// An explicit path does not work. Other candidates that do not work are skipped; if none works, the first one's
    /// reason is returned.
    pub fn find(search: &Search) -> Result<Criu, FindError> {
        let path = env::var_os("PATH").unwrap_or_default();
        let folders = env::split_paths(&path)
            .chain(SYSTEM_FOLDERS.map(PathBuf::from))
            .collect();
        Criu::find_in(search, folders)
    }

    fn find_in(search: &Search, folders: Vec<PathBuf>) -> Result<Criu, FindError> {
        if let Some(path) = &search.explicit {
            // The path must be absolute, because the sandbox starts CRIU in another folder.
            let path = &fs::canonicalize(path).unwrap_or_else(|_| path.clone());
            return if path.is_dir() {
                Criu::start(path, Prefix::open(path)?.argv())
            } else {
                Criu::start(path, vec![path.clone().into_os_string()])
            };
        }
        let guessed = search.prefixes.iter().filter_map(|path| {
            let path = fs::canonicalize(path).ok()?;
            let prefix = Prefix::open(&path).and_then(Prefix::trusted);
            Some(prefix.and_then(|prefix| Criu::start(&path, prefix.argv())))
        });
        let programs = folders.into_iter().filter_map(|folder| {
            let path = Some(folder).filter(|folder| folder.is_absolute())?;
            let path = fs::canonicalize(path.join("criu")).ok()?;
            Some(Criu::start(&path, vec![path.clone().into_os_string()]))
        });
        let mut first_reason = None;
        for found in guessed.chain(programs) {
            match found {
                Ok(criu) => return Ok(criu),
                Err(reason) => {
                    tracing::debug!(%reason, "skipped a CRIU");
                    first_reason.get_or_insert(reason);
                }
            }
        }
        Err(first_reason.unwrap_or_else(|| FindError::NotFound {
            prefixes: search.prefixes.clone(),
        }))
    }

    /// Runs the program or prefix at `path`, started by `argv`, to determine its version.
    fn start(path: &Path, argv: Vec<OsString>) -> Result<Criu, FindError> {
        let path = path.to_owned();
        let mut criu = Criu {
            argv,
            version: OLDEST,
        };
        let (status, answer) = match criu.ask("--version", ANSWER_LIMIT) {
            Ok(answered) => answered,
            Err(source) => return Err(FindError::Ask { path, source }),
        };
        criu.version = match Version::parse(&answer) {
            Some(version) if status.success() => version,
            Some(_) | None => {
                let answer = quoted(&answer);
                return Err(FindError::NoVersion {
                    path,
                    status,
                    answer,
                });
            }
        };
        if criu.version < OLDEST {
            let version = criu.version;
            return Err(FindError::TooOld { path, version });
        }
        Ok(criu)
    }

    /// Returns a command that starts this CRIU, without arguments. Its environment contains only `PATH`, because `LD_*`
    /// of the user must not affect a process with all privileges.
    #[must_use]
    pub fn command(&self) -> Command {
        let mut command = Command::new(&self.argv[0]);
        command.args(&self.argv[1..]).env_clear();
        command.env(
            "PATH",
            env::var_os("PATH").unwrap_or_else(|| FALLBACK_PATH.into()),
        );
        command
    }

    /// Returns the absolute program and leading arguments, for a process started elsewhere.
    #[must_use]
    pub fn argv(&self) -> Vec<OsString> {
        self.argv.clone()
    }

    /// Runs `criu check` to determine if kernel and privileges suffice.
    ///
    /// # Errors
    /// They do not suffice, with CRIU's reason.
    pub fn check(&self) -> Result<(), CheckError> {
        let (status, answer) = self.ask("check", ANSWER_LIMIT)?;
        if status.success() {
            return Ok(());
        }
        Err(CheckError::Failed {
            status,
            reason: reason_of(&answer),
        })
    }

    /// Runs CRIU with one argument, and returns its exit status and all output.
    fn ask(&self, argument: &str, limit: Duration) -> io::Result<(ExitStatus, String)> {
        let (reader, writer) = io::pipe()?;
        let mut command = self.command();
        command.arg(argument).stdin(Stdio::null());
        command.stdout(writer.try_clone()?).stderr(writer);
        let mut child = command.spawn()?;
        drop(command); // closes our write ends, so that the reader reaches the end
        let (sender, answer) = mpsc::channel();
        thread::spawn(move || {
            let mut bytes = Vec::new();
            let read = reader.take(ANSWER_BYTES).read_to_end(&mut bytes);
            // After the limit, the receiver is closed.
            let _ = sender.send(read.map(|_| bytes));
        });
        let answer = answer.recv_timeout(limit).unwrap_or_else(|_| {
            let silent = format!("no answer within {limit:?}");
            Err(io::Error::new(io::ErrorKind::TimedOut, silent))
        });
        if answer.is_err() {
            let _ = child.kill(); // it may have exited
        }
        let status = child.wait()?;
        Ok((status, String::from_utf8_lossy(&answer?).into_owned()))
    }
}

/// Returns CRIU's error on one line: its `Error` lines if there are any, otherwise all output.
fn reason_of(answer: &str) -> String {
    let lines = || answer.lines().map(str::trim);
    let errors: Vec<&str> = lines().filter(|line| line.contains("Error")).collect();
    let relevant: Vec<&str> = if errors.is_empty() {
        lines().filter(|line| !line.is_empty()).collect()
    } else {
        errors
    };
    if relevant.is_empty() {
        "no reason given".to_owned()
    } else {
        quoted(&relevant.join("; "))
    }
}

fn quoted(answer: &str) -> String {
    answer.chars().take(QUOTED_CHARS).collect()
}

#[cfg(test)]
pub(crate) mod tests;
