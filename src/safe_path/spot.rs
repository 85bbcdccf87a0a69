//! Name in an open folder.

use std::fs::{self, DirBuilder, File, Metadata, Permissions};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::fcntl::{AT_FDCWD, OFlag, OpenHow, ResolveFlag, openat2};
use nix::libc;
use nix::sys::stat::{Mode, SFlag, mknod};
use nix::unistd::geteuid;
use rustix::fs::{Access, AtFlags, accessat};

use super::actor::{Actor, JobUsers};
use super::given::link_to;
use super::way::{OTHERS_WRITE, STICKY, Way, is_us};

/// Permissions of users other than the owner.
const OTHERS: u32 = 0o077;

/// Name in an open folder, unaffected by later changes of the path.
#[derive(Debug)]
pub(crate) struct Spot {
    parent: PathBuf,
    folder: OwnedFd,
    name: PathBuf,
    actor: Actor,
}

impl Spot {
    /// Opens the folder of a path; [`Way::to`] describes the treatment of links.
    ///
    /// # Errors
    /// The folder does not exist, or another user may have created a link on the path (`ELOOP`).
    pub fn of(path: &Path) -> io::Result<Self> {
        let (parent, name) = split(path)?;
        Ok(Self {
            folder: open_folder(parent)?,
            parent: parent.into(),
            name: name.into(),
            actor: Actor::Us,
        })
    }

    /// Same as [`Spot::of`], for a file of this owner and a job with these users. If another user can exchange the file or
    /// its folder, everything is done with the rights of a user of the job.
    ///
    /// # Errors
    /// The same as [`Spot::of`], and `PermissionDenied` if that user may not enter the folder.
    pub fn of_job(path: &Path, owner: u32, users: &JobUsers) -> io::Result<Self> {
        let mut spots = users.actors(owner).map(|actor| {
            let (parent, name) = split(path)?;
            let way = Way::to_by(parent, &actor)?;
            let is_safe = way.is_safe_for(owner);
            Ok(Self {
                folder: way.into_folder(),
                parent: parent.into(),
                name: name.into(),
                actor: if is_safe { Actor::Us } else { actor },
            })
        });
        let Some(first) = spots.next() else {
            return Self::of(path);
        };
        let may = |spot: &io::Result<Self>| spot.as_ref().is_ok_and(|it| it.allows(owner).is_ok());
        if may(&first) {
            return first;
        }
        // Another user of the job may have made the folder.
        spots.find(may).unwrap_or(first)
    }

    /// Returns the id of the user with whose rights operations are done.
    pub fn user(&self) -> u32 {
        self.actor.user()
    }

    /// Returns true if operations are done with the rights of another user than this process's.
    pub fn is_for_other(&self) -> bool {
        matches!(self.actor, Actor::Other(_))
    }

    /// Refuses to make a file of this owner if the actor is another user: until it gets its owner, the actor could open it, and
    /// change it afterwards.
    ///
    /// # Errors
    /// `PermissionDenied`.
    pub fn may_make_for(&self, owner: u32) -> io::Result<()> {
        if !self.is_for_other() || self.user() == owner {
            return Ok(());
        }
        let message = "its owner is no user of the job, and another user can change its folder";
        Err(io::Error::new(io::ErrorKind::PermissionDenied, message))
    }

    /// Acts on the name, again if the actor may not change names in the folder but owns it.
    ///
    /// # Errors
    /// The errors of the action.
    pub fn in_folder<T>(&self, mut act: impl FnMut() -> io::Result<T>) -> io::Result<T> {
        let done = act();
        if !self.is_denied(&done) {
            return done;
        }
        match self.grant_folder() {
            Some(_granted) => act(),
            None => done,
        }
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
    /// link, so operations on it must not follow links. They are done with this process's rights.
    pub fn path(&self) -> PathBuf {
        link_to(&self.folder).join(&self.name)
    }

    /// Does something with the rights of the actor.
    fn by_actor<T>(&self, what: impl FnOnce(PathBuf) -> io::Result<T>) -> io::Result<T> {
        let _acting = self.actor.act()?;
        what(self.path())
    }

    /// Returns the status of the name; a link is not followed.
    ///
    /// # Errors
    /// The name does not exist.
    pub fn metadata(&self) -> io::Result<Metadata> {
        self.by_actor(fs::symlink_metadata)
    }

    /// Opens the name, which must not be a link, without blocking; `flags` are added.
    ///
    /// # Errors
    /// The same as for `open`.
    pub fn open(&self, options: &mut fs::OpenOptions, flags: i32) -> io::Result<File> {
        let options = options.custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK | flags);
        self.by_actor(|path| options.open(path))
    }

    /// Same as [`Spot::open`], to read. A job's user needs no permission for the user's own file.
    ///
    /// # Errors
    /// The same as for `open`.
    pub fn open_to_read(&self, flags: i32) -> io::Result<File> {
        let opened = self.open(File::options().read(true), flags);
        if !self.is_for_other() || !self.is_denied(&opened) {
            return opened;
        }
        // Only the owner may open a file without a change of its access time.
        let changing = self.open(File::options().read(true), flags & !libc::O_NOATIME);
        if !self.is_denied(&changing) {
            return changing;
        }
        self.open_own(File::options().read(true), flags)
    }

    /// Opens a file of the actor with this process's rights.
    fn open_own(&self, options: &mut fs::OpenOptions, flags: i32) -> io::Result<File> {
        let mut path = File::options();
        let path = path
            .read(true)
            .custom_flags(libc::O_PATH | libc::O_NOFOLLOW);
        let found = if self.about_folder()?.uid() == self.user() {
            // The actor could permit it.
            path.open(self.path())?
        } else {
            self.by_actor(|name| path.open(name))?
        };
        let about = found.metadata()?;
        if about.is_symlink() || about.uid() != self.user() {
            return Err(io::ErrorKind::PermissionDenied.into());
        }
        // It is that file, whatever its name leads to by now.
        let options = options.custom_flags(libc::O_NONBLOCK | flags);
        options.open(link_to(&found))
    }

    /// Same as [`Spot::open`], but if the file is the actor's, its owner needs no permission. The mode of the file or its
    /// folder may change for a moment, so the job must not run.
    ///
    /// # Errors
    /// The same as for `open`.
    pub fn open_as_owner(&self, options: &mut fs::OpenOptions, flags: i32) -> io::Result<File> {
        let opened = self.open(options, flags);
        if !self.is_denied(&opened) {
            return opened;
        }
        let _folder = self.grant_folder();
        let file = self.open(File::options().read(true), libc::O_PATH);
        let Ok(file) = file else {
            return self.open(options, flags);
        };
        if self.is_for_other() {
            return self.open_own(options, flags);
        }
        let is_link = file.metadata()?.is_symlink();
        let _file = (!is_link).then(|| Granted::new(file.into(), self.user()));
        self.open(options, flags)
    }

    /// Lets the actor change names in the folder, if it is the actor's, as long as the result lives.
    fn grant_folder(&self) -> Option<Granted> {
        Granted::new(self.folder.try_clone().ok()?, self.user())
    }

    /// Returns true if permissions of the owner may be the cause. Root needs none.
    fn is_denied<T>(&self, result: &io::Result<T>) -> bool {
        let kind = result.as_ref().err().map(io::Error::kind);
        kind == Some(io::ErrorKind::PermissionDenied) && self.actor.needs_permission()
    }

    /// Makes a folder that is closed to others.
    ///
    /// # Errors
    /// The same as for `mkdir`.
    pub fn make_folder(&self) -> io::Result<()> {
        self.by_actor(|path| DirBuilder::new().mode(0o700).create(path))
    }

    /// Makes a named pipe, or the name of a socket, that is closed to others.
    ///
    /// # Errors
    /// The same as for `mknod`.
    pub fn make_special(&self, kind: SFlag) -> io::Result<()> {
        self.by_actor(|path| Ok(mknod(&path, kind, Mode::S_IRUSR | Mode::S_IWUSR, 0)?))
    }

    /// Makes a symbolic link.
    ///
    /// # Errors
    /// The same as for `symlink`.
    pub fn make_link(&self, target: &Path) -> io::Result<()> {
        self.by_actor(|path| symlink(target, path))
    }

    /// Removes the name of a file.
    ///
    /// # Errors
    /// The same as for `unlink`.
    pub fn remove_file(&self) -> io::Result<()> {
        self.by_actor(fs::remove_file)
    }

    /// Removes an empty folder.
    ///
    /// # Errors
    /// The same as for `rmdir`.
    pub fn remove_folder(&self) -> io::Result<()> {
        self.by_actor(fs::remove_dir)
    }

    /// Gives the file another name in place of this one.
    ///
    /// # Errors
    /// The same as for `rename`.
    pub fn rename_to(&self, target: &Self) -> io::Result<()> {
        self.with(target, fs::rename)
    }

    /// Gives the file a second name.
    ///
    /// # Errors
    /// The same as for `link`.
    pub fn link_to(&self, target: &Self) -> io::Result<()> {
        self.with(target, fs::hard_link)
    }

    /// Does something with two names, with the lesser rights.
    fn with(
        &self,
        target: &Self,
        what: impl FnOnce(PathBuf, PathBuf) -> io::Result<()>,
    ) -> io::Result<()> {
        match self.actor {
            Actor::Us => target.by_actor(|path| what(self.path(), path)),
            Actor::Other(_) => self.by_actor(|path| what(path, target.path())),
        }
    }

    /// Checks that a user's files may be created and removed in the folder. If another user can exchange the folder,
    /// the user must have that permission without the help of this process, so that a closed folder of root is refused.
    ///
    /// # Errors
    /// `PermissionDenied` if the user has no such permission.
    pub fn allows(&self, user: u32) -> io::Result<()> {
        let folder = self.about_folder()?;
        let is_allowed = match self.actor {
            Actor::Us if is_us(user) || !is_closed(&folder) => true,
            Actor::Us => {
                let way = Way::to(&self.parent)?;
                way.is_ours() && way.identity() == (folder.dev(), folder.ino())
            }
            Actor::Other(_) => self.actor_may_change(user, &folder)?,
        };
        if is_allowed {
            return Ok(());
        }
        let message = "it is in a folder that the file's owner may not change and that another user may have put there";
        Err(io::Error::new(io::ErrorKind::PermissionDenied, message))
    }

    /// Returns true if the actor may create and remove names of files of this owner in the folder, or may permit it.
    fn actor_may_change(&self, owner: u32, folder: &Metadata) -> io::Result<bool> {
        let user = self.user();
        let is_own_or_free = folder.mode() & STICKY == 0 || [owner, folder.uid()].contains(&user);
        if !is_own_or_free {
            return Ok(false);
        }
        let wanted = Access::WRITE_OK | Access::EXEC_OK;
        // With this second flag, nothing stands in for the kernel's check, which regards the rights of this thread.
        let flags = AtFlags::EACCESS | AtFlags::SYMLINK_NOFOLLOW;
        let _acting = self.actor.act()?;
        let allowed = accessat(&self.folder, c".", wanted, flags).is_ok();
        Ok(allowed || folder.uid() == user)
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
    /// Adds the owner's permissions to a file or folder of this user; `None` if it is not the user's or has them.
    fn new(file: OwnedFd, user: u32) -> Option<Self> {
        let wanted = 0o700;
        let about = fs::metadata(link_to(&file)).ok()?;
        let lacks = about.mode() & wanted != wanted && about.uid() == user;
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

/// Splits a path into folder and name.
fn split(path: &Path) -> io::Result<(&Path, &Path)> {
    let name = path.file_name().map(Path::new);
    path.parent()
        .zip(name)
        .ok_or_else(|| io::ErrorKind::InvalidInput.into())
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
