//! Reasons why a folder cannot be used as a store.

use std::io;
use std::path::{Path, PathBuf};

use crate::store::format::file_names::ListError;
use crate::store::fs::durable::DurableError;
use crate::store::fs::store_place::PlaceError;

/// A folder that cannot be used as a store. Nothing was changed, except that
/// [`Store::create_or_open`](super::Store::create_or_open) may leave an unfinished store, which it finishes next time.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// The path does not exist.
    #[error("there is no store at {path}")]
    Missing {
        /// The path.
        path: PathBuf,
    },
    /// The folder or a file in it cannot be looked at.
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
    /// Another user could change what a restore runs.
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
    /// Images hold the job's memory.
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
    /// The folder has other content, and no store is made in the middle of it.
    #[error("{path} is not a store and not empty; name a folder that is new or empty")]
    NotStore {
        /// The path.
        path: PathBuf,
    },
    /// The file `format` is not one of ours, or missing where there are images.
    #[error("{path} does not say which format the store has: the file is damaged or lost")]
    Format {
        /// The file.
        path: PathBuf,
    },
    /// The store is encrypted and cannot be read without its key.
    #[error(
        "the store {path} is encrypted and no key is given: set encryption.key_file or encryption.key_command"
    )]
    KeyMissing {
        /// The path.
        path: PathBuf,
    },
    /// The store cannot be read with this key.
    #[error(
        "the key is not that of the store {path}: give the key that it was made with, or choose another store"
    )]
    KeyWrong {
        /// The path.
        path: PathBuf,
    },
    /// Images would not be encrypted although a key is given.
    #[error(
        "the store {path} was made without encryption, and a key is given: choose another store, \
         or set neither encryption.key_file nor encryption.key_command"
    )]
    KeyUnused {
        /// The path.
        path: PathBuf,
    },
    /// The file by which the store knows its key is not one of ours.
    #[error("{path} does not say which key the store has: the file is damaged")]
    KeyCheck {
        /// The file.
        path: PathBuf,
    },
    /// The kernel has no random bytes.
    #[error("cannot make the encrypted store {path}")]
    Random {
        /// The path.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// The folder cannot be listed.
    #[error(transparent)]
    List(#[from] ListError),
    /// Others could put their own store in its place.
    #[error("no store is made there")]
    Place(#[from] PlaceError),
    /// The store cannot be created.
    #[error(transparent)]
    Create(#[from] DurableError),
}

/// A store that was moved, removed or replaced since it was opened. What is there now is neither read nor written.
#[derive(Debug, thiserror::Error)]
#[error("the store at {0} was moved or replaced while it is in use: move it back, or end this run")]
pub struct MovedStore(pub(super) PathBuf);

/// The path as one word of a shell command line.
fn shell_word(path: &Path) -> String {
    let text = path.display().to_string();
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"/._-+".contains(&byte);
    if text.bytes().all(plain) {
        return text;
    }
    format!("'{}'", text.replace('\'', r"'\''"))
}
