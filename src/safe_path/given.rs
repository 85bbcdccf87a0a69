//! Owner and mode of what this process creates for a user without getting a descriptor: folders, named pipes, names of
//! sockets. Between its creation and this, another user may have put something else there.

use std::fs::{self, File, Metadata, Permissions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
use std::path::PathBuf;

use nix::sys::stat::SFlag;

/// Returns true if this can be what `maker` has just created: its kind, its owner, and no second name.
pub(crate) fn is_just_made(opened: &Metadata, kind: SFlag, maker: u32) -> bool {
    let has_one_name = opened.is_dir() || opened.nlink() == 1;
    is_of_kind(opened, kind) && has_one_name && opened.uid() == maker
}

/// Returns true if it is a file of this kind.
pub(crate) fn is_of_kind(opened: &Metadata, kind: SFlag) -> bool {
    SFlag::from_bits_truncate(opened.mode()) & SFlag::S_IFMT == kind
}

/// Sets owner and mode of what is open, also by `O_PATH`. The path may lead to another file by now. A symbolic link has no
/// mode.
///
/// # Errors
/// The kernel refuses.
pub(crate) fn give(opened: &File, owner: (u32, u32), mode: u32) -> io::Result<()> {
    let link = link_to(opened);
    chown(&link, Some(owner.0), Some(owner.1))?;
    if opened.metadata()?.is_symlink() {
        return Ok(());
    }
    fs::set_permissions(&link, Permissions::from_mode(mode))
}

/// Returns the kernel's link to what is open, also by `O_PATH`. Operations that follow it act on that, a symbolic link
/// included.
pub(crate) fn link_to(opened: &impl AsRawFd) -> PathBuf {
    format!("/proc/self/fd/{}", opened.as_raw_fd()).into()
}

#[cfg(test)]
mod tests {
    use super::*;
    use nix::libc::{O_NOFOLLOW, O_PATH};
    use nix::sys::stat::Mode;
    use nix::unistd::{geteuid, mkfifo};
    use std::os::unix::fs::{OpenOptionsExt, symlink};

    #[test]
    fn a_pipe_is_just_made_until_it_has_a_second_name() {
        let place = tempfile::tempdir().unwrap();
        let path = place.path().join("pipe");
        mkfifo(&path, Mode::S_IRUSR).unwrap();
        let us = geteuid().as_raw();
        let is_made = |kind, maker| is_just_made(&path.metadata().unwrap(), kind, maker);
        assert!(is_made(SFlag::S_IFIFO, us));
        assert!(!is_made(SFlag::S_IFSOCK, us) && !is_made(SFlag::S_IFIFO, us + 1));
        fs::hard_link(&path, place.path().join("second")).unwrap();
        assert!(!is_made(SFlag::S_IFIFO, us));
    }

    #[test]
    fn an_open_link_is_given_itself() {
        if !geteuid().is_root() {
            println!("SKIPPED: only root gives files away");
            return;
        }
        let place = tempfile::tempdir().unwrap();
        let (file, link) = (place.path().join("file"), place.path().join("link"));
        fs::write(&file, "").unwrap();
        symlink(&file, &link).unwrap();
        let mut options = File::options();
        let options = options.read(true).custom_flags(O_PATH | O_NOFOLLOW);
        give(&options.open(&link).unwrap(), (65_534, 65_533), 0o600).unwrap();
        let owner = |found: Metadata| (found.uid(), found.gid());
        assert_eq!(owner(link.symlink_metadata().unwrap()), (65_534, 65_533));
        assert_eq!(owner(file.metadata().unwrap()), (0, 0));
    }

    #[test]
    fn the_mode_goes_to_what_is_open_and_not_to_its_successor() {
        let place = tempfile::tempdir().unwrap();
        let path = place.path().join("pipe");
        mkfifo(&path, Mode::S_IRUSR).unwrap();
        let opened = File::options()
            .read(true)
            .custom_flags(O_PATH)
            .open(&path)
            .unwrap();
        fs::rename(&path, place.path().join("moved")).unwrap();
        mkfifo(&path, Mode::S_IRUSR).unwrap();
        let about = opened.metadata().unwrap();
        give(&opened, (about.uid(), about.gid()), 0o640).unwrap();
        assert_eq!(opened.metadata().unwrap().mode() & 0o777, 0o640);
        assert_eq!(path.metadata().unwrap().mode() & 0o777, 0o400);
    }
}
