//! Folder of a store: its layout and its access checks.
//!
//! On opening, the folder must be a store, belong to this user and be closed to others, because images contain every
//! secret in the job's memory.

mod open_error;

use std::fs::{self, File};
use std::io::{self, Read};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::FORMAT;
use super::chunk::{self, Hash};
use super::cipher::Secrets;
use super::file_names::{self, FileKind, ListError};
use super::image_id::ImageId;
use super::pack::PackName;
use super::store_key::{KEY_FILE, Key, KeyCheck, KeyCheckError};
use crate::store::fs::durable::{self, DurableError};
use crate::store::fs::ops;
use crate::store::fs::store_place;
use crate::store::read::manifest_cache::ManifestCache;
use crate::store::read::pending_image::Pending;

pub use open_error::{MovedStore, OpenError};

pub(crate) const FORMAT_FILE: &str = "format";
const FORMAT_MAGIC: &str = "ckpt-run store ";
/// A line of text; anything longer is not ours.
pub(crate) const FORMAT_FILE_BYTES_MAX: u64 = 64;
const LOCK_FILE: &str = "lock";
/// Without this file, `git add -A` in the job's folder would take the store with its secrets, and `git clean` remove it.
const IGNORE_FILE: &str = ".gitignore";
const IGNORE_ALL: &str =
    "# A store of ckpt-run: images hold everything that a job had in memory.\n*\n";
pub(crate) const IMAGES: &str = "images";
pub(crate) const PACKS: &str = "packs";
/// Name of a folder in the root of every ext file system.
const LOST_AND_FOUND: &str = "lost+found";

/// Open store of images. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Store {
    path: PathBuf,
    /// Folder that was at the path when the store was opened.
    folder: Arc<File>,
    format: u32,
    /// Secrets of an encrypted store.
    secrets: Option<Arc<Secrets>>,
    /// Images that this process downloads.
    pub(crate) pending: Pending,
    pub(crate) manifests: ManifestCache,
}

impl Store {
    /// Calls [`create_or_open_with`](Self::create_or_open_with) without a key.
    ///
    /// # Errors
    /// See [`OpenError`].
    pub fn create_or_open(path: &Path) -> Result<Self, OpenError> {
        Self::create_or_open_with(path, None)
    }

    /// Opens the store at `path`. Creates a store if the path does not exist or is an empty folder; the new store is
    /// encrypted if a key is given.
    ///
    /// # Errors
    /// See [`OpenError`].
    pub fn create_or_open_with(path: &Path, key: Option<&Key>) -> Result<Self, OpenError> {
        store_place::check_new(path)?;
        durable::create_parents(path)?;
        durable::create_folder(path)?;
        let found = metadata(path)?;
        if inspect(path, &found)?.is_none() {
            if !is_unfinished(path)? {
                return Err(without_format(path));
            }
            check_mode(path, &found)?;
            hide_from_git(path)?;
            durable::create_folder(&path.join(IMAGES))?;
            durable::create_folder(&path.join(PACKS))?;
            write_key_check(path, key)?;
            write_format(path)?;
        }
        Self::open_with(path, key)
    }

    /// Calls [`open_with`](Self::open_with) without a key.
    ///
    /// # Errors
    /// See [`OpenError`].
    pub fn open(path: &Path) -> Result<Self, OpenError> {
        Self::open_with(path, None)
    }

    /// Opens the store at `path` with the key of its creation, if any.
    ///
    /// # Errors
    /// See [`OpenError`].
    pub fn open_with(path: &Path, key: Option<&Key>) -> Result<Self, OpenError> {
        let folder = File::open(path).map_err(|source| open_failed(path, source))?;
        let found = folder
            .metadata()
            .map_err(|source| read_error(path, source))?;
        let format = inspect(path, &found)?.ok_or_else(|| without_format(path))?;
        check_mode(path, &found)?;
        check_key(path, key)?;
        Ok(Self {
            path: path.to_owned(),
            folder: Arc::new(folder),
            format,
            secrets: key.map(|key| Arc::new(Secrets::new(key))),
            pending: Pending::default(),
            manifests: ManifestCache::default(),
        })
    }

    /// Returns true if the store is encrypted.
    #[must_use]
    pub fn is_encrypted(&self) -> bool {
        self.secrets.is_some()
    }

    pub(crate) fn secrets(&self) -> Option<&Secrets> {
        self.secrets.as_deref()
    }

    /// Returns the name of a chunk in this store.
    pub(crate) fn name_of(&self, chunk: &[u8]) -> Hash {
        match &self.secrets {
            Some(secrets) => secrets.name(chunk),
            None => chunk::hash(chunk),
        }
    }

    /// Returns the folder's path.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Checks that the path still leads to the opened folder, whose owner and mode were checked on opening.
    pub(crate) fn check_place(&self) -> Result<(), MovedStore> {
        let opened = self.folder.metadata();
        let found = opened.and_then(|opened| Ok((opened, fs::metadata(&self.path)?)));
        match found {
            Ok((opened, found)) if (opened.dev(), opened.ino()) == (found.dev(), found.ino()) => {
                Ok(())
            }
            Ok(_) | Err(_) => Err(MovedStore(self.path.clone())),
        }
    }

    /// Returns the format of the store. A store with a newer format is read-only.
    pub(crate) fn format(&self) -> u32 {
        self.format
    }

    /// Raises the store's format, so that older versions do not write beside images that they cannot read. Called
    /// before the first image of this format.
    pub(crate) fn upgrade(&self) -> Result<(), DurableError> {
        if self.format < FORMAT {
            write_format(&self.path)?;
        }
        Ok(())
    }

    pub(crate) fn images_folder(&self) -> PathBuf {
        self.path.join(IMAGES)
    }

    pub(crate) fn packs_folder(&self) -> PathBuf {
        self.path.join(PACKS)
    }

    pub(crate) fn lock_file(&self) -> PathBuf {
        self.path.join(LOCK_FILE)
    }

    pub(crate) fn manifest_file(&self, id: ImageId) -> PathBuf {
        self.images_folder().join(format!("{id}.manifest"))
    }

    pub(crate) fn damaged_file(&self, id: ImageId) -> PathBuf {
        self.images_folder().join(format!("{id}.damaged"))
    }

    pub(crate) fn pinned_file(&self, id: ImageId) -> PathBuf {
        self.images_folder().join(format!("{id}.pinned"))
    }

    pub(crate) fn pack_file(&self, name: PackName) -> PathBuf {
        self.packs_folder().join(name.to_string())
    }
}

/// Returns the format of the store at a path; `None` if the path is a folder of this user without a store.
fn inspect(path: &Path, found: &fs::Metadata) -> Result<Option<u32>, OpenError> {
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

/// Checks the mode. Called after `inspect`, so that only the mode of a store is reported.
fn check_mode(path: &Path, found: &fs::Metadata) -> Result<(), OpenError> {
    let mode = found.mode() & 0o7777;
    if mode & 0o077 != 0 {
        let path = path.to_owned();
        return Err(OpenError::Exposed { path, mode });
    }
    Ok(())
}

/// Lets git ignore the store. Not durably by itself: a store is complete without that.
fn hide_from_git(store: &Path) -> Result<(), DurableError> {
    let path = store.join(IGNORE_FILE);
    let written = ops::open_or_create(&path, 0o600)
        .and_then(|file| ops::write_at(&file, IGNORE_ALL.as_bytes(), 0));
    written.map_err(|source| DurableError::Write { path, source })
}

/// Writes the key check of a store under creation. An interrupted creation may have left the check of another key.
fn write_key_check(path: &Path, key: Option<&Key>) -> Result<(), OpenError> {
    let file = path.join(KEY_FILE);
    let Some(key) = key else {
        // The removal must be durable before the file `format` exists. Otherwise a crash could leave a store that
        // requires the old key.
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
    fs::metadata(path).map_err(|source| open_failed(path, source))
}

fn open_failed(path: &Path, source: io::Error) -> OpenError {
    match source.kind() {
        io::ErrorKind::NotFound => OpenError::Missing {
            path: path.to_owned(),
        },
        _ => read_error(path, source),
    }
}

/// Returns the error for a folder without a format file: a store that lost the file, or no store.
fn without_format(path: &Path) -> OpenError {
    let is_store = contents(path).is_ok_and(|kinds| {
        kinds.iter().any(|kind| match kind {
            FileKind::Manifest(_)
            | FileKind::Damaged(_)
            | FileKind::Pinned(_)
            | FileKind::Pack(_) => true,
            FileKind::Temporary | FileKind::Foreign => false,
        })
    });
    if is_store {
        OpenError::Format {
            path: path.join(FORMAT_FILE),
        }
    } else {
        OpenError::NotStore {
            path: path.to_owned(),
        }
    }
}

fn write_format(store: &Path) -> Result<(), DurableError> {
    durable::write(&store.join(FORMAT_FILE), format_line().as_bytes())
}

/// The content of the file that makes a folder a store.
pub(crate) fn format_line() -> String {
    format!("{FORMAT_MAGIC}{FORMAT}\n")
}

/// The format in such a file.
pub(crate) fn parse_format(text: &[u8]) -> Option<u32> {
    std::str::from_utf8(text)
        .ok()
        .and_then(|text| text.strip_prefix(FORMAT_MAGIC)?.strip_suffix('\n'))
        .filter(|number| number.bytes().all(|byte| byte.is_ascii_digit()))
        .and_then(|number| number.parse().ok())
        .filter(|format| *format >= 1)
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
    parse_format(&text)
        .map(Some)
        .ok_or_else(|| OpenError::Format {
            path: path.to_owned(),
        })
}

/// Returns true if the folder holds nothing but the files of an interrupted creation and a file system's own folder. A
/// folder with images must not get a new key.
fn is_unfinished(path: &Path) -> Result<bool, OpenError> {
    let known = [IMAGES, PACKS, LOCK_FILE, KEY_FILE, LOST_AND_FOUND];
    let is_bare = file_names::list(path)?.iter().all(|(path, kind)| {
        *kind == FileKind::Temporary
            || known.iter().any(|name| path.ends_with(name))
            || path.ends_with(IGNORE_FILE) && is_our_ignore_file(path)
    });
    let is_temporary = |kind: &FileKind| *kind == FileKind::Temporary;
    Ok(is_bare && contents(path)?.iter().all(is_temporary))
}

/// Returns true for a file of ours. After a power failure it may be shorter, or have zeros.
fn is_our_ignore_file(path: &Path) -> bool {
    let is_ours = |text: Vec<u8>| {
        let mut pairs = text.iter().zip(IGNORE_ALL.bytes());
        text.len() <= IGNORE_ALL.len() && pairs.all(|(found, ours)| *found == 0 || *found == ours)
    };
    let is_file = path.symlink_metadata().is_ok_and(|found| found.is_file());
    is_file && fs::read(path).is_ok_and(is_ours)
}

/// Lists the existing folders of a store.
fn contents(path: &Path) -> Result<Vec<FileKind>, ListError> {
    let mut kinds = Vec::new();
    for folder in [IMAGES, PACKS] {
        match file_names::list(&path.join(folder)) {
            Ok(found) => kinds.extend(found.into_iter().map(|(_, kind)| kind)),
            Err(error) if error.source.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(error),
        }
    }
    Ok(kinds)
}

fn read_error(path: &Path, source: io::Error) -> OpenError {
    OpenError::Read {
        path: path.to_owned(),
        source,
    }
}

#[cfg(test)]
mod tests;
