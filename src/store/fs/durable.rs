//! Durable writes: a file has either its old or its new content, and after `write` returns it has the new content even
//! after a power failure.
//!
//! A temporary file in the same folder, or in the holder's folder of a fenced store (`fence`), is written, synced and
//! renamed; then the folder is synced. All small files of a store and the caller's run state are written in this way.

use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

use super::{fence, ops};

/// Prefix of temporary files, by which a sweep finds the leftovers of a killed writer.
pub const TEMPORARY_PREFIX: &str = ".tmp-";

/// Error for a durable write that failed or may not be durable.
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
    /// The file could not be written. The old content is still in place.
    #[error("cannot write {path}")]
    Write {
        /// The file meant to be written.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// The file could not be renamed. The old content is still in place.
    #[error("cannot rename the temporary file to {path}")]
    Rename {
        /// The file meant to be replaced.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// The change is visible, but may be lost in a power failure.
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
    /// The file could not be removed.
    #[error("cannot remove {path}")]
    Remove {
        /// The file.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
}

impl DurableError {
    /// Returns the system's error.
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
/// [`DurableError`]; each variant states the resulting content.
pub fn write(path: &Path, content: &[u8]) -> Result<(), DurableError> {
    replace(path, 0o600, |file| ops::write_at(file, content, 0))
}

/// Copies a program (mode 0700) like [`write()`].
///
/// # Errors
/// The same as [`write()`]; [`DurableError::Write`] also if the program cannot be read.
pub fn copy_program(program: &Path, path: &Path) -> Result<(), DurableError> {
    replace(path, 0o700, |mut file| {
        io::copy(&mut File::open(program)?, &mut file).map(drop)
    })
}

fn replace(
    path: &Path,
    mode: u32,
    fill: impl FnOnce(&File) -> io::Result<()>,
) -> Result<(), DurableError> {
    let folder = folder_of(path);
    let passage = fence::passage(path).unwrap_or(folder.to_owned());
    let temporary = tempfile::Builder::new()
        .prefix(TEMPORARY_PREFIX)
        .make_in(&passage, |path| ops::create_new(path, mode))
        .map_err(|source| DurableError::CreateTemporary {
            path: passage,
            source,
        })?;
    fill(temporary.as_file())
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

/// Creates a file (mode 0600) with the content that `fill` writes, durably. An existing file is not replaced. On an
/// error the file does not exist, not even in part.
///
/// # Errors
/// The error of `fill`, or [`DurableError`]; [`DurableError::Rename`] if the file exists.
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

/// Makes creations, renames and removals in a folder durable.
///
/// # Errors
/// The folder cannot be opened or synced.
pub fn sync_folder(path: &Path) -> Result<(), DurableError> {
    ops::sync_folder(path).map_err(|source| DurableError::SyncFolder {
        path: path.to_owned(),
        source,
    })
}

/// Creates a folder of mode 0700. An existing folder is left unchanged.
///
/// # Errors
/// The folder cannot be created, or its parent not synced.
pub fn create_folder(path: &Path) -> Result<(), DurableError> {
    create_folder_with(path, 0o700)
}

/// Creates the missing folders above `path` durably.
///
/// # Errors
/// The same as [`create_folder`]; folders higher up may have been created.
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

/// Creates a folder; `mode` is subject to the umask. The parent is synced even if the folder exists (as far as
/// permitted), because its creator may have been killed before the sync.
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

/// Removes a file if it exists. The removal is durable after a sync of the folder, which the caller does once for many
/// files.
pub(crate) fn remove(path: &Path) -> Result<(), DurableError> {
    let removed = match fence::passage(path) {
        None => ops::remove_file(path),
        Some(passage) => {
            let name = path.file_name().unwrap_or_default();
            let gone = passage.join(name);
            ops::rename(path, &gone).and_then(|()| ops::remove_file(&gone))
        }
    };
    match removed {
        Ok(()) => Ok(()),
        // The holder's folder can be the one that does not exist.
        Err(error) if error.kind() == io::ErrorKind::NotFound && !is_there(path) => Ok(()),
        Err(source) => Err(DurableError::Remove {
            path: path.to_owned(),
            source,
        }),
    }
}

fn is_there(path: &Path) -> bool {
    path.symlink_metadata().is_ok()
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
        let [program, path] = ["program", "copy"].map(|name| folder.path().join(name));
        write(&program, b"#!/bin/sh").unwrap();
        copy_program(&program, &path).unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), b"#!/bin/sh");
        assert_eq!(path.metadata().unwrap().permissions().mode() & 0o777, 0o700);
    }

    #[test]
    fn missing_parents_are_created_and_a_blocking_file_is_named() {
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
