//! Copy of the working folder: content with its holes, links, modes, owners, attributes and times.

use std::collections::HashMap;
use std::fs::{self, DirBuilder, File, Metadata, OpenOptions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, FileTypeExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use nix::sys::stat::{Mode, SFlag, UtimensatFlags, mknod, utimensat};
use nix::sys::time::TimeSpec;
use rustix::fs::{XattrFlags, lgetxattr, llistxattr, lsetxattr};

use crate::sparse_file::{allocated_bytes, copy_data};

/// Maximum size of a folder to copy: a copy takes some seconds, and there are three.
pub(super) const COPY_BYTES_MAX: u64 = 1 << 30;
/// Maximum number of files in a folder to copy, for the same reason.
pub(super) const COPY_FILES_MAX: usize = 20_000;
/// Longest list and longest value of extended attributes (`XATTR_LIST_MAX`, `XATTR_SIZE_MAX`).
const ATTRIBUTE_BYTES_MAX: usize = 64 << 10;

/// Size of a folder; counting stops at the limits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Size {
    /// Allocated bytes.
    pub bytes: u64,
    /// Files, folders and links.
    pub files: usize,
}

impl Size {
    pub(super) fn is_small(self) -> bool {
        self.bytes <= COPY_BYTES_MAX && self.files <= COPY_FILES_MAX
    }
}

/// Measures a folder without the paths that `is_excluded` selects.
pub(super) fn measure(folder: &Path, is_excluded: &dyn Fn(&Path) -> bool) -> io::Result<Size> {
    let mut size = Size::default();
    let mut folders = vec![folder.to_owned()];
    while let Some(next) = folders.pop() {
        for path in entries(&next, is_excluded)? {
            let found = fs::symlink_metadata(&path)?;
            size.files += 1;
            size.bytes += allocated_bytes(&found);
            if !size.is_small() {
                return Ok(size);
            }
            if found.is_dir() {
                folders.push(path);
            }
        }
    }
    Ok(size)
}

/// Copies the folder `from` to the new folder `to`, without sockets and without the paths that `is_excluded` selects.
pub(super) fn copy_folder(
    from: &Path,
    to: &Path,
    is_excluded: &dyn Fn(&Path) -> bool,
) -> io::Result<()> {
    let mut copier = Copier {
        is_excluded,
        linked: HashMap::new(),
    };
    copier.folder(from, to, &fs::symlink_metadata(from)?)
}

/// Lists a folder, in the order of names.
pub(super) fn entries(
    folder: &Path,
    is_excluded: &dyn Fn(&Path) -> bool,
) -> io::Result<Vec<PathBuf>> {
    let mut paths = Vec::new();
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        if !is_excluded(&path) {
            paths.push(path);
        }
    }
    paths.sort();
    Ok(paths)
}

struct Copier<'a> {
    is_excluded: &'a dyn Fn(&Path) -> bool,
    /// Copies of files with several hard links, by device and inode.
    linked: HashMap<(u64, u64), PathBuf>,
}

impl Copier<'_> {
    fn folder(&mut self, from: &Path, to: &Path, about: &Metadata) -> io::Result<()> {
        // Other users must not enter a copy before it has the mode of the original.
        DirBuilder::new().mode(0o700).create(to)?;
        for path in entries(from, self.is_excluded)? {
            let target = to.join(path.file_name().unwrap_or_default());
            self.entry(&path, &target)?;
        }
        // This comes last: creating entries changes a folder's times, and the folder may be read-only.
        adopt(from, to, about)
    }

    fn entry(&mut self, from: &Path, to: &Path) -> io::Result<()> {
        let about = fs::symlink_metadata(from)?;
        let kind = about.file_type();
        if kind.is_dir() {
            return self.folder(from, to, &about);
        }
        if kind.is_socket() {
            return Ok(());
        }
        if about.nlink() > 1 {
            let identity = (about.dev(), about.ino());
            if let Some(first) = self.linked.get(&identity) {
                return fs::hard_link(first, to);
            }
            self.linked.insert(identity, to.to_owned());
        }
        if kind.is_file() {
            copy_content(from, to, about.len())?;
        } else if kind.is_symlink() {
            std::os::unix::fs::symlink(fs::read_link(from)?, to)?;
        } else {
            let flag = SFlag::from_bits_truncate(about.mode());
            mknod(to, flag & SFlag::S_IFMT, Mode::S_IRWXU, about.rdev())?;
        }
        adopt(from, to, &about)
    }
}

/// Copies the data around the holes.
fn copy_content(from: &Path, to: &Path, length: u64) -> io::Result<()> {
    let target = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(to)?;
    copy_data(&File::open(from)?, 0..length, &target, 0)
}

/// Sets the owner, mode, attributes and times of the original on the copy.
fn adopt(from: &Path, to: &Path, about: &Metadata) -> io::Result<()> {
    match std::os::unix::fs::lchown(to, Some(about.uid()), Some(about.gid())) {
        // An owner without a number in this user namespace: the copy belongs to the user.
        Err(error) if error.raw_os_error() == Some(nix::libc::EINVAL) => {}
        result => result?,
    }
    if !about.is_symlink() {
        fs::set_permissions(to, fs::Permissions::from_mode(about.mode() & 0o7777))?;
    }
    copy_attributes(from, to)?;
    let accessed = TimeSpec::new(about.atime(), about.atime_nsec());
    let modified = TimeSpec::new(about.mtime(), about.mtime_nsec());
    let flag = UtimensatFlags::NoFollowSymlink;
    utimensat(nix::fcntl::AT_FDCWD, to, &accessed, &modified, flag)?;
    Ok(())
}

/// Copies the extended attributes that belong to a file's content.
fn copy_attributes(from: &Path, to: &Path) -> io::Result<()> {
    const KEPT: [&[u8]; 3] = [b"user.", b"system.posix_acl_", b"security.capability"];
    let mut none: [u8; 0] = [];
    if !matches!(llistxattr(from, &mut none), Ok(1..)) {
        return Ok(());
    }
    let mut list = vec![0; ATTRIBUTE_BYTES_MAX];
    let len = llistxattr(from, &mut list)?;
    let mut value = vec![0; ATTRIBUTE_BYTES_MAX];
    for name in list[..len].split(|byte| *byte == 0) {
        if KEPT.iter().any(|prefix| name.starts_with(prefix)) {
            let len = lgetxattr(from, name, &mut value)?;
            lsetxattr(to, name, &value[..len], XattrFlags::empty())?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::FileExt;

    #[test]
    fn a_copy_keeps_holes_links_modes_and_times() {
        let place = tempfile::tempdir().unwrap();
        let (from, to) = (place.path().join("from"), place.path().join("to"));
        fs::create_dir_all(from.join("sub/deep")).unwrap();
        fs::create_dir_all(from.join("store/images")).unwrap();
        fs::write(from.join("sub/deep/a"), "text").unwrap();
        fs::hard_link(from.join("sub/deep/a"), from.join("b")).unwrap();
        std::os::unix::fs::symlink("../nowhere", from.join("link")).unwrap();
        let sparse = File::create(from.join("sparse")).unwrap();
        sparse.write_all_at(b"end", 64 << 20).unwrap();
        fs::set_permissions(from.join("b"), fs::Permissions::from_mode(0o640)).unwrap();
        mknod(&from.join("pipe"), SFlag::S_IFIFO, Mode::S_IRWXU, 0).unwrap();
        let store = from.join("store");
        let is_excluded = |path: &Path| path == store;
        assert!(measure(&from, &is_excluded).unwrap().bytes < 1 << 20);
        copy_folder(&from, &to, &is_excluded).unwrap();

        assert!(!to.join("store").exists());
        assert_eq!(fs::read(to.join("b")).unwrap(), b"text");
        let about = |path: &str| fs::symlink_metadata(to.join(path)).unwrap();
        assert_eq!(about("b").ino(), about("sub/deep/a").ino());
        assert_eq!(about("b").mode() & 0o7777, 0o640);
        let original = fs::symlink_metadata(from.join("b")).unwrap();
        assert_eq!(about("b").mtime_nsec(), original.mtime_nsec());
        assert_eq!(
            fs::read_link(to.join("link")).unwrap(),
            Path::new("../nowhere")
        );
        assert_eq!(about("sparse").len(), (64 << 20) + 3);
        assert!(allocated_bytes(&about("sparse")) < 1 << 20);
        assert!(about("pipe").file_type().is_fifo());
    }
}
