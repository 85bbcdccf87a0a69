#![allow(
    unsafe_code,
    reason = "a system call without a safe wrapper, and the descriptor it returns"
)]
//! Watches of files (inotify, fanotify) that a restore would lose in part, or that would hold up a snapshot.
//!
//! CRIU (4.2.1) drops unread events, and a program that waits for one of them waits forever. CRIU finds a watched file
//! by its path or its handle. It does not find a symbolic link that is watched itself (`IN_DONT_FOLLOW`): the dump
//! succeeds, and the restore fails.
//!
//! A job that decides about opens of files (fanotify) cannot do that while it is frozen.

use std::fs::{self, File};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::libc;
use procfs::process::Process as ProcessEntry;

use super::{Finding, Obstacle};
use crate::job::descriptors::{Descriptor, Descriptors};
use crate::job::nodes::Borrower;

/// Kernel names of the descriptors.
const KINDS: [&str; 2] = ["inotify", "fanotify"];
/// Largest size of a handle (`MAX_HANDLE_SZ`).
const HANDLE_BYTES_MAX: usize = 128;

impl Descriptors {
    /// Returns true if the process watches files: it may receive events of other programs that read them.
    pub(crate) fn watch_files(&self) -> bool {
        self.watching().next().is_some()
    }

    fn watching(&self) -> impl Iterator<Item = &Descriptor> {
        let all = self.all.iter();
        all.filter(|one| KINDS.iter().any(|kind| one.is_kernels(kind)))
    }
}

/// Searches for the first watch that a restore would lose in part.
pub(super) fn find(open: &[Descriptors]) -> Option<Obstacle> {
    open.iter().find_map(|of| {
        let mut watching = of.watching();
        let finding = watching.find_map(|one| lost(of.process.host_pid, one))?;
        Some(Obstacle::of(&of.process, finding))
    })
}

/// Returns the problem with the watches of a descriptor, if there is one.
fn lost(pid: i32, descriptor: &Descriptor) -> Option<Finding> {
    let number = descriptor.number;
    if Borrower::new(pid).and_then(|it| it.unread(number)) > Some(0) {
        return Some(Finding::Events(number));
    }
    descriptor.info().lines().find_map(|line| {
        if is_for_one_event(line) {
            return Some(Finding::WatchedOnce(number));
        }
        if decides(line) {
            return Some(Finding::AsksForFiles);
        }
        Watched::parse(line)?.link(pid).map(Finding::WatchedLink)
    })
}

/// Returns true for a watch of `/proc/PID/fdinfo/FD` that ends with its first event.
fn is_for_one_event(line: &str) -> bool {
    line.starts_with("inotify ") && mask(line) & u64::from(libc::IN_ONESHOT) != 0
}

/// Returns true for a mark of `/proc/PID/fdinfo/FD` that asks for permission.
fn decides(line: &str) -> bool {
    let asks = libc::FAN_OPEN_PERM | libc::FAN_ACCESS_PERM | libc::FAN_OPEN_EXEC_PERM;
    line.starts_with("fanotify ") && mask(line) & asks != 0
}

/// Returns the events of a watch or mark.
fn mask(line: &str) -> u64 {
    let mut words = line.split_whitespace();
    let mask = words.find_map(|word| word.strip_prefix("mask:"));
    mask.and_then(|mask| u64::from_str_radix(mask, 16).ok())
        .unwrap_or(0)
}

/// The file of an inotify watch.
#[derive(Debug, PartialEq, Eq)]
struct Watched {
    /// Device number of the file system, as in `/proc/PID/mountinfo`.
    device: String,
    handle: Handle,
}

/// `struct file_handle`.
#[repr(C)]
#[derive(Debug, PartialEq, Eq)]
struct Handle {
    bytes: u32,
    kind: i32,
    content: [u8; HANDLE_BYTES_MAX],
}

impl Watched {
    /// Parses a line of `/proc/PID/fdinfo/FD`. Returns `None` for other lines, and for a file system without handles.
    fn parse(line: &str) -> Option<Self> {
        let line = line.strip_prefix("inotify ")?;
        let field = |name: &str| {
            let mut words = line.split_whitespace();
            words.find_map(|word| word.strip_prefix(name)?.strip_prefix(':'))
        };
        let device = u32::from_str_radix(field("sdev")?, 16).ok()?;
        let digits = field("f_handle")?;
        let mut content = [0; HANDLE_BYTES_MAX];
        for (at, byte) in content.iter_mut().enumerate().take(digits.len() / 2) {
            *byte = u8::from_str_radix(digits.get(2 * at..2 * at + 2)?, 16).ok()?;
        }
        Some(Self {
            device: format!("{}:{}", device >> 20, device & 0xf_ffff),
            handle: Handle {
                bytes: u32::from_str_radix(field("fhandle-bytes")?, 16).ok()?,
                kind: i32::from_str_radix(field("fhandle-type")?, 16).ok()?,
                content,
            },
        })
    }

    /// Returns the path of the file if it is a symbolic link. `pid` is a process that has the file system mounted.
    fn link(&self, pid: i32) -> Option<PathBuf> {
        let mounts = ProcessEntry::new(pid).and_then(|process| process.mountinfo());
        let mut mounts = mounts.ok()?.into_iter();
        let file = mounts.find_map(|mount| {
            let point = mount.mount_point.strip_prefix("/").ok()?.to_owned();
            let folder = Path::new("/proc")
                .join(pid.to_string())
                .join("root")
                .join(point);
            (mount.majmin == self.device).then(|| self.open(&File::open(folder).ok()?))?
        })?;
        let here = PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd()));
        let is_link = nix::sys::stat::fstat(&file).ok()?.st_mode & libc::S_IFMT == libc::S_IFLNK;
        is_link.then(|| fs::read_link(here).unwrap_or_default())
    }

    fn open(&self, filesystem: &File) -> Option<OwnedFd> {
        let handle = std::ptr::from_ref(&self.handle).cast_mut().cast();
        let flags = libc::O_PATH | libc::O_CLOEXEC;
        // SAFETY: the handle has room for the longest one, and the kernel only reads it.
        let opened = unsafe { libc::open_by_handle_at(filesystem.as_raw_fd(), handle, flags) };
        let opened = Errno::result(opened).ok()?;
        // SAFETY: the kernel has opened this descriptor for this process alone.
        Some(unsafe { OwnedFd::from_raw_fd(opened) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::inotify::{CreateFlags, WatchFlags, add_watch, init};

    #[test]
    fn unread_events_and_watches_of_links_are_found() {
        if !nix::unistd::geteuid().is_root() {
            eprintln!("SKIPPED: handles need root");
            return;
        }
        let place = tempfile::tempdir().unwrap();
        let path = |name| place.path().join(name);
        fs::write(path("file"), "").unwrap();
        std::os::unix::fs::symlink("file", path("link")).unwrap();
        let pid = i32::try_from(std::process::id()).unwrap();
        let watch = |name, flags| {
            let watches = init(CreateFlags::CLOEXEC).unwrap();
            add_watch(&watches, path(name), flags).unwrap();
            watches
        };
        let lost = |number| {
            let open = Descriptors::of(pid).unwrap();
            let one = open.all.iter().find(|one| one.number == number).unwrap();
            super::lost(pid, one)
        };
        let file = watch("file", WatchFlags::ATTRIB);
        assert_eq!(lost(file.as_raw_fd()), None);
        let once = watch("file", WatchFlags::ATTRIB | WatchFlags::ONESHOT);
        let found = lost(once.as_raw_fd());
        assert_eq!(found, Some(Finding::WatchedOnce(once.as_raw_fd())));
        drop(once);
        let through = watch("link", WatchFlags::ATTRIB);
        assert_eq!(lost(through.as_raw_fd()), None, "it watches the file");
        let link = watch("link", WatchFlags::ATTRIB | WatchFlags::DONT_FOLLOW);
        let found = lost(link.as_raw_fd());
        assert!(matches!(found, Some(Finding::WatchedLink(path)) if path.ends_with("link")));
        fs::set_permissions(
            path("file"),
            fs::metadata(path("file")).unwrap().permissions(),
        )
        .unwrap();
        assert_eq!(
            lost(file.as_raw_fd()),
            Some(Finding::Events(file.as_raw_fd()))
        );
    }
}
