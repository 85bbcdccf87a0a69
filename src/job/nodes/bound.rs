#![allow(
    unsafe_code,
    reason = "an ioctl that has no safe wrapper, and the descriptor it returns"
)]
//! Facts available only through a process's descriptors: the paths of its bound unix sockets, and unread data.
//!
//! `/proc/net/unix` contains the path that the process passed, which may be relative to a former working directory. The
//! socket refers to its file, so ckpt-run duplicates the socket for a moment.

use std::fs;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::libc;
use nix::sys::socket::{SockType, UnixAddr, getpeername, getsockname, getsockopt, sockopt};
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};

use super::has_name;

/// Ioctl that opens a bound socket's file (`linux/un.h`, Linux 4.10).
const SIOCUNIXFILE: libc::Ioctl = 0x89E0;

/// Access to the descriptors of a process.
///
/// A borrowed descriptor is a duplicate in this process, which is closed immediately after use.
pub(in crate::job) struct Borrower(OwnedFd);

impl Borrower {
    /// Opens a process. Returns `None` if the process (a host pid) has exited, or on Linux before 5.6.
    pub fn new(pid: i32) -> Option<Self> {
        let process = pidfd_open(Pid::from_raw(pid)?, PidfdFlags::empty());
        process.ok().map(Self)
    }

    /// Duplicates a descriptor.
    pub fn borrow(&self, number: RawFd) -> Option<OwnedFd> {
        pidfd_getfd(&self.0, number, PidfdGetfdFlags::empty()).ok()
    }

    /// Returns the number of unread bytes of a descriptor; `None` if it is unknown.
    pub fn unread(&self, number: RawFd) -> Option<u64> {
        rustix::io::ioctl_fionread(&self.borrow(number)?).ok()
    }

    /// Returns the file of the bound unix socket that a link in `/proc/PID/fd` refers to; `None` as in
    /// [`bound_path`](Self::bound_path).
    pub fn path_of(&self, link: &Path) -> Option<PathBuf> {
        self.bound_path(link.file_name()?.to_str()?.parse().ok()?)
    }

    /// Returns the file of a bound unix socket; `None` for other sockets, and if the file was removed.
    pub fn bound_path(&self, number: RawFd) -> Option<PathBuf> {
        match bound_file(&self.borrow(number)?)? {
            BoundFile::At { path, .. } | BoundFile::Moved { path, .. } => Some(path),
            BoundFile::Linked { .. } | BoundFile::Lost(_) => None,
        }
    }

    /// Returns the file of a unix socket that CRIU will bind again; `None` for other sockets, and for those that are
    /// connected to one.
    pub fn file_to_bind(&self, number: RawFd) -> Option<BoundFile> {
        let socket = self.borrow(number)?;
        let file = bound_file(&socket)?;
        let is_connected = getpeername::<UnixAddr>(socket.as_raw_fd()).is_ok();
        let is_datagram = || getsockopt(&socket, sockopt::SockType) == Ok(SockType::Datagram);
        (!is_connected || is_datagram()).then_some(file)
    }
}

/// File of a bound unix socket.
pub(in crate::job) enum BoundFile {
    /// The file at the name by which the socket was bound.
    At {
        /// Its path, without links.
        path: PathBuf,
        /// True if that differs from an absolute name.
        has_link: bool,
    },
    /// A renamed file.
    Moved {
        /// The name by which the socket was bound.
        name: PathBuf,
        /// Its present path.
        path: PathBuf,
    },
    /// A file with another name, which is not known.
    Linked {
        /// The name by which the socket was bound.
        name: PathBuf,
    },
    /// Name of a file that is not there. It is not known whether it has another name.
    Lost(PathBuf),
}

/// Returns the file of a bound unix socket; `None` for other sockets, and if the file was removed.
fn bound_file(socket: &OwnedFd) -> Option<BoundFile> {
    // The number of the ioctl has another meaning for sockets of other families.
    let address = getsockname::<UnixAddr>(socket.as_raw_fd()).ok()?;
    let name = address.path()?;
    // SAFETY: takes no argument, and `socket` is a unix socket that this process holds.
    let opened = unsafe { libc::ioctl(socket.as_raw_fd(), SIOCUNIXFILE) };
    let opened = match Errno::result(opened) {
        // Opening the file needs CAP_NET_ADMIN. Without it, only an absolute path is usable.
        Err(Errno::EPERM) if !name.is_absolute() => return None,
        Err(Errno::EPERM) => {
            let Ok(about) = fs::symlink_metadata(name) else {
                return Some(BoundFile::Lost(name.to_owned()));
            };
            let path = name.parent()?.canonicalize().ok()?.join(name.file_name()?);
            return about.file_type().is_socket().then(|| at(name, path));
        }
        opened => opened.ok()?,
    };
    // SAFETY: the kernel has opened this descriptor for this process alone.
    let file = unsafe { OwnedFd::from_raw_fd(opened) };
    let link = format!("/proc/self/fd/{}", file.as_raw_fd());
    let (path, metadata) = (fs::read_link(&link).ok()?, fs::metadata(&link).ok()?);
    let is_named = has_name(&metadata, &path);
    let name = name.to_owned();
    if metadata.nlink() > u64::from(is_named) {
        return Some(BoundFile::Linked { name });
    }
    is_named.then(|| {
        // CRIU compares relative names with the path.
        if name.is_absolute() && !has_name(&metadata, &name) {
            BoundFile::Moved { name, path }
        } else {
            at(&name, path)
        }
    })
}

fn at(name: &Path, path: PathBuf) -> BoundFile {
    let has_link = name.is_absolute() && name.as_os_str() != path.as_os_str();
    BoundFile::At { path, has_link }
}
