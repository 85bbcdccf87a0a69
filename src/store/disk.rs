//! Every change that the store makes on disk, one function each: nothing else in the
//! store creates, writes, syncs, renames or removes.
//!
//! Plain calls of the system. Knows nothing of packs or manifests; what must be synced
//! when is the caller's to decide.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, FileExt, OpenOptionsExt};
use std::path::Path;

use nix::fcntl::{FallocateFlags, fallocate};

/// Creates a file, for writing; fails where there is one.
pub(super) fn create_new(path: &Path, mode: u32) -> io::Result<File> {
    OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(mode)
        .open(path)
}

/// Opens a file for reading and writing as it is, or creates one.
pub(super) fn open_or_create(path: &Path, mode: u32) -> io::Result<File> {
    OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .mode(mode)
        .open(path)
}

/// Writes all bytes.
pub(super) fn write_at(file: &File, bytes: &[u8], offset: u64) -> io::Result<()> {
    file.write_all_at(bytes, offset)
}

/// Cuts the file, or makes it longer by zeros.
pub(super) fn set_len(file: &File, len: u64) -> io::Result<()> {
    file.set_len(len)
}

/// Takes disk space from `offset` on; the file becomes as long as that.
pub(super) fn allocate(file: &File, offset: i64, len: i64) -> io::Result<()> {
    fallocate(file, FallocateFlags::empty(), offset, len).map_err(Into::into)
}

/// Makes the file's content and length last, but not its name.
pub(super) fn sync(file: &File) -> io::Result<()> {
    file.sync_all()
}

/// Gives a file another name in the same folder, in place of what has that name.
pub(super) fn rename(from: &Path, to: &Path) -> io::Result<()> {
    fs::rename(from, to)
}

/// Removes a file.
pub(super) fn remove_file(path: &Path) -> io::Result<()> {
    fs::remove_file(path)
}

/// Creates a folder; `mode` is subject to the umask.
pub(super) fn create_folder(path: &Path, mode: u32) -> io::Result<()> {
    DirBuilder::new().mode(mode).create(path)
}

/// Makes the names in a folder last.
pub(super) fn sync_folder(path: &Path) -> io::Result<()> {
    File::open(path).and_then(|folder| folder.sync_all())
}
