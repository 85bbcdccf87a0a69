//! Renames of files at a rollback: back to their former names, and out of the way.
//!
//! Files are set aside in the store, which the job's user may not enter. So that is done with this process's rights, after
//! the check that the user could remove the file.

use std::ffi::OsString;
use std::fs::{self, DirBuilder, File, Metadata};
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, symlink};
use std::path::{Path, PathBuf};

use nix::libc::{ELOOP, ENOENT, ENOTDIR, ENOTEMPTY, EXDEV};
use rustix::fs::{CWD, RenameFlags, renameat_with};

use crate::safe_path::{JobUsers, Spot};
use crate::sparse_file::copy_data;

/// Returns the spot of a file for the actor that its present owner determines; `None` if there is no such file.
fn present(path: &Path, users: &JobUsers) -> io::Result<Option<(Spot, Metadata)>> {
    // In the place of its folder can be a file or a link by now.
    let is_missing = |error: &io::Error| {
        let missing = [ENOENT, ENOTDIR, ELOOP].map(Some);
        missing.contains(&error.raw_os_error())
    };
    // Which user acts depends on it, not what is done.
    let metadata = |spot: &Spot| spot.in_folder(|| spot.metadata());
    let owner = match Spot::of(path).and_then(|spot| metadata(&spot)) {
        Ok(found) => found.uid(),
        Err(error) if is_missing(&error) => return Ok(None),
        Err(error) => return Err(error),
    };
    let spot = Spot::of_job(path, owner, users)?;
    match metadata(&spot) {
        Ok(found) => Ok(Some((spot, found))),
        Err(error) if is_missing(&error) => Ok(None),
        Err(error) => Err(error),
    }
}

/// Checks that a file may be removed or renamed, if it exists.
pub(super) fn check_removal(path: &Path, users: &JobUsers) -> io::Result<()> {
    let found = present(path, users)?;
    found.map_or(Ok(()), |(spot, found)| spot.allows(found.uid()))
}

/// Moves a file, link or empty folder below `aside`, under its whole path.
pub(super) fn set_aside(path: &Path, aside: &Path, users: &JobUsers) -> io::Result<()> {
    let Some((spot, found)) = present(path, users)? else {
        return Ok(()); // also if its folder was set aside
    };
    spot.allows(found.uid())?;
    if found.is_dir() {
        return match spot.in_folder(|| spot.remove_folder()) {
            // The folder contains files of other programs, or older ones.
            Err(error) if error.raw_os_error() == Some(ENOTEMPTY) => Ok(()),
            done => done,
        };
    }
    let to = aside_path(path, aside)?;
    match spot.in_folder(|| fs::rename(spot.path(), &to)) {
        Err(error) if error.raw_os_error() == Some(EXDEV) => {
            if found.is_file() {
                let source = spot.open_as_owner(File::options().read(true), 0)?;
                let target = File::create(&to)?;
                copy_data(&source, 0..found.size(), &target, 0)?;
                target.sync_all()?;
            } else if found.is_symlink() {
                symlink(spot.in_folder(|| fs::read_link(spot.path()))?, &to)?;
            }
            spot.in_folder(|| spot.remove_file())
        }
        Ok(()) => {
            let is_same = fs::symlink_metadata(&to)?.uid() == found.uid();
            if is_same {
                return Ok(());
            }
            // Another user's file got the name since.
            renameat_with(CWD, &to, CWD, spot.path(), RenameFlags::NOREPLACE)?;
            Err(is_of_others())
        }
        done => done,
    }
}

/// Returns the temporary name of a file that will be renamed to `to`.
pub(super) fn between(to: &Path) -> PathBuf {
    let mut name = OsString::from(".ckpt-run-moved-");
    name.push(to.file_name().unwrap_or_default());
    to.with_file_name(name)
}

pub(super) fn rename(from: &Path, to: &Path, users: &JobUsers) -> io::Result<()> {
    let (source, found) = present(from, users)?.ok_or(io::ErrorKind::NotFound)?;
    let target = Spot::of_job(to, found.uid(), users)?;
    source.allows(found.uid())?;
    target.allows(found.uid())?;
    source.in_folder(|| target.in_folder(|| source.rename_to(&target)))
}

/// Makes `path` a hard link to the file at `first`, whose owner is `owner`.
pub(super) fn link(
    first: &Path,
    path: &Path,
    created: &Path,
    (owner, users): (u32, &JobUsers),
) -> io::Result<()> {
    let source = Spot::of_job(first, owner, users)?;
    let target = Spot::of_job(path, owner, users)?;
    let found = source.in_folder(|| source.metadata())?;
    if found.uid() != owner {
        return Err(is_of_others());
    }
    let now = target.in_folder(|| target.metadata());
    if now.is_ok_and(|now| now.ino() == found.ino()) {
        return Ok(());
    }
    set_aside(path, created, users)?;
    target.allows(owner)?;
    target.in_folder(|| source.link_to(&target))
}

/// Returns the full path of a file below the folder `aside`, and creates its parent folders.
pub(super) fn aside_path(path: &Path, aside: &Path) -> io::Result<PathBuf> {
    let to = aside.join(path.strip_prefix("/").unwrap_or(path));
    let folder = to.parent().unwrap_or(aside);
    DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(folder)?;
    Ok(to)
}

pub(super) fn is_of_others() -> io::Error {
    let message = "another user's file is in its place";
    io::Error::new(io::ErrorKind::PermissionDenied, message)
}
