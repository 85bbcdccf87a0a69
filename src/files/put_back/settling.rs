//! Owner, mode, attributes and times of what was put back: set through a descriptor, because the name may lead to another
//! file by now.

use std::fs::File;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use nix::fcntl::AT_FDCWD;
use nix::libc::{O_DIRECTORY, O_PATH};
use nix::sys::stat::{SFlag, UtimensatFlags, utimensat};
use nix::sys::time::TimeSpec;

use super::super::attributes;
use super::super::file_set::KeptFile;
use super::moving::is_of_others;
use crate::safe_path::{Spot, give, is_just_made, is_of_kind, link_to};

/// Makes a folder, if it is not there, and sets its owner, mode and attributes.
pub(super) fn put_back_folder(spot: &Spot, file: &KeptFile, is_there: bool) -> io::Result<()> {
    if !is_there {
        spot.make_folder()?;
    }
    let folder = spot.open_as_owner(File::options().read(true), O_DIRECTORY)?;
    settle_new(spot, &folder, file, (SFlag::S_IFDIR, is_there))
}

/// Makes a named pipe or the name of a socket, if it is not there, and sets its owner, mode, attributes and time.
pub(super) fn put_back_special(
    spot: &Spot,
    file: &KeptFile,
    kind: SFlag,
    is_there: bool,
) -> io::Result<()> {
    if !is_there {
        spot.make_special(kind)?;
    }
    let opened = spot.open(File::options().read(true), O_PATH)?;
    settle_new(spot, &opened, file, (kind, is_there))?;
    set_time(&opened, file)
}

/// Makes a symbolic link, and sets its owner and time.
pub(super) fn put_back_link(spot: &Spot, file: &KeptFile, target: &Path) -> io::Result<()> {
    spot.make_link(target)?;
    let link = spot.open(File::options().read(true), O_PATH)?;
    if !is_just_made(&link.metadata()?, SFlag::S_IFLNK, spot.user()) {
        return Err(is_of_others());
    }
    give(&link, file.owner, file.mode)?;
    set_time(&link, file)
}

/// Sets owner, mode and attributes of what was there, or was just made.
fn settle_new(
    spot: &Spot,
    opened: &File,
    file: &KeptFile,
    (kind, is_there): (SFlag, bool),
) -> io::Result<()> {
    let now = opened.metadata()?;
    let is_right = if is_there {
        is_of_kind(&now, kind) && now.uid() == file.owner.0 && !spot.is_lent(&now)?
    } else {
        is_just_made(&now, kind, spot.user())
    };
    if !is_right {
        return Err(is_of_others());
    }
    give(opened, file.owner, file.mode)?;
    attributes::set(opened, &file.attributes)
}

/// Refuses a file that another user can have put in the place of the job's file: its owner differs.
pub(super) fn not_of_others(spot: &Spot, opened: &File, file: &KeptFile) -> io::Result<()> {
    let now = opened.metadata()?;
    if !now.is_file() || now.uid() != file.owner.0 || spot.is_lent(&now)? {
        return Err(is_of_others());
    }
    Ok(())
}

/// Sets the time of what is open, also by `O_PATH`.
pub(super) fn set_time(opened: &File, file: &KeptFile) -> io::Result<()> {
    let (seconds, ns) = (
        file.modified_ns.div_euclid(1_000_000_000),
        file.modified_ns.rem_euclid(1_000_000_000),
    );
    let modified = TimeSpec::new(seconds, ns);
    let link = link_to(opened);
    Ok(utimensat(
        AT_FDCWD,
        &link,
        &TimeSpec::UTIME_OMIT,
        &modified,
        UtimensatFlags::FollowSymlink,
    )?)
}
