//! Errors of the search for CRIU and of its checks.

use std::io;
use std::path::PathBuf;
use std::process::ExitStatus;

use crate::criu::criu_version::Version;

/// Ends every message of a search that failed.
const REMEDY: &str =
    "run scripts/setup, install CRIU 4.0 or newer, or name one by --criu or CKPT_RUN_CRIU";

/// Reasons why there is no usable CRIU. Nothing was changed.
#[derive(Debug, thiserror::Error)]
pub enum FindError {
    /// No candidate exists.
    #[error(
        "cannot find CRIU (looked for {} and in PATH): {REMEDY}",
        list(prefixes)
    )]
    NotFound {
        /// The prefixes.
        prefixes: Vec<PathBuf>,
    },
    /// The program works but is too old.
    #[error("cannot use CRIU {version} at {}: 4.0 or newer is needed: {REMEDY}", path.display())]
    TooOld {
        /// The program or prefix.
        path: PathBuf,
        /// The reported version.
        version: Version,
    },
    /// The folder does not contain a CRIU with its loader.
    #[error("cannot use {} as CRIU: no usr/sbin/criu with a dynamic loader in usr/lib/*: {REMEDY}", path.display())]
    NotAPrefix {
        /// The folder.
        path: PathBuf,
    },
    /// Another user can have changed the content of a prefix that the user did not name.
    #[error("cannot trust the CRIU at {}: {} belongs to another user or others can write to it: remove it and run scripts/setup as this user, or name another CRIU by --criu or CKPT_RUN_CRIU", path.display(), part.display())]
    Untrusted {
        /// The prefix.
        path: PathBuf,
        /// The file or folder in it.
        part: PathBuf,
    },
    /// The program could not be run to query its version.
    #[error("cannot run CRIU at {} to query its version: {REMEDY}", path.display())]
    Ask {
        /// The program or prefix.
        path: PathBuf,
        /// The cause.
        #[source]
        source: io::Error,
    },
    /// The program ran and failed, or its answer holds no version.
    #[error("cannot determine the version of CRIU at {}: `--version` ended with {status} and printed {answer:?}: {REMEDY}", path.display())]
    NoVersion {
        /// The program or prefix.
        path: PathBuf,
        /// Its exit status.
        status: ExitStatus,
        /// Its output.
        answer: String,
    },
}

/// Reasons why `criu check` failed.
#[derive(Debug, thiserror::Error)]
pub enum CheckError {
    /// The program could not be run.
    #[error("cannot run `criu check`")]
    Ask(#[from] io::Error),
    /// The kernel or the privileges do not suffice.
    #[error("cannot use CRIU here: `criu check` ended with {status}: {reason}")]
    Failed {
        /// Its exit status.
        status: ExitStatus,
        /// Its error lines.
        reason: String,
    },
}

fn list(paths: &[PathBuf]) -> String {
    let texts: Vec<_> = paths.iter().map(|path| path.to_string_lossy()).collect();
    texts.join(", ")
}

impl FindError {
    /// Returns the remedy, which is the same for all reasons and ends the message.
    #[must_use]
    pub fn remedy(&self) -> &'static str {
        REMEDY
    }

    /// Returns the message without the remedy.
    #[must_use]
    pub fn finding(&self) -> String {
        let message = self.to_string();
        let finding = message.strip_suffix(REMEDY).unwrap_or(&message);
        finding.trim_end_matches([':', ' ']).to_owned()
    }
}
