//! Finds a CRIU that can do the work and says how to start it.
//!
//! First step of every run: everything that starts CRIU takes its command from here. A CRIU is
//! either a plain program or a *prefix*: a folder holding CRIU and its own C library, started
//! through that folder's dynamic loader, so that a newer CRIU runs on an older system. Knows
//! nothing of dumps, restores and images.

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
pub use error::{AskError, CheckError, FindError};
use prefix::{LOCAL_PREFIX, Prefix};

mod error;
mod prefix;

/// The oldest CRIU that is accepted: 3.x fails on current kernels and its `--stream` is not what
/// the image store speaks.
const OLDEST: Version = Version {
    major: 4,
    minor: 0,
    patch: 0,
};

/// Limit on `criu --version` and `criu check`. Both take well under a second; a hanging network
/// file system must not hang us.
const ANSWER_LIMIT: Duration = Duration::from_secs(20);

/// Most bytes read of CRIU's answer; `criu check` writes a few lines.
const ANSWER_BYTES: u64 = 64 * 1024;

/// Most characters of CRIU's answer in an error message.
const QUOTED_CHARS: usize = 400;

/// `PATH` given to CRIU when we have none: it starts network and mount tools.
const FALLBACK_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// Folders searched after those of `PATH`: CRIU lives there, users' `PATH`s often lack them.
const SYSTEM_FOLDERS: [&str; 2] = ["/usr/sbin", "/sbin"];

/// A CRIU that answered with a version we accept.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Criu {
    argv: Vec<OsString>,
    /// The version that it reports.
    pub version: Version,
}

/// Places to search, in this order: `explicit`, `prefixes`, the folders of `PATH`.
#[derive(Debug, Clone, Default)]
pub struct Search {
    /// Named by the user: a program or a prefix. Nothing else is tried then.
    pub explicit: Option<PathBuf>,
    /// Prefixes to try. Those that do not exist, or that another user could have filled, are
    /// passed over.
    pub prefixes: Vec<PathBuf>,
}

/// Trust in a path: given by the user or found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Trust {
    /// The user named it, or its folder by `PATH`.
    Given,
    /// We guessed it: nobody else may have put it there.
    Examined,
}

impl Trust {
    fn examine(self, path: &Path, prefix: &Prefix) -> Result<(), FindError> {
        match (self, prefix.weak_part()) {
            (Trust::Given, _) | (Trust::Examined, None) => Ok(()),
            (Trust::Examined, Some(part)) => Err(FindError::Untrusted {
                path: path.to_owned(),
                part: part.to_owned(),
            }),
        }
    }
}

impl Search {
    /// The usual prefixes of this program's installation; `explicit` is what flag or
    /// configuration say, `None` or empty to search.
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
    /// The first CRIU of the search that answers with an accepted version.
    ///
    /// # Errors
    /// An explicit path that does not work is an error. Of the others, those that do not work
    /// are passed over; the first one's reason is returned when none works.
    pub fn find(search: &Search) -> Result<Criu, FindError> {
        let path = env::var_os("PATH").unwrap_or_default();
        let folders = env::split_paths(&path)
            .chain(SYSTEM_FOLDERS.map(PathBuf::from))
            .collect();
        Criu::find_in(search, folders)
    }

    fn find_in(search: &Search, folders: Vec<PathBuf>) -> Result<Criu, FindError> {
        if let Some(path) = &search.explicit {
            return Criu::open(path, Trust::Given);
        }
        let programs = folders
            .into_iter()
            .filter(|f| f.is_absolute())
            .map(|f| (f.join("criu"), Trust::Given));
        let prefixes = search.prefixes.iter().cloned();
        let candidates = prefixes.map(|path| (path, Trust::Examined)).chain(programs);
        let mut first_reason = None;
        for (path, trust) in candidates.filter(|(path, _)| path.exists()) {
            match Criu::open(&path, trust) {
                Ok(criu) => return Ok(criu),
                Err(reason) => {
                    tracing::debug!(path = %path.display(), %reason, "CRIU passed over");
                    first_reason.get_or_insert(reason);
                }
            }
        }
        Err(first_reason.unwrap_or_else(|| FindError::NotFound {
            prefixes: list(&search.prefixes),
        }))
    }

    /// Asks the program or prefix at `path` for its version.
    fn open(path: &Path, trust: Trust) -> Result<Criu, FindError> {
        // Absolute: the sandbox starts CRIU from another folder.
        let path = &fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
        let argv = if path.is_dir() || trust == Trust::Examined {
            let prefix =
                Prefix::open(path).ok_or_else(|| FindError::NotAPrefix { path: path.clone() })?;
            trust.examine(path, &prefix)?;
            prefix.argv()
        } else {
            vec![path.clone().into_os_string()]
        };
        let mut criu = Criu {
            argv,
            version: OLDEST,
        };
        let (status, answer) =
            criu.ask("--version", ANSWER_LIMIT)
                .map_err(|source| FindError::Ask {
                    path: path.clone(),
                    source,
                })?;
        criu.version = match Version::parse(&answer) {
            Some(version) if status.success() => version,
            Some(_) | None => {
                return Err(FindError::NoVersion {
                    path: path.clone(),
                    status,
                    answer: quoted(&answer),
                });
            }
        };
        if criu.version < OLDEST {
            return Err(FindError::TooOld {
                path: path.clone(),
                version: criu.version,
            });
        }
        Ok(criu)
    }

    /// A command that starts this CRIU, arguments to be added. Its environment is `PATH` alone:
    /// `LD_*` of the user must not reach a process that is run with all privileges.
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

    /// Program and leading arguments, absolute, for a process that somebody else starts.
    #[must_use]
    pub fn argv(&self) -> Vec<OsString> {
        self.argv.clone()
    }

    /// Asks CRIU whether kernel and privileges suffice.
    ///
    /// # Errors
    /// CRIU's own reason when they do not.
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

    /// Runs CRIU with one argument, and returns how it ended and all that it wrote.
    fn ask(&self, argument: &str, limit: Duration) -> Result<(ExitStatus, String), AskError> {
        let start = |source| AskError::Start {
            program: PathBuf::from(&self.argv[0]),
            source,
        };
        let (reader, writer) = io::pipe().map_err(start)?;
        let mut command = self.command();
        command.arg(argument).stdin(Stdio::null());
        command
            .stdout(writer.try_clone().map_err(start)?)
            .stderr(writer);
        let mut child = command.spawn().map_err(start)?;
        drop(command); // and with it our writing ends, so that the reader sees the end
        let (sender, answer) = mpsc::channel();
        thread::spawn(move || {
            let mut bytes = Vec::new();
            let read = reader.take(ANSWER_BYTES).read_to_end(&mut bytes);
            // Nobody listens any more after the limit.
            let _ = sender.send(read.map(|_| bytes));
        });
        let answer = match answer.recv_timeout(limit) {
            Ok(Ok(bytes)) => Ok(String::from_utf8_lossy(&bytes).into_owned()),
            Ok(Err(source)) => Err(AskError::Read(source)),
            Err(_) => Err(AskError::Silent { limit }),
        };
        if answer.is_err() {
            let _ = child.kill(); // it may have ended by itself
        }
        let status = child.wait().map_err(AskError::Wait)?;
        Ok((status, answer?))
    }
}

/// CRIU's complaint on one line: its `Error` lines if it has any, else all it said.
fn reason_of(answer: &str) -> String {
    let lines = || {
        answer
            .lines()
            .map(str::trim)
            .filter(|line| !line.is_empty())
    };
    let errors: Vec<&str> = lines().filter(|line| line.contains("Error")).collect();
    let told = if errors.is_empty() {
        lines().collect()
    } else {
        errors
    };
    if told.is_empty() {
        "no reason given".to_owned()
    } else {
        quoted(&told.join("; "))
    }
}

fn quoted(answer: &str) -> String {
    answer.chars().take(QUOTED_CHARS).collect()
}

fn list(paths: &[PathBuf]) -> String {
    let texts: Vec<String> = paths
        .iter()
        .map(|path| path.display().to_string())
        .collect();
    texts.join(", ")
}

#[cfg(test)]
mod tests;
