//! An image as files in memory, for a job with private huge pages (`MAP_HUGETLB`).
//!
//! CRIU (4.2.1) reads private huge pages by offset, after all other memory. A stream has no offsets, so its restore
//! fails. Therefore CRIU receives files in an unmounted tmpfs, which is freed with its last descriptor, or without the
//! privilege for it in a folder of `/dev/shm`. CRIU frees each page of the files that it has restored, so that the memory
//! is not needed twice.

use std::fs::File;
use std::io::{self, Write};
use std::os::fd::{AsRawFd, OwnedFd, RawFd};

use rustix::fs::{Mode, OFlags, openat};
use rustix::io::Errno;
use rustix::mount::{
    FsMountFlags, FsOpenFlags, MountAttrFlags, fsconfig_create, fsconfig_set_string, fsmount,
    fsopen,
};
use tempfile::TempDir;

use super::error::RestoreError;
use crate::criu::OPEN_FILES;
use crate::run::format::size;
use crate::run::machine;
use crate::store::ImageReader;

/// The folder of CRIU's files in an image.
const FOLDER: &str = "criu/";
/// Size option of a tmpfs without a limit.
const UNLIMITED: &str = "0";

/// The files. They exist as long as this value or a copy of its descriptor.
pub(super) struct ImageFiles {
    folder: OwnedFd,
    _removed_at_last: Option<TempDir>,
}

impl ImageFiles {
    /// Copies CRIU's files from an image, or `open_files` as the list of open files. Each byte is verified.
    pub fn unpack(image: &ImageReader, open_files: Option<&[u8]>) -> Result<Self, RestoreError> {
        let streams = &image.manifest().streams;
        let files = || streams.iter().filter(|one| one.name.starts_with(FOLDER));
        let needed: u64 = files().map(|one| one.raw_len).sum();
        let available = machine::available_memory();
        if needed > available {
            return Err(RestoreError::Shortage {
                reason: format!(
                    "a job with huge pages (MAP_HUGETLB) is restored through memory, which needs {}, but only {} are \
                     available; free some, or raise the memory limit of the container",
                    size(needed),
                    size(available)
                ),
            });
        }
        let (folder, place) = match memory_folder() {
            Ok(folder) => (folder, None),
            Err(Errno::PERM) => shared_folder().map_err(RestoreError::Prepare)?,
            Err(errno) => return Err(RestoreError::Prepare(errno.into())),
        };
        for stream in files() {
            let name = &stream.name[FOLDER.len()..];
            let file =
                create(&folder, name).map_err(|errno| RestoreError::Prepare(errno.into()))?;
            match open_files {
                Some(list) if name == OPEN_FILES => {
                    (&file).write_all(list).map_err(RestoreError::Prepare)?;
                }
                _ => drop(image.copy_to(&stream.name, &mut &file)?),
            }
        }
        Ok(Self {
            folder,
            _removed_at_last: place,
        })
    }

    /// Returns the descriptor of the folder.
    pub fn descriptor(&self) -> RawFd {
        self.folder.as_raw_fd()
    }
}

/// Creates an empty tmpfs that is not mounted.
fn memory_folder() -> Result<OwnedFd, Errno> {
    let tmpfs = fsopen("tmpfs", FsOpenFlags::FSOPEN_CLOEXEC)?;
    fsconfig_set_string(&tmpfs, "size", UNLIMITED)?;
    fsconfig_set_string(&tmpfs, "mode", "0700")?;
    fsconfig_create(&tmpfs)?;
    let attributes = MountAttrFlags::MOUNT_ATTR_NOSUID
        | MountAttrFlags::MOUNT_ATTR_NODEV
        | MountAttrFlags::MOUNT_ATTR_NOEXEC;
    fsmount(&tmpfs, FsMountFlags::FSMOUNT_CLOEXEC, attributes)
}

/// Creates a private folder in memory that all users share.
fn shared_folder() -> io::Result<(OwnedFd, Option<TempDir>)> {
    let place = tempfile::Builder::new()
        .prefix("ckpt-run-")
        .tempdir_in("/dev/shm")?;
    let folder = File::open(place.path())?;
    Ok((folder.into(), Some(place)))
}

/// Creates a file. Its name comes from an image and must not lead out of the folder.
fn create(folder: &OwnedFd, name: &str) -> Result<File, Errno> {
    if name.contains('/') {
        return Err(Errno::INVAL);
    }
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
    let file = openat(folder, name, flags, Mode::RUSR | Mode::WUSR)?;
    Ok(file.into())
}
