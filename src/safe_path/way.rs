//! Folders on the path to a file: the users who can change them, and links among them.

use std::collections::VecDeque;
use std::ffi::OsString;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStringExt;
use std::path::{Component, Path, PathBuf};

use nix::errno::Errno;
use nix::fcntl::{AtFlags, OFlag, open, openat, readlinkat};
use nix::sys::stat::{FileStat, Mode, SFlag, fstat, fstatat};
use nix::unistd::geteuid;

use super::actor::Actor;

/// Limit on symbolic links in one path, equal to the kernel's.
const LINKS_MAX: usize = 40;
/// Permission to write for other users than the owner.
pub(super) const OTHERS_WRITE: u32 = 0o022;
/// Sticky bit: users cannot rename or remove entries of others in such a folder.
pub(super) const STICKY: u32 = 0o1000;

/// Open folder, with facts about its path.
#[derive(Debug)]
pub(crate) struct Way {
    folder: OwnedFd,
    about: FileStat,
    /// True if only root and this process's user can change the folders on the path.
    is_ours: bool,
    /// True if the path has a symbolic link.
    has_link: bool,
}

impl Way {
    /// Opens a folder, component by component. A link is followed if only root and this process's user can have created
    /// it.
    ///
    /// # Errors
    /// `ELOOP` for any other link; the errors of `openat`.
    pub fn to(folder: &Path) -> io::Result<Self> {
        Self::to_by(folder, &Actor::Us)
    }

    /// Same as [`Way::to`], with the rights of a user from the first folder on that others can exchange.
    pub(super) fn to_by(folder: &Path, actor: &Actor) -> io::Result<Self> {
        let mut acting = None;
        let mut left = components(folder);
        let root = open("/", FOLDER, Mode::empty())?;
        let mut way = Self {
            about: fstat(&root)?,
            folder: root,
            is_ours: true,
            has_link: false,
        };
        let mut links = 0;
        while let Some(name) = left.pop_front() {
            let found = fstatat(&way.folder, name.as_os_str(), AtFlags::AT_SYMLINK_NOFOLLOW)?;
            let is_ours = way.keeps(Some(&found));
            if kind(&found) == SFlag::S_IFLNK {
                links += 1;
                if !is_ours || links > LINKS_MAX {
                    return Err(Errno::ELOOP.into());
                }
                let target = PathBuf::from(readlinkat(&way.folder, name.as_os_str())?);
                if target.is_absolute() {
                    let root = open("/", FOLDER, Mode::empty())?;
                    way.about = fstat(&root)?;
                    way.folder = root;
                }
                for part in components(&target).into_iter().rev() {
                    left.push_front(part);
                }
                way.has_link = true;
                continue;
            }
            if !is_ours && acting.is_none() {
                acting = actor.act()?;
            }
            let next = openat(&way.folder, name.as_os_str(), FOLDER, Mode::empty());
            // The component was replaced by a link just now.
            way.folder = next.map_err(|errno| match errno {
                Errno::ENOTDIR if kind(&found) == SFlag::S_IFDIR => Errno::ELOOP,
                errno => errno,
            })?;
            way.is_ours = is_ours;
            way.about = fstat(&way.folder)?;
        }
        Ok(way)
    }

    /// Returns true if only root and this process's user can change the target of the name.
    pub fn is_ours_to(&self, name: &Path) -> bool {
        let found = fstatat(&self.folder, name, AtFlags::AT_SYMLINK_NOFOLLOW).ok();
        self.keeps(found.as_ref())
    }

    /// Returns true if only root and this process's user can change the target of the folder's path.
    pub(super) fn is_ours(&self) -> bool {
        self.is_ours
    }

    /// Returns true if no other user can exchange a file of this owner in the folder, or a name that is free.
    pub(super) fn is_safe_for(&self, owner: u32) -> bool {
        let is_sticky = self.about.st_mode & STICKY != 0;
        let is_closed = self.about.st_mode & OTHERS_WRITE == 0;
        self.is_ours && is_us(self.about.st_uid) && (is_closed || is_sticky && is_us(owner))
    }

    /// Returns device and inode of the folder.
    pub(super) fn identity(&self) -> (u64, u64) {
        (self.about.st_dev, self.about.st_ino)
    }

    /// Returns true if the path has a symbolic link.
    pub fn has_link(&self) -> bool {
        self.has_link
    }

    /// Returns the folder.
    pub fn into_folder(self) -> OwnedFd {
        self.folder
    }

    /// Returns true if no other user can rename or replace an entry of the folder; `None` if the entry does not exist.
    fn keeps(&self, entry: Option<&FileStat>) -> bool {
        let is_closed = self.about.st_mode & OTHERS_WRITE == 0;
        let is_kept =
            self.about.st_mode & STICKY != 0 && entry.is_some_and(|entry| is_us(entry.st_uid));
        self.is_ours && is_us(self.about.st_uid) && (is_closed || is_kept)
    }
}

const FOLDER: OFlag = OFlag::O_PATH
    .union(OFlag::O_DIRECTORY)
    .union(OFlag::O_NOFOLLOW)
    .union(OFlag::O_CLOEXEC);

pub(super) fn is_us(user: u32) -> bool {
    user == 0 || user == geteuid().as_raw()
}

fn kind(found: &FileStat) -> SFlag {
    SFlag::from_bits_truncate(found.st_mode) & SFlag::S_IFMT
}

fn components(path: &Path) -> VecDeque<OsString> {
    let names = path.components().filter_map(|component| match component {
        Component::Normal(name) => Some(name.to_owned()),
        // The parent folder is opened like any other.
        Component::ParentDir => Some(OsString::from_vec(b"..".to_vec())),
        Component::RootDir | Component::CurDir | Component::Prefix(_) => None,
    });
    names.collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::{self, Permissions};
    use std::os::unix::fs::{PermissionsExt, symlink};

    #[test]
    fn links_are_followed_if_only_trusted_users_create_them() {
        let place = tempfile::tempdir().unwrap();
        let (folder, real) = (place.path().join("folder"), place.path().join("real"));
        fs::create_dir_all(folder.join("in")).unwrap();
        fs::create_dir(&real).unwrap();
        symlink("../real", folder.join("link")).unwrap();
        symlink(&real, folder.join("in/far")).unwrap();
        for link in ["link", "in/far", "link/../folder/link"] {
            let way = Way::to(&folder.join(link)).unwrap();
            assert!(way.is_ours && way.has_link(), "{link}");
        }
        let plain = Way::to(&folder).unwrap();
        assert!(plain.is_ours_to(Path::new("any")) && !plain.has_link());
        fs::set_permissions(&folder, Permissions::from_mode(0o777)).unwrap();
        for link in ["link", "in/far"] {
            let refused = Way::to(&folder.join(link)).unwrap_err();
            assert_eq!(refused.raw_os_error(), Some(nix::libc::ELOOP), "{link}");
        }
        let open = Way::to(&folder).unwrap();
        assert!(!open.is_ours_to(Path::new("any")) && !open.is_ours_to(Path::new("in")));
        // In a folder like /tmp, own entries are safe.
        fs::set_permissions(&folder, Permissions::from_mode(0o1777)).unwrap();
        let shared = Way::to(&folder).unwrap();
        assert!(shared.is_ours_to(Path::new("in")) && !shared.is_ours_to(Path::new("any")));
        assert!(Way::to(&folder.join("in/far")).is_ok());
    }
}
