//! Primitive changes of the disk, one function each. No other code of the store creates, writes, syncs, renames or
//! removes files (`tests/layout.rs` checks this).
//!
//! The functions are plain system calls. In tests each call is also logged, so that a crash can be simulated at every
//! point of a longer operation, and each call can be made to fail (`store/tests/crash`). The caller decides what to
//! sync and when.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, FileExt, OpenOptionsExt};
use std::path::Path;

use nix::fcntl::{FallocateFlags, OFlag, fallocate};

/// Performs a step; tests also record it.
#[cfg(test)]
macro_rules! step {
    ($target:expr, $act:expr, $step:expr) => {
        crate::store::tests::crash::disk_log::perform(&$target, || $act, || $step)
    };
}
#[cfg(not(test))]
macro_rules! step {
    ($target:expr, $act:expr, $step:expr) => {
        $act
    };
}

#[cfg(test)]
use crate::store::tests::crash::disk_log::{Step, Target};

/// Creates a file for writing; fails if it exists.
pub(crate) fn create_new(path: &Path, mode: u32) -> io::Result<File> {
    step!(
        Target::Path(path),
        OpenOptions::new()
            .write(true)
            .create_new(true)
            .mode(mode)
            .open(path),
        Step::Create(path.to_owned())
    )
}

/// Opens an existing file for reading and writing, or creates one.
pub(crate) fn open_or_create(path: &Path, mode: u32) -> io::Result<File> {
    step!(
        Target::Path(path),
        OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .mode(mode)
            .open(path),
        Step::Open(path.to_owned())
    )
}

/// Opens an existing file for reading and writing without changing it. A symbolic link is not followed.
pub(crate) fn open(path: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    let options = options.read(true).write(true);
    options.custom_flags(OFlag::O_NOFOLLOW.bits()).open(path)
}

/// Writes all bytes.
pub(crate) fn write_at(file: &File, bytes: &[u8], offset: u64) -> io::Result<()> {
    step!(
        Target::File(file),
        file.write_all_at(bytes, offset),
        Step::Write {
            offset,
            bytes: bytes.to_vec()
        }
    )
}

/// Truncates the file, or extends it with zeros.
pub(crate) fn set_len(file: &File, len: u64) -> io::Result<()> {
    step!(Target::File(file), file.set_len(len), Step::SetLen(len))
}

/// Allocates disk space from `offset`; extends the file if necessary.
pub(crate) fn allocate(file: &File, offset: i64, len: i64) -> io::Result<()> {
    step!(
        Target::File(file),
        fallocate(file, FallocateFlags::empty(), offset, len).map_err(Into::into),
        Step::Extend((offset + len).unsigned_abs())
    )
}

/// Frees the disk space of a part of the file, which then reads as zeros; the length does not change.
pub(crate) fn punch(file: &File, offset: u64, len: u64) -> io::Result<()> {
    let how = FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
    step!(
        Target::File(file),
        fallocate(file, how, signed(offset)?, signed(len)?).map_err(Into::into),
        Step::Punch { offset, len }
    )
}

/// Makes the file's content and length durable, but not its name.
pub(crate) fn sync(file: &File) -> io::Result<()> {
    step!(Target::File(file), file.sync_all(), Step::Sync)
}

/// Renames a file, replacing an existing one.
pub(crate) fn rename(from: &Path, to: &Path) -> io::Result<()> {
    step!(
        Target::Path(from),
        fs::rename(from, to),
        Step::Rename(from.to_owned(), to.to_owned())
    )
}

/// Removes a file.
pub(crate) fn remove_file(path: &Path) -> io::Result<()> {
    step!(Target::Path(path), fs::remove_file(path), {
        Step::Remove(path.to_owned())
    })
}

/// Removes an empty folder.
pub(crate) fn remove_folder(path: &Path) -> io::Result<()> {
    step!(Target::Path(path), fs::remove_dir(path), {
        Step::Remove(path.to_owned())
    })
}

/// Creates a folder; `mode` is subject to the umask.
pub(crate) fn create_folder(path: &Path, mode: u32) -> io::Result<()> {
    step!(
        Target::Path(path),
        DirBuilder::new().mode(mode).create(path),
        Step::CreateFolder(path.to_owned())
    )
}

/// Makes the names in a folder durable.
pub(crate) fn sync_folder(path: &Path) -> io::Result<()> {
    step!(
        Target::Path(path),
        File::open(path).and_then(|folder| folder.sync_all()),
        Step::SyncFolder(path.to_owned())
    )
}

fn signed(bytes: u64) -> io::Result<i64> {
    i64::try_from(bytes).map_err(|_| io::ErrorKind::FileTooLarge.into())
}
