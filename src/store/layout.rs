//! A store's folder: what lies where, and who may open it.
//!
//! Opening checks that the folder is a store, that it belongs to this user and that
//! nobody else can look inside: images hold every secret the job had in memory.

use std::fs;
use std::io::{self, Read};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::chunk::{self, Hash};
use super::cipher::Secrets;
use super::durable::{self, DurableError};
use super::error::ReadError;
use super::files::{self, FileKind};
use super::id::ImageId;
use super::key::{KEY_FILE, Key, KeyCheck, KeyCheckError};
use super::pack::PackName;

/// The format that this version writes.
pub(super) const FORMAT: u32 = 2;

const FORMAT_FILE: &str = "format";
const FORMAT_MAGIC: &str = "ckpt-run store ";
/// A line of text; anything longer is not ours.
const FORMAT_FILE_BYTES_MAX: u64 = 64;
const LOCK_FILE: &str = "lock";
pub(super) const IMAGES: &str = "images";
pub(super) const PACKS: &str = "packs";

/// A folder of images. Cheap to clone; holds no file open.
#[derive(Clone, Debug)]
pub struct Store {
    path: PathBuf,
    format: u32,
    /// In an encrypted store.
    secrets: Option<Arc<Secrets>>,
}

/// A folder that cannot be used as a store. Nothing was changed, except that
/// [`Store::create_or_open`] may leave an unfinished store, which it finishes next time.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// There is nothing at the path.
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
    /// The file `format` is not one of ours.
    #[error("{path} does not say which format the store has: the file is damaged")]
    Format {
        /// The file.
        path: PathBuf,
    },
    /// Nothing in it can be read without its key.
    #[error(
        "the store {path} is encrypted and no key is given: set encryption.key_file or encryption.key_command"
    )]
    KeyMissing {
        /// The path.
        path: PathBuf,
    },
    /// Nothing in it can be read with this key.
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
    List(#[from] ReadError),
    /// The store cannot be created.
    #[error(transparent)]
    Create(#[from] DurableError),
}

impl Store {
    /// As [`create_or_open_with`](Self::create_or_open_with), without a key.
    ///
    /// # Errors
    /// See [`OpenError`].
    pub fn create_or_open(path: &Path) -> Result<Self, OpenError> {
        Self::create_or_open_with(path, None)
    }

    /// Opens the store at `path`, or creates one where nothing or an empty folder is,
    /// encrypted if there is a key.
    ///
    /// # Errors
    /// See [`OpenError`].
    pub fn create_or_open_with(path: &Path, key: Option<&Key>) -> Result<Self, OpenError> {
        durable::create_parents(path)?;
        durable::create_folder(path)?;
        if inspect(path)?.is_none() {
            if !is_unfinished(path)? {
                return Err(not_store(path));
            }
            check_mode(path)?;
            durable::create_folder(&path.join(IMAGES))?;
            durable::create_folder(&path.join(PACKS))?;
            write_key_check(path, key)?;
            write_format(path)?;
        }
        Self::open_with(path, key)
    }

    /// As [`open_with`](Self::open_with), without a key.
    ///
    /// # Errors
    /// See [`OpenError`].
    pub fn open(path: &Path) -> Result<Self, OpenError> {
        Self::open_with(path, None)
    }

    /// Opens the store at `path`, with the key that it was created with, if any.
    ///
    /// # Errors
    /// See [`OpenError`].
    pub fn open_with(path: &Path, key: Option<&Key>) -> Result<Self, OpenError> {
        let format = inspect(path)?.ok_or_else(|| not_store(path))?;
        check_mode(path)?;
        check_key(path, key)?;
        Ok(Self {
            path: path.to_owned(),
            format,
            secrets: key.map(|key| Arc::new(Secrets::new(key))),
        })
    }

    /// Whether what the store holds is encrypted.
    #[must_use]
    pub fn is_encrypted(&self) -> bool {
        self.secrets.is_some()
    }

    pub(super) fn secrets(&self) -> Option<&Secrets> {
        self.secrets.as_deref()
    }

    /// The name of a chunk in this store.
    pub(super) fn name_of(&self, chunk: &[u8]) -> Hash {
        match &self.secrets {
            Some(secrets) => secrets.name(chunk),
            None => chunk::hash(chunk),
        }
    }

    /// The folder.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The format of the store; a newer one than ours can only be read.
    pub(super) fn format(&self) -> u32 {
        self.format
    }

    /// Keeps versions that do not know our images from writing beside them. Called before
    /// the first image of this format is begun.
    pub(super) fn upgrade(&self) -> Result<(), DurableError> {
        if self.format < FORMAT {
            write_format(&self.path)?;
        }
        Ok(())
    }

    pub(super) fn images_folder(&self) -> PathBuf {
        self.path.join(IMAGES)
    }

    pub(super) fn packs_folder(&self) -> PathBuf {
        self.path.join(PACKS)
    }

    pub(super) fn lock_file(&self) -> PathBuf {
        self.path.join(LOCK_FILE)
    }

    pub(super) fn manifest_file(&self, id: ImageId) -> PathBuf {
        self.images_folder().join(format!("{id}.manifest"))
    }

    pub(super) fn damaged_file(&self, id: ImageId) -> PathBuf {
        self.images_folder().join(format!("{id}.damaged"))
    }

    pub(super) fn pinned_file(&self, id: ImageId) -> PathBuf {
        self.images_folder().join(format!("{id}.pinned"))
    }

    pub(super) fn pack_file(&self, name: PackName) -> PathBuf {
        self.packs_folder().join(name.to_string())
    }
}

/// The format of the store at a path that is a folder of this user; `None` if it is no store.
fn inspect(path: &Path) -> Result<Option<u32>, OpenError> {
    let found = metadata(path)?;
    let user = nix::unistd::geteuid().as_raw();
    if !found.is_dir() {
        return Err(OpenError::NotFolder {
            path: path.to_owned(),
        });
    }
    if found.uid() != user {
        return Err(OpenError::Owner {
            path: path.to_owned(),
            owner: found.uid(),
            user,
        });
    }
    read_format(&path.join(FORMAT_FILE))
}

/// Comes after `inspect`: nobody is told to close a folder that is no store.
fn check_mode(path: &Path) -> Result<(), OpenError> {
    let mode = metadata(path)?.mode() & 0o7777;
    if mode & 0o077 != 0 {
        let path = path.to_owned();
        return Err(OpenError::Exposed { path, mode });
    }
    Ok(())
}

/// Gives a store that is being created what it will know its key by. An attempt before may
/// have had another key, or none.
fn write_key_check(path: &Path, key: Option<&Key>) -> Result<(), OpenError> {
    let file = path.join(KEY_FILE);
    let Some(key) = key else {
        // To last before there is a format, or a crash could leave a store that wants that key.
        if file.exists() {
            durable::remove(&file)?;
            durable::sync_folder(path)?;
        }
        return Ok(());
    };
    let check = KeyCheck::new(key).map_err(|source| OpenError::Random {
        path: path.to_owned(),
        source,
    })?;
    Ok(durable::write(&file, check.to_text().as_bytes())?)
}

fn check_key(path: &Path, key: Option<&Key>) -> Result<(), OpenError> {
    let file = path.join(KEY_FILE);
    let check = KeyCheck::read(&file).map_err(|error| match error {
        KeyCheckError::Read(source) => read_error(&file, source),
        KeyCheckError::Damaged => OpenError::KeyCheck { path: file },
    })?;
    let path = path.to_owned();
    match (check, key) {
        (None, None) => Ok(()),
        (Some(check), Some(key)) if check.fits(key) => Ok(()),
        (Some(_), Some(_)) => Err(OpenError::KeyWrong { path }),
        (Some(_), None) => Err(OpenError::KeyMissing { path }),
        (None, Some(_)) => Err(OpenError::KeyUnused { path }),
    }
}

fn metadata(path: &Path) -> Result<fs::Metadata, OpenError> {
    fs::metadata(path).map_err(|source| match source.kind() {
        io::ErrorKind::NotFound => OpenError::Missing {
            path: path.to_owned(),
        },
        _ => read_error(path, source),
    })
}

fn not_store(path: &Path) -> OpenError {
    OpenError::NotStore {
        path: path.to_owned(),
    }
}

fn write_format(store: &Path) -> Result<(), DurableError> {
    let line = format!("{FORMAT_MAGIC}{FORMAT}\n");
    durable::write(&store.join(FORMAT_FILE), line.as_bytes())
}

fn read_format(path: &Path) -> Result<Option<u32>, OpenError> {
    let file = match fs::File::open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(source) => return Err(read_error(path, source)),
    };
    let mut text = Vec::new();
    file.take(FORMAT_FILE_BYTES_MAX)
        .read_to_end(&mut text)
        .map_err(|source| read_error(path, source))?;
    std::str::from_utf8(&text)
        .ok()
        .and_then(|text| text.strip_prefix(FORMAT_MAGIC)?.strip_suffix('\n'))
        .filter(|number| number.bytes().all(|byte| byte.is_ascii_digit()))
        .and_then(|number| number.parse().ok())
        .filter(|format| *format >= 1)
        .map(Some)
        .ok_or_else(|| OpenError::Format {
            path: path.to_owned(),
        })
}

/// Whether the folder holds no more than a creation that was cut short leaves.
fn is_unfinished(path: &Path) -> Result<bool, OpenError> {
    let ours = [IMAGES, PACKS, LOCK_FILE, KEY_FILE];
    Ok(files::list(path)?.iter().all(|(path, kind)| {
        *kind == FileKind::Temporary || ours.iter().any(|name| path.ends_with(name))
    }))
}

fn read_error(path: &Path, source: io::Error) -> OpenError {
    OpenError::Read {
        path: path.to_owned(),
        source,
    }
}

/// The path as one word of a shell command line.
fn shell_word(path: &Path) -> String {
    let text = path.display().to_string();
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"/._-+".contains(&byte);
    if text.bytes().all(plain) {
        return text;
    }
    format!("'{}'", text.replace('\'', r"'\''"))
}

#[cfg(test)]
mod tests;
