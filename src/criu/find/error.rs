//! Why no CRIU was found, and why one does not answer.

use std::io;
use std::path::PathBuf;
use std::process::ExitStatus;

use crate::criu::criu_version::Version;

/// Ends every message of a search that failed.
const REMEDY: &str =
    "run scripts/setup, install CRIU 4.0 or newer, or name one by --criu or CKPT_RUN_CRIU";

/// Reason why there is no usable CRIU. Nothing was changed.
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
        /// The version that it reports.
        version: Version,
    },
    /// A folder that holds no CRIU with its loader.
    #[error("cannot use {} as CRIU: no usr/sbin/criu with a dynamic loader in usr/lib/*: {REMEDY}", path.display())]
    NotAPrefix {
        /// The folder.
        path: PathBuf,
    },
    /// A prefix that nobody named and that somebody else could have filled.
    #[error("cannot trust the CRIU at {}: {} belongs to another user or others can write to it: {REMEDY}", path.display(), part.display())]
    Untrusted {
        /// The prefix.
        path: PathBuf,
        /// The file or folder in it.
        part: PathBuf,
    },
    /// The program could not be asked for its version.
    #[error("failed to ask CRIU at {} for its version: {REMEDY}", path.display())]
    Ask {
        /// The program or prefix.
        path: PathBuf,
        /// The cause.
        #[source]
        source: io::Error,
    },
    /// The program ran and failed, or its answer holds no version.
    #[error("cannot understand CRIU at {}: `--version` ended with {status} and said {answer:?}: {REMEDY}", path.display())]
    NoVersion {
        /// The program or prefix.
        path: PathBuf,
        /// Its exit status.
        status: ExitStatus,
        /// Its words.
        answer: String,
    },
}

/// Reason why `criu check` did not pass.
#[derive(Debug, thiserror::Error)]
pub enum CheckError {
    /// The program could not be run.
    #[error("failed to run `criu check`")]
    Ask(#[from] io::Error),
    /// This kernel or these privileges do not suffice.
    #[error("cannot use CRIU here: `criu check` ended with {status}: {reason}")]
    Failed {
        /// Its exit status.
        status: ExitStatus,
        /// Its words.
        reason: String,
    },
}

fn list(paths: &[PathBuf]) -> String {
    let texts: Vec<_> = paths.iter().map(|path| path.to_string_lossy()).collect();
    texts.join(", ")
}

impl FindError {
    /// Returns the remedy, whatever the reason; the message ends with it.
    #[must_use]
    pub fn remedy(&self) -> &'static str {
        REMEDY
    }

    /// The message without the remedy.
    #[must_use]
    pub fn finding(&self) -> String {
        let message = self.to_string();
        let finding = message.strip_suffix(REMEDY).unwrap_or(&message);
        finding.trim_end_matches([':', ' ']).to_owned()
    }
}
