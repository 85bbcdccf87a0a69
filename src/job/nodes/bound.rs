#![allow(
    unsafe_code,
    reason = "an ioctl that has no safe wrapper, and the descriptor it returns"
)]
//! Facts available only through a process's descriptors: the paths of its bound unix sockets, and unread data.
//!
//! `/proc/net/unix` contains the path that the process passed, which may be relative to a former working directory. The
//! socket refers to its file, so ckpt-run duplicates the socket for a moment.

use std::ffi::OsStr;
use std::fs::{self, Metadata};
use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::libc;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{SockType, UnixAddr, getpeername, getsockname, getsockopt, sockopt};
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};

use super::has_name;
use super::moved_sockets::MovedSocket;

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
            BoundFile::At { path, .. } => Some(path),
            BoundFile::Moved(moved) => moved.paths.into_iter().next(),
            BoundFile::Elsewhere(_) | BoundFile::Removed(_) | BoundFile::Lost(_) => None,
        }
    }

    /// Returns the file of a unix socket that has a name, and how CRIU treats the name.
    pub fn named_socket(&self, number: RawFd) -> Option<(BoundFile, Use)> {
        let socket = self.borrow(number)?;
        let file = bound_file(&socket)?;
        let is_datagram = || getsockopt(&socket, sockopt::SockType) == Ok(SockType::Datagram);
        let usage = if getpeername::<UnixAddr>(socket.as_raw_fd()).is_err() {
            Use::Bound
        } else if is_datagram() {
            Use::BoundAndConnected
        } else if has_hung_up(&socket) {
            Use::HungUp
        } else {
            Use::Accepted
        };
        Some((file, usage))
    }
}

/// Use of a unix socket with a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::job) enum Use {
    /// CRIU binds it again.
    Bound,
    /// CRIU binds it again; it sends to another one.
    BoundAndConnected,
    /// A connection that has the name of the socket that accepted it.
    Accepted,
    /// Such a connection whose other end was closed.
    HungUp,
}

fn has_hung_up(socket: &OwnedFd) -> bool {
    let mut asked = [PollFd::new(socket.as_fd(), PollFlags::POLLIN)];
    let polled = poll(&mut asked, PollTimeout::ZERO);
    polled.is_ok()
        && asked[0]
            .revents()
            .is_some_and(|it| it.contains(PollFlags::POLLHUP))
}

/// File of a bound unix socket.
pub(in crate::job) enum BoundFile {
    /// The file at the name by which the socket was bound.
    At {
        /// Its path, without links.
        path: PathBuf,
        /// True if an absolute name differs from the path: it has a link, `..` or a double slash.
        is_indirect: bool,
    },
    /// A file that was renamed, or has other names by hard links.
    Moved(MovedSocket),
    /// The former name of a file with names that are not known, or that cannot be given to a restored one.
    Elsewhere(PathBuf),
    /// The former name of a removed file.
    Removed(PathBuf),
    /// Name of a file that is not there. It is not known whether it has another name.
    Lost(PathBuf),
}

/// Returns the file of a bound unix socket; `None` for other sockets.
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
            let about = match fs::symlink_metadata(name) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => {
                    return Some(BoundFile::Lost(name.to_owned()));
                }
                found => found.ok()?,
            };
            let path = name.parent()?.canonicalize().ok()?.join(name.file_name()?);
            let is_socket = about.file_type().is_socket();
            return is_socket.then(|| with_names(name, &path, &about, true));
        }
        opened => opened.ok()?,
    };
    // SAFETY: the kernel has opened this descriptor for this process alone.
    let file = unsafe { OwnedFd::from_raw_fd(opened) };
    let link = format!("/proc/self/fd/{}", file.as_raw_fd());
    let (path, metadata) = (fs::read_link(&link).ok()?, fs::metadata(&link).ok()?);
    let is_named = has_name(&metadata, &path);
    // CRIU binds a relative name in the folder that the file's path leads to.
    let is_there = if name.is_absolute() {
        has_name(&metadata, name)
    } else {
        is_named
    };
    if metadata.nlink() == 0 {
        return Some(BoundFile::Removed(name.to_owned()));
    }
    let path = without_mark(path, is_named);
    Some(with_names(name, &path, &metadata, is_there))
}

/// `path` is a name of the file, or its former one. `is_there`: `name` leads to the file.
fn with_names(name: &Path, path: &Path, metadata: &Metadata, is_there: bool) -> BoundFile {
    if metadata.nlink() == 1 && is_there {
        return BoundFile::At {
            is_indirect: name.is_absolute() && name.as_os_str() != path.as_os_str(),
            path: path.to_owned(),
        };
    }
    let moved = MovedSocket::find(name, path, metadata);
    moved.map_or_else(|| BoundFile::Elsewhere(name.to_owned()), BoundFile::Moved)
}

/// Returns the path of a file, without the kernel's mark if that name was removed.
fn without_mark(path: PathBuf, is_named: bool) -> PathBuf {
    let bytes = path.as_os_str().as_bytes();
    match bytes.strip_suffix(b" (deleted)").filter(|_| !is_named) {
        Some(former) => OsStr::from_bytes(former).into(),
        None => path,
    }
}
