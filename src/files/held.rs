#![allow(unsafe_code, reason = "FICLONE has no safe interface")]
//! Files too large for an image, held in the store by a clone or a hard link while the job renames or removes them.
//!
//! A clone (FICLONE) shares the blocks, and later writes of the job do not affect it. If the file system does not
//! support clones, a hard link keeps a file that the job removes or replaces. A file that the job changes in place also
//! changes in the link, which its size and its time show.

use std::collections::HashSet;
use std::fs::{self, DirBuilder, File};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::fcntl::{AT_FDCWD, AtFlags};
use nix::libc;
use nix::unistd::linkat;

use super::file_set::{Content, KeptFile, modified_ns};

/// Name of the folder in the store.
const FOLDER: &str = "held";

nix::ioctl_write_int_bad!(ficlone, libc::FICLONE);

/// The folder of held files.
#[derive(Debug)]
pub struct Held {
    folder: PathBuf,
}

impl Held {
    /// Returns the folder in a store.
    #[must_use]
    pub fn of(store: &Path) -> Self {
        Self {
            folder: store.join(FOLDER),
        }
    }

    /// Returns the path of a held file. The name comes from an image.
    #[must_use]
    pub fn path(&self, name: &str) -> Option<PathBuf> {
        let mut parts = name.split('/');
        let is_number = |part: Option<&str>| {
            part.is_some_and(|part| {
                !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit())
            })
        };
        let is_ours = is_number(parts.next()) && is_number(parts.next()) && parts.next().is_none();
        is_ours.then(|| self.folder.join(name))
    }

    /// Returns true if the file is held and has this size and time.
    #[must_use]
    pub fn has(&self, name: &str, size: u64, modified: i64) -> bool {
        let found = self
            .path(name)
            .and_then(|path| path.symlink_metadata().ok());
        found.is_some_and(|found| {
            found.is_file() && found.size() == size && modified_ns(&found) == modified
        })
    }

    /// Removes files held by an earlier attempt at an image.
    pub fn clear(&self, image: u64) {
        let _ = fs::remove_dir_all(self.folder.join(image.to_string()));
    }

    /// Holds the open file for an image. Returns the place of its content.
    ///
    /// # Errors
    /// The store is on another file system.
    pub fn hold(
        &self,
        image: u64,
        number: usize,
        source: &File,
        file: &KeptFile,
    ) -> io::Result<Content> {
        let name = format!("{image}/{number}");
        let target = self.folder.join(&name);
        make_folder(&self.folder.join(image.to_string()))?;
        let is_clone = clone(source, &target, file).is_ok();
        if !is_clone {
            let _ = fs::remove_file(&target);
            linkat(
                AT_FDCWD,
                descriptor_path(source).as_path(),
                AT_FDCWD,
                &target,
                AtFlags::AT_SYMLINK_FOLLOW,
            )?;
        }
        Ok(Content::Held { name, is_clone })
    }

    /// Holds a file for an image that another image holds under the name `other`. Returns the place of the content.
    ///
    /// # Errors
    /// The other image's file does not exist any more.
    pub fn hold_again(
        &self,
        image: u64,
        number: usize,
        (other, is_clone): (&str, bool),
    ) -> io::Result<Content> {
        let name = format!("{image}/{number}");
        make_folder(&self.folder.join(image.to_string()))?;
        let source = self.path(other).ok_or(io::ErrorKind::InvalidData)?;
        fs::hard_link(source, self.folder.join(&name))?;
        Ok(Content::Held { name, is_clone })
    }

    /// Removes files held for images that are not among these.
    pub fn sweep(&self, images: &HashSet<u64>) {
        for entry in self.folder.read_dir().into_iter().flatten().flatten() {
            let name = entry.file_name();
            let number = name.to_str().and_then(|name| name.parse().ok());
            if number.is_some_and(|number| !images.contains(&number)) {
                let _ = fs::remove_dir_all(entry.path());
            }
        }
    }
}

fn make_folder(folder: &Path) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(0o700).create(folder)
}

/// Makes `target` a clone of an open file, with the same modification time.
fn clone(source: &File, target: &Path, file: &KeptFile) -> io::Result<()> {
    let target = File::options()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(target)?;
    clone_into(source, &target)?;
    let modified = std::time::UNIX_EPOCH
        + std::time::Duration::from_nanos(u64::try_from(file.modified_ns).unwrap_or(0));
    target.set_modified(modified)
}

/// Replaces the content of `target` by a clone of the content of `source`.
///
/// # Errors
/// The file system does not support clones, or the files are on different file systems.
pub(super) fn clone_into(source: &File, target: &File) -> io::Result<()> {
    // SAFETY: both descriptors are open for the time of the call.
    let done = unsafe { ficlone(target.as_raw_fd(), source.as_raw_fd()) };
    done.map(drop).map_err(Errno::into)
}

/// Returns a path that leads to an open file even if its name has changed.
fn descriptor_path(file: &File) -> PathBuf {
    format!("/proc/self/fd/{}", file.as_raw_fd()).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_held_file_survives_its_removal_and_shows_a_change() {
        let folder = tempfile::tempdir_in("/var/tmp").unwrap();
        let path = folder.path().join("big");
        fs::write(&path, "content").unwrap();
        let (held, about) = (Held::of(folder.path()), KeptFile::of(&path).unwrap());
        let name_of = |content: io::Result<Content>| match content.unwrap() {
            Content::Held { name, .. } => name,
            other => panic!("it is not held: {other:?}"),
        };
        let name = name_of(held.hold(3, 0, &File::open(&path).unwrap(), &about));
        let again = name_of(held.hold_again(4, 7, (&name, false)));
        fs::remove_file(&path).unwrap();
        held.sweep(&HashSet::from([4]));
        assert!(!held.has(&name, 7, about.modified_ns));
        assert!(held.has(&again, 7, about.modified_ns));
        fs::write(held.path(&again).unwrap(), "changed").unwrap();
        assert!(!held.has(&again, 7, about.modified_ns));
    }

    #[test]
    fn names_that_lead_elsewhere_are_refused() {
        let held = Held::of(Path::new("/store"));
        for name in ["", "1", "1/", "../1", "1/../2", "1/2/3", "/1"] {
            assert_eq!(held.path(name), None, "{name}");
        }
        assert_eq!(held.path("1/2"), Some("/store/held/1/2".into()));
    }
}
