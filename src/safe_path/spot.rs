//! Name in an open folder.

use std::fs::{self, File, Metadata, Permissions};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::fcntl::{AT_FDCWD, OFlag, OpenHow, ResolveFlag, openat2};
use nix::libc;
use nix::unistd::geteuid;

use super::way::{OTHERS_WRITE, Way, is_us};

/// Permissions of users other than the owner.
const OTHERS: u32 = 0o077;

/// Name in an open folder, unaffected by later changes of the path.
#[derive(Debug)]
pub(crate) struct Spot {
    parent: PathBuf,
    folder: OwnedFd,
    name: PathBuf,
}

impl Spot {
    /// Opens the folder of a path; [`Way::to`] describes the treatment of links.
    ///
    /// # Errors
    /// The folder does not exist, or another user may have created a link on the path (`ELOOP`).
    pub fn of(path: &Path) -> io::Result<Self> {
        let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else {
            return Err(io::ErrorKind::InvalidInput.into());
        };
        Ok(Self {
            folder: open_folder(parent)?,
            parent: parent.into(),
            name: name.into(),
        })
    }

    /// Returns the spot of another path. The folder is opened only if it differs.
    ///
    /// # Errors
    /// The same as [`Spot::of`].
    pub fn turned_to(self, path: &Path) -> io::Result<Self> {
        match path.file_name() {
            Some(name) if path.parent() == Some(&self.parent) => Ok(Self {
                name: name.into(),
                ..self
            }),
            _ => Self::of(path),
        }
    }

    /// Returns a path to the name through the open folder, by the kernel's link in /proc. The name itself may be a
    /// link, so operations on it must not follow links.
    pub fn path(&self) -> PathBuf {
        Path::new(&link_to(&self.folder)).join(&self.name)
    }

    /// Returns the status of the name; a link is not followed.
    ///
    /// # Errors
    /// The name does not exist.
    pub fn metadata(&self) -> io::Result<Metadata> {
        fs::symlink_metadata(self.path())
    }

    /// Opens the name, which must not be a link, without blocking; `flags` are added.
    ///
    /// # Errors
    /// The same as for `open`.
    pub fn open(&self, options: &mut fs::OpenOptions, flags: i32) -> io::Result<File> {
        options
            .custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK | flags)
            .open(self.path())
    }

    /// Same as [`Spot::open`], but if the file is this process's user's, its owner needs no permission. Its mode may change
    /// for a moment, so the job must not run.
    ///
    /// # Errors
    /// The same as for `open`.
    pub fn open_as_owner(&self, options: &mut fs::OpenOptions, flags: i32) -> io::Result<File> {
        let opened = self.open(options, flags);
        if !is_denied(&opened) {
            return opened;
        }
        let _folder = self.grant_folder();
        let file = File::options()
            .read(true)
            .custom_flags(libc::O_PATH | libc::O_NOFOLLOW)
            .open(self.path());
        let is_link = |file: &File| file.metadata().is_ok_and(|about| about.is_symlink());
        let file = file.ok().filter(|file| !is_link(file));
        let _file = file.and_then(|file| Granted::new(file.into(), 0o700));
        self.open(options, flags)
    }

    /// Lets this process's user change names in the folder, if it is the user's, as long as the result lives.
    pub fn grant_folder(&self) -> Option<Granted> {
        Granted::new(self.folder.try_clone().ok()?, 0o700)
    }

    /// Checks that a user's files may be created and removed in the folder. If another user can exchange the folder,
    /// the user must have that permission without the help of this process, so that a closed folder of root is refused.
    ///
    /// # Errors
    /// `PermissionDenied` if the user has no such permission.
    pub fn allows(&self, user: u32) -> io::Result<()> {
        let folder = self.about_folder()?;
        if is_us(user) || !is_closed(&folder) {
            return Ok(());
        }
        let way = Way::to(&self.parent)?;
        if way.is_ours() && way.identity() == (folder.dev(), folder.ino()) {
            return Ok(());
        }
        let message = "it is in a folder that the file's owner may not change and that another user may have put there";
        Err(io::Error::new(io::ErrorKind::PermissionDenied, message))
    }

    /// Returns true if only root and this process's user can enter the folder.
    ///
    /// # Errors
    /// The folder cannot be inspected.
    pub fn is_closed(&self) -> io::Result<bool> {
        let folder = self.about_folder()?;
        Ok(is_us(folder.uid()) && folder.mode() & OTHERS == 0)
    }

    fn about_folder(&self) -> io::Result<Metadata> {
        fs::metadata(link_to(&self.folder))
    }

    /// Returns true if another user may have hard-linked the file there without permission to write to it: the file has
    /// several names, and the folder belongs to another user than the file.
    ///
    /// # Errors
    /// The folder cannot be inspected.
    pub fn is_lent(&self, file: &Metadata) -> io::Result<bool> {
        let folder = self.about_folder()?;
        let is_theirs = !is_us(folder.uid()) && folder.uid() != file.uid();
        Ok(!file.is_dir() && file.nlink() > 1 && is_theirs)
    }
}

/// Permissions of an owner that were added, and are taken away by the drop.
#[derive(Debug)]
pub(crate) struct Granted {
    file: OwnedFd,
    before: Permissions,
}

impl Granted {
    /// Adds permissions to a file or folder of this process's user; `None` if it is not the user's or has them.
    fn new(file: OwnedFd, wanted: u32) -> Option<Self> {
        let about = fs::metadata(link_to(&file)).ok()?;
        let lacks = about.mode() & wanted != wanted && about.uid() == geteuid().as_raw();
        let before = lacks.then(|| about.permissions())?;
        let granted = Permissions::from_mode(before.mode() | wanted);
        fs::set_permissions(link_to(&file), granted).ok()?;
        Some(Self { file, before })
    }
}

impl Drop for Granted {
    fn drop(&mut self) {
        if let Err(error) = fs::set_permissions(link_to(&self.file), self.before.clone()) {
            tracing::warn!(%error, "cannot set the former permissions");
        }
    }
}

fn link_to(file: &OwnedFd) -> String {
    format!("/proc/self/fd/{}", file.as_raw_fd())
}

/// Returns true if permissions of the owner may be the cause. Root needs none.
pub(crate) fn is_denied<T>(result: &io::Result<T>) -> bool {
    let kind = result.as_ref().err().map(io::Error::kind);
    kind == Some(io::ErrorKind::PermissionDenied) && !geteuid().is_root()
}

/// Returns true for a folder in which only root and this process's user can change names.
fn is_closed(folder: &Metadata) -> bool {
    is_us(folder.uid()) && folder.mode() & OTHERS_WRITE == 0
}

/// Opens a folder for operations in it. The kernel finds out in one call that a path has no links, as most have none.
fn open_folder(folder: &Path) -> io::Result<OwnedFd> {
    let how = OpenHow::new()
        .flags(OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC)
        .resolve(ResolveFlag::RESOLVE_NO_SYMLINKS);
    match openat2(AT_FDCWD, folder, how) {
        // The path has a link, the kernel is older than Linux 5.6, or a seccomp filter refused the call.
        Err(Errno::ELOOP | Errno::ENOSYS | Errno::EPERM) => Way::to(folder).map(Way::into_folder),
        opened => Ok(opened?),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::symlink;

    #[test]
    fn a_folder_that_became_a_link_leads_nowhere_else() {
        let place = tempfile::tempdir().unwrap();
        let path = |name: &str| place.path().join(name);
        fs::create_dir(path("mine")).unwrap();
        fs::create_dir(path("theirs")).unwrap();
        fs::set_permissions(place.path(), Permissions::from_mode(0o777)).unwrap();
        fs::write(path("mine/file"), "mine").unwrap();
        fs::write(path("theirs/file"), "theirs").unwrap();
        let spot = Spot::of(&path("mine/file")).unwrap();
        fs::rename(path("mine"), path("moved")).unwrap();
        symlink("theirs", path("mine")).unwrap();
        let file = spot.open(File::options().read(true), 0).unwrap();
        assert_eq!(io::read_to_string(file).unwrap(), "mine");
        assert!(Spot::of(&path("mine/file")).is_err());
        symlink("file", path("theirs/link")).unwrap();
        let link = Spot::of(&path("theirs/link")).unwrap();
        assert!(link.open(File::options().read(true), 0).is_err());
        assert!(link.metadata().unwrap().is_symlink());
    }

    #[test]
    fn a_closed_folder_within_that_of_another_user_is_left_alone() {
        if !geteuid().is_root() {
            println!("SKIPPED: only root gives folders away");
            return;
        }
        let place = tempfile::tempdir().unwrap();
        let folder = place.path().join("closed");
        fs::create_dir(&folder).unwrap();
        let allows = |user| Spot::of(&folder.join("file")).unwrap().allows(user).is_ok();
        assert!(allows(0) && allows(65_534), "nobody can exchange it");
        std::os::unix::fs::chown(place.path(), Some(65_534), None).unwrap();
        assert!(allows(0) && !allows(65_534));
        fs::set_permissions(&folder, Permissions::from_mode(0o777)).unwrap();
        assert!(allows(65_534));
    }

    #[test]
    fn a_file_of_others_with_two_names_is_lent() {
        if !geteuid().is_root() {
            println!("SKIPPED: only root gives files away");
            return;
        }
        let place = tempfile::tempdir().unwrap();
        std::os::unix::fs::chown(place.path(), Some(65_534), None).unwrap();
        let spot = Spot::of(&place.path().join("file")).unwrap();
        fs::write(spot.path(), "").unwrap();
        let is_lent = || spot.is_lent(&spot.metadata().unwrap()).unwrap();
        assert!(!is_lent());
        fs::hard_link(spot.path(), place.path().join("other")).unwrap();
        assert!(is_lent());
        std::os::unix::fs::chown(spot.path(), Some(65_534), None).unwrap();
        assert!(!is_lent());
    }
}
