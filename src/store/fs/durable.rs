//! Durable writes: after `write` returns, the file has its new content even if the
//! power fails; before, it has the old one; never half of each.
//!
//! A temporary file in the same folder is written, synced and renamed, then the folder
//! is synced. Every small file of a store goes this way, and the run state of the
//! caller too. Knows nothing of what it writes.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

use super::ops;

/// Prefix of temporary files, by which a sweep finds those of a killed writer.
pub const TEMPORARY_PREFIX: &str = ".tmp-";

/// A durable write that did not happen, or of which it is not known whether it lasts.
#[derive(Debug, thiserror::Error)]
pub enum DurableError {
    /// The temporary file could not be created. Nothing changed.
    #[error("cannot create a temporary file in {path}")]
    CreateTemporary {
        /// The folder.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// The old content is still in place.
    #[error("cannot write {path}")]
    Write {
        /// The file meant to be written.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// The old content is still in place.
    #[error("cannot rename the temporary file to {path}")]
    Rename {
        /// The file meant to be replaced.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// The change is visible, but may not outlive a power failure.
    #[error("cannot sync the folder {path}")]
    SyncFolder {
        /// The folder.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// The folder could not be created. Nothing changed.
    #[error("cannot create the folder {path}")]
    CreateFolder {
        /// The folder.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// The file is still there.
    #[error("cannot remove {path}")]
    Remove {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
}

impl DurableError {
    /// The system's own reason.
    #[must_use]
    pub fn io_error(&self) -> &io::Error {
        match self {
            Self::CreateTemporary { source, .. }
            | Self::Write { source, .. }
            | Self::Rename { source, .. }
            | Self::SyncFolder { source, .. }
            | Self::CreateFolder { source, .. }
            | Self::Remove { source, .. } => source,
        }
    }
}

/// Replaces the content of `path` (mode 0600), or creates it.
///
/// # Errors
/// [`DurableError`]; each variant says what is in place then.
pub fn write(path: &Path, content: &[u8]) -> Result<(), DurableError> {
    replace(path, content, 0o600)
}

/// Writes a program (mode 0700) as [`write()`] does.
///
/// # Errors
/// As there.
pub fn write_program(path: &Path, content: &[u8]) -> Result<(), DurableError> {
    replace(path, content, 0o700)
}

fn replace(path: &Path, content: &[u8], mode: u32) -> Result<(), DurableError> {
    let folder = folder_of(path);
    let temporary = tempfile::Builder::new()
        .prefix(TEMPORARY_PREFIX)
        .make_in(folder, |path| ops::create_new(path, mode))
        .map_err(|source| DurableError::CreateTemporary {
            path: folder.to_owned(),
            source,
        })?;
    ops::write_at(temporary.as_file(), content, 0)
        .and_then(|()| ops::sync(temporary.as_file()))
        .map_err(|source| DurableError::Write {
            path: path.to_owned(),
            source,
        })?;
    let mut temporary = temporary.into_temp_path();
    ops::rename(&temporary, path).map_err(|source| DurableError::Rename {
        path: path.to_owned(),
        source,
    })?;
    temporary.disable_cleanup(true); // nothing has that name any more
    sync_folder(folder)
}

/// Makes a new file (mode 0600) of what `fill` writes, durably; one that has this name stays
/// as it is. Without success there is no file, nor a part of one.
///
/// # Errors
/// What `fill` says, or [`DurableError`]: [`DurableError::Rename`] also when there is such a file.
pub fn create_with<T, E: From<DurableError>>(
    path: &Path,
    fill: impl FnOnce(&File) -> Result<T, E>,
) -> Result<T, E> {
    let folder = folder_of(path);
    let temporary = tempfile::Builder::new()
        .prefix(TEMPORARY_PREFIX)
        .make_in(folder, |path| ops::create_new(path, 0o600))
        .map_err(|source| DurableError::CreateTemporary {
            path: folder.to_owned(),
            source,
        })?;
    let filled = fill(temporary.as_file())?;
    ops::sync(temporary.as_file()).map_err(|source| DurableError::Write {
        path: path.to_owned(),
        source,
    })?;
    temporary
        .persist_noclobber(path)
        .map_err(|error| DurableError::Rename {
            path: path.to_owned(),
            source: error.error,
        })?;
    sync_folder(folder)?;
    Ok(filled)
}

/// Makes creations, renames and removals in a folder last.
///
/// # Errors
/// The folder cannot be opened or synced.
pub fn sync_folder(path: &Path) -> Result<(), DurableError> {
    ops::sync_folder(path).map_err(|source| DurableError::SyncFolder {
        path: path.to_owned(),
        source,
    })
}

/// Creates a folder of mode 0700, or leaves the one that is there as it is.
///
/// # Errors
/// The folder cannot be created, or its parent not synced.
pub fn create_folder(path: &Path) -> Result<(), DurableError> {
    create_folder_with(path, 0o700)
}

/// Creates the folders above `path` that are missing, each of them to last.
///
/// # Errors
/// As [`create_folder`]; folders higher up may have been created.
pub(crate) fn create_parents(path: &Path) -> Result<(), DurableError> {
    let parents = path.ancestors().skip(1);
    let missing: Vec<&Path> = parents
        .take_while(|folder| !folder.as_os_str().is_empty() && !folder.exists())
        .collect();
    for folder in missing.into_iter().rev() {
        create_folder_with(folder, 0o777)?;
    }
    Ok(())
}

/// `mode` is subject to the umask. The parent is synced even when the folder is there, where we
/// may: whoever created it may have been killed before syncing.
fn create_folder_with(path: &Path, mode: u32) -> Result<(), DurableError> {
    let parent = folder_of(path);
    match ops::create_folder(path, mode) {
        Ok(()) => sync_folder(parent),
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => match sync_folder(parent) {
            Err(error) if error.io_error().kind() == io::ErrorKind::PermissionDenied => Ok(()),
            synced => synced,
        },
        Err(source) => Err(DurableError::CreateFolder {
            path: path.to_owned(),
            source,
        }),
    }
}

/// Removes a file, or does nothing where there is none. It lasts once the folder is
/// synced, which the caller does once for many.
pub(crate) fn remove(path: &Path) -> Result<(), DurableError> {
    match ops::remove_file(path) {
        Ok(()) => Ok(()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(source) => Err(DurableError::Remove {
            path: path.to_owned(),
            source,
        }),
    }
}

fn folder_of(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        Some(_) | None => Path::new("."),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    #[test]
    fn a_write_replaces_the_file_and_leaves_nothing_else() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("run.json");
        write(&path, b"one").unwrap();
        write(&path, b"two").unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), b"two");
        assert_eq!(path.metadata().unwrap().permissions().mode() & 0o777, 0o600);
        assert_eq!(folder.path().read_dir().unwrap().count(), 1);
    }

    #[test]
    fn a_program_can_be_run_by_its_owner_alone() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("program");
        write_program(&path, b"#!/bin/sh").unwrap();
        assert_eq!(path.metadata().unwrap().permissions().mode() & 0o777, 0o700);
    }

    #[test]
    fn all_missing_parents_are_created_and_a_file_in_the_way_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("one/two/three");
        create_parents(&path).unwrap();
        create_parents(&path).unwrap();
        assert!(folder.path().join("one/two").is_dir() && !path.exists());
        create_parents(Path::new("relative")).unwrap();
        write(&path, b"").unwrap();
        let error = create_parents(&path.join("four/five")).unwrap_err();
        assert!(
            matches!(&error, DurableError::CreateFolder { path: at, .. } if at.ends_with("four")),
            "{error}"
        );
    }

    #[test]
    fn a_failed_rename_keeps_the_old_and_leaves_no_temporary_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("taken");
        std::fs::create_dir(&path).unwrap();
        let error = write(&path, b"new").unwrap_err();
        assert!(matches!(error, DurableError::Rename { .. }), "{error}");
        assert!(path.is_dir());
        assert_eq!(folder.path().read_dir().unwrap().count(), 1);
    }
}
