//! Open descriptors of the job's processes, listed once for all readers. A job may have thousands of them, and is
//! frozen while they are listed.

use std::ffi::{CStr, OsStr};
use std::fs::{self, File, Metadata};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use procfs::ProcError;
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::path::DecInt;

use super::tree::{self, Process, TreeError};
use crate::sync::in_parts;

/// Returns true for the kernel's name for a file in memory that never had a path.
pub(super) fn is_memfd(path: &Path) -> bool {
    path.as_os_str().as_bytes().starts_with(b"/memfd:")
}

/// Longest target of a link.
const TARGET_BYTES_MAX: usize = 4096;

/// The open descriptors of a process.
#[derive(Debug)]
pub struct Descriptors {
    pub(super) process: Process,
    pub(super) all: Vec<Descriptor>,
}

/// An open descriptor. Its facts are read from the kernel once and cached.
#[derive(Debug)]
pub(super) struct Descriptor {
    pub number: i32,
    /// The process, as the host sees it.
    pid: i32,
    /// Target of the link: a path, or the kernel's name for an object without a path.
    pub target: PathBuf,
    metadata: OnceLock<Option<Metadata>>,
    info: OnceLock<String>,
}

/// Target of a link in `/proc/PID`. While a process computes, a link leads to another file at any moment: a shell that
/// redirects its output does that all the time. Facts of the file that is held here are of one file.
#[derive(Debug)]
pub(super) struct Target {
    /// Opened for its facts only (`O_PATH`).
    pub held: OwnedFd,
    pub path: PathBuf,
}

impl Target {
    /// Holds the target; `None` if it is gone.
    pub fn of(link: &Path) -> Option<Self> {
        let held = rustix::fs::open(link, OFlags::PATH | OFlags::CLOEXEC, Mode::empty()).ok()?;
        let path = fs::read_link(format!("/proc/self/fd/{}", held.as_raw_fd())).ok()?;
        Some(Self { held, path })
    }
}

impl Descriptors {
    /// Lists the descriptors of a process (a host pid).
    ///
    /// # Errors
    /// The process has exited.
    pub fn of(host_pid: i32) -> Result<Self, TreeError> {
        Self::of_process(tree::describe(host_pid)?)
    }

    /// Lists the descriptors of `processes`.
    ///
    /// # Errors
    /// A process has exited.
    pub fn of_all(processes: &[Process]) -> Result<Vec<Self>, TreeError> {
        processes.iter().map(|it| Self::of_process(*it)).collect()
    }

    /// Lists the descriptors of those `processes` that have not exited.
    #[must_use]
    pub fn of_present(processes: &[Process]) -> Vec<Self> {
        let open = processes.iter().map(|it| Self::of_process(*it));
        open.filter_map(Result::ok).collect()
    }

    fn of_process(process: Process) -> Result<Self, TreeError> {
        let pid = process.host_pid;
        let all = list(pid).map_err(|source| TreeError::Process { pid, source })?;
        Ok(Self { process, all })
    }

    /// Reads the facts of all descriptors with a path, on several threads. All later readers of this list get these
    /// facts. They stay true as long as the processes are frozen.
    pub fn read_ahead(open: &[Self]) {
        for one in open {
            in_parts(&one.all, |part| {
                for descriptor in part.iter().filter(|it| it.target.is_absolute()) {
                    descriptor.info();
                    descriptor.metadata();
                }
            });
        }
    }

    /// Returns links to all open files, the working directory and the root of the process.
    pub(super) fn with_folders(&self) -> Vec<(PathBuf, PathBuf)> {
        let folder = PathBuf::from(format!("/proc/{}", self.process.host_pid));
        let own = ["cwd", "root"].map(|name| folder.join(name));
        let own = own.into_iter().filter_map(|link| {
            let target = fs::read_link(&link).ok()?;
            Some((link, target))
        });
        let open = self.all.iter();
        open.map(|one| (one.link(), one.target.clone()))
            .chain(own)
            .collect()
    }
}

/// Lists the descriptors of a process (a host pid).
pub(super) fn list(pid: i32) -> Result<Vec<Descriptor>, ProcError> {
    let folder = PathBuf::from(format!("/proc/{pid}/fd"));
    let opened = match File::open(&folder) {
        // Without privileges the kernel does not say that a zombie has none.
        Err(error) if error.kind() == io::ErrorKind::PermissionDenied && tree::is_zombie(pid) => {
            return Ok(Vec::new());
        }
        opened => opened?,
    };
    let mut entries = rustix::fs::Dir::new(opened).map_err(io::Error::from)?;
    let number = |name: &CStr| name.to_str().ok()?.parse::<i32>().ok();
    let mut numbers = Vec::new();
    for entry in &mut entries {
        match entry {
            // `.` and `..` are no numbers.
            Ok(entry) => numbers.extend(number(entry.file_name())),
            // A zombie has no descriptors.
            Err(Errno::NOENT) => break,
            Err(error) => return Err(io::Error::from(error).into()),
        }
    }
    let opened = entries.fd().map_err(io::Error::from)?;
    let read = |part: &[i32]| {
        // One for all targets: threads that allocate wait for each other.
        let mut room = [0; TARGET_BYTES_MAX];
        let at = |number: &i32| Descriptor::at(opened, pid, *number, &mut room);
        part.iter().filter_map(at).collect::<Vec<_>>()
    };
    Ok(in_parts(&numbers, read).into_iter().flatten().collect())
}

impl Descriptor {
    /// Reads the target of a link in `folder`, which is the `/proc/PID/fd` of the process: with a path, the kernel would look
    /// up every folder on it again for each link. Returns `None` for a descriptor that was closed since the listing.
    fn at(folder: BorrowedFd<'_>, pid: i32, number: i32, room: &mut [u8]) -> Option<Self> {
        let length = rustix::fs::readlinkat_raw(folder, DecInt::new(number), &mut *room).ok()?;
        Some(Self {
            number,
            pid,
            target: OsStr::from_bytes(room.get(..length)?).into(),
            metadata: OnceLock::new(),
            info: OnceLock::new(),
        })
    }

    /// Returns the link in `/proc`, which leads to the open file even if its name has changed.
    pub fn link(&self) -> PathBuf {
        format!("/proc/{}/fd/{}", self.pid, self.number).into()
    }

    /// Describes the open file; `None` if it cannot be inspected.
    pub fn metadata(&self) -> Option<&Metadata> {
        let read = || fs::metadata(self.link()).ok();
        self.metadata.get_or_init(read).as_ref()
    }

    /// Returns the content of `/proc/PID/fdinfo/FD`; empty if it cannot be read.
    pub fn info(&self) -> &str {
        self.info
            .get_or_init(|| self.present_info().unwrap_or_default())
    }

    /// Returns the position of the next read or write; `None` if it cannot be read.
    pub fn position(&self) -> Option<u64> {
        let mut lines = self.info().lines();
        let position = lines.find_map(|line| line.strip_prefix("pos:"))?;
        position.trim().parse().ok()
    }

    /// Same as [`info`](Self::info), without the cache.
    pub fn present_info(&self) -> io::Result<String> {
        fs::read_to_string(format!("/proc/{}/fdinfo/{}", self.pid, self.number))
    }

    /// Returns the inode of a socket.
    pub fn socket(&self) -> Option<u64> {
        let target = self.target.to_str()?;
        let number = target.strip_prefix("socket:[")?.strip_suffix(']')?;
        number.parse().ok()
    }

    /// Returns true for the end of a terminal that its creator has ("master").
    pub fn is_terminals_first_end(&self) -> bool {
        self.target.ends_with("ptmx") && self.target.starts_with("/dev")
    }

    /// Returns true if the kernel gives this name to an object without a path, such as `anon_inode:[eventfd]`.
    pub fn is_kernels(&self, name: &str) -> bool {
        let target = self.target.as_os_str().as_bytes();
        let rest = target.strip_prefix(b"anon_inode:");
        rest.is_some_and(|rest| rest == name.as_bytes() || rest == format!("[{name}]").as_bytes())
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::{AsFd, AsRawFd};

    use nix::sys::timerfd::{ClockId, TimerFd, TimerFlags};

    use super::*;

    #[test]
    fn own_descriptors_are_listed_with_their_kinds() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let timer = TimerFd::new(ClockId::CLOCK_MONOTONIC, TimerFlags::TFD_CLOEXEC).unwrap();
        let me = i32::try_from(std::process::id()).unwrap();
        let open = Descriptors::of(me).unwrap();
        let of = |number: i32| open.all.iter().find(|one| one.number == number).unwrap();
        let (named, kernels) = (of(file.as_raw_fd()), of(timer.as_fd().as_raw_fd()));
        assert_eq!(named.target, file.path());
        assert!(named.metadata().unwrap().is_file() && named.info().contains("flags:"));
        assert_eq!(named.position(), Some(0));
        assert!(kernels.is_kernels("timerfd") && !kernels.is_kernels("eventfd"));
        assert!(!named.is_kernels("timerfd"));
        let folders = open.with_folders();
        let here = std::env::current_dir().unwrap();
        assert!(folders.iter().any(|(_, target)| *target == here));
    }

    #[test]
    fn a_zombie_has_no_descriptors_and_an_exited_process_fails() {
        let mut child = std::process::Command::new("true").spawn().unwrap();
        let pid = i32::try_from(child.id()).unwrap();
        while tree::is_alive(pid) {
            std::thread::yield_now();
        }
        let zombie = Descriptors::of(pid).unwrap();
        assert!(zombie.all.is_empty());
        child.wait().unwrap();
        assert!(Descriptors::of_all(&[zombie.process]).is_err());
        assert!(Descriptors::of_present(&[zombie.process]).is_empty());
    }
}
