//! Reasons why a folder cannot be used as a store.

use std::io;
use std::path::{Path, PathBuf};

use crate::store::format::file_names::ListError;
use crate::store::fs::durable::DurableError;
use crate::store::fs::store_place::PlaceError;

/// Error for a folder that cannot be used as a store. Nothing was changed, except that
/// [`Store::create_or_open`](super::Store::create_or_open) may leave an unfinished store, which the next call
/// completes.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// The path does not exist.
    #[error("there is no store at {path}")]
    Missing {
        /// The path.
        path: PathBuf,
    },
    /// The folder or a file in it cannot be read.
    #[error("cannot read {path}")]
    Read {
        /// The path.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// The path is a file.
    #[error("{path} is not a folder")]
    NotFolder {
        /// The path.
        path: PathBuf,
    },
    /// The folder belongs to another user, who could replace the files that a restore maps and runs.
    #[error(
        "the store {path} belongs to user {owner}, not to user {user}: run `chown -R {user} {}`",
        shell_word(path)
    )]
    Owner {
        /// The path.
        path: PathBuf,
        /// User id that owns the folder.
        owner: u32,
        /// User id of this process.
        user: u32,
    },
    /// The folder is open to other users, and images contain the job's memory.
    #[error(
        "the store {path} is open to other users (mode {mode:04o}): run `chmod 700 {}`",
        shell_word(path)
    )]
    Exposed {
        /// The path.
        path: PathBuf,
        /// Permission bits of the folder.
        mode: u32,
    },
    /// The folder has other content.
    #[error("{path} is not a store and not empty; name a folder that is new or empty")]
    NotStore {
        /// The path.
        path: PathBuf,
    },
    /// The file `format` is not valid, or is missing although there are images.
    #[error("cannot determine the store's format: {path} is damaged or missing")]
    Format {
        /// The file.
        path: PathBuf,
    },
    /// The store is encrypted and no key was given.
    #[error(
        "the store {path} is encrypted and no key is given: set encryption.key_file or encryption.key_command"
    )]
    KeyMissing {
        /// The path.
        path: PathBuf,
    },
    /// The store was made with another key.
    #[error(
        "wrong key for the store {path}: give the key that the store was created with, or choose another store"
    )]
    KeyWrong {
        /// The path.
        path: PathBuf,
    },
    /// A key was given, but the store is not encrypted.
    #[error(
        "the store {path} is not encrypted, but a key is given: choose another store, \
         or set neither encryption.key_file nor encryption.key_command"
    )]
    KeyUnused {
        /// The path.
        path: PathBuf,
    },
    /// The file `key-check` is not valid.
    #[error("cannot check the store's key: {path} is damaged")]
    KeyCheck {
        /// The file.
        path: PathBuf,
    },
    /// The kernel has no random bytes.
    #[error("cannot create the encrypted store {path}")]
    Random {
        /// The path.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// The folder cannot be listed.
    #[error(transparent)]
    List(#[from] ListError),
    /// Another user could replace the store through a folder above it.
    #[error("the store was not created")]
    Place(#[from] PlaceError),
    /// The store cannot be created.
    #[error(transparent)]
    Create(#[from] DurableError),
}

/// Error for a store that was moved, removed or replaced after it was opened. The new content of the path is neither
/// read nor written.
#[derive(Debug, thiserror::Error)]
#[error(
    "the store at {0} was moved, replaced or removed while it is in use: move it back, or end this run"
)]
pub struct MovedStore(pub(super) PathBuf);

/// Quotes the path for a shell command line.
fn shell_word(path: &Path) -> String {
    let text = path.display().to_string();
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"/._-+".contains(&byte);
    if text.bytes().all(plain) {
        return text;
    }
    format!("'{}'", text.replace('\'', r"'\''"))
}
