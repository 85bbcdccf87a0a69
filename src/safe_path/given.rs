//! Owner and mode of what this process creates for a user without getting a descriptor: folders, named pipes, names of
//! sockets. Between its creation and this, another user may have put something else there.

use std::fs::{self, File, Metadata, Permissions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};

use nix::sys::stat::SFlag;
use nix::unistd::geteuid;

/// Returns true if this can be what this process has just created: its kind, its owner, and no second name.
pub(crate) fn is_just_made(opened: &Metadata, kind: SFlag) -> bool {
    let has_one_name = opened.is_dir() || opened.nlink() == 1;
    is_of_kind(opened, kind) && has_one_name && opened.uid() == geteuid().as_raw()
}

/// Returns true if it is a file of this kind.
pub(crate) fn is_of_kind(opened: &Metadata, kind: SFlag) -> bool {
    SFlag::from_bits_truncate(opened.mode()) & SFlag::S_IFMT == kind
}

/// Sets owner and mode of what is open, also by `O_PATH`. The path may lead to another file by now.
///
/// # Errors
/// The kernel refuses.
pub(crate) fn give(opened: &File, owner: (u32, u32), mode: u32) -> io::Result<()> {
    let link = format!("/proc/self/fd/{}", opened.as_raw_fd());
    chown(&link, Some(owner.0), Some(owner.1))?;
    fs::set_permissions(&link, Permissions::from_mode(mode))
}

#[cfg(test)]
mod tests {
    use super::*;
    use nix::libc::O_PATH;
    use nix::sys::stat::Mode;
    use nix::unistd::mkfifo;
    use std::os::unix::fs::OpenOptionsExt;

    #[test]
    fn a_pipe_is_just_made_until_it_has_a_second_name() {
        let place = tempfile::tempdir().unwrap();
        let path = place.path().join("pipe");
        mkfifo(&path, Mode::S_IRUSR).unwrap();
        assert!(is_just_made(&path.metadata().unwrap(), SFlag::S_IFIFO));
        assert!(!is_just_made(&path.metadata().unwrap(), SFlag::S_IFSOCK));
        fs::hard_link(&path, place.path().join("second")).unwrap();
        assert!(!is_just_made(&path.metadata().unwrap(), SFlag::S_IFIFO));
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
