#![allow(unsafe_code, reason = "fork of a single-threaded process")]
//! POSIX message queues of the job, which CRIU cannot save. One that the job has closed belongs to no process: it is
//! visible only in the file system of the job's IPC namespace. A process in that namespace opens the file system,
//! which is mounted nowhere, and passes it on.

use std::ffi::OsString;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStringExt;
use std::os::unix::net::UnixStream;

use nix::errno::Errno;
use nix::libc;
use nix::sched::{CloneFlags, setns};
use nix::unistd::{ForkResult, Pid, fork};
use rustix::fs::{Dir, Mode, OFlags, openat};
use rustix::mount::{FsMountFlags, FsOpenFlags, MountAttrFlags, fsconfig_create, fsmount, fsopen};

use super::protocol::{Ended, Event, send};

/// Starts a child that enters the IPC namespace of process `root` and sends the folder of its queues. Pid 1 stays in its
/// own namespace, because tools must not be in the job's, and does not wait: the job may be able to stop the child. The
/// child's message is one system call, so that it does not mix with another one of pid 1.
pub(super) fn start_opener(control: &UnixStream, root: i32) -> Result<Pid, Errno> {
    // SAFETY: this process has one thread, so the child may continue as an ordinary program.
    match unsafe { fork() }? {
        ForkResult::Child => {
            let sent = folder_of(root)
                .and_then(|folder| send(control, &Event::Opened(None), &[folder.as_raw_fd()]));
            let errno = sent
                .err()
                .map_or(0, |error| error.raw_os_error().unwrap_or(libc::EIO));
            std::process::exit(errno);
        }
        ForkResult::Parent { child } => Ok(child),
    }
}

/// Returns the error number of a child that has ended; `None` if it has sent the folder.
pub(super) fn failed_with(ended: Ended) -> Option<i32> {
    match ended {
        Ended::Exited(0) => None,
        Ended::Exited(errno) => Some(errno),
        Ended::Signaled(_) => Some(libc::EIO),
    }
}

fn folder_of(root: i32) -> io::Result<OwnedFd> {
    let namespace = File::open(format!("/proc/{root}/ns/ipc"))?;
    setns(namespace, CloneFlags::CLONE_NEWIPC)?;
    let queues = fsopen("mqueue", FsOpenFlags::FSOPEN_CLOEXEC)?;
    fsconfig_create(&queues)?;
    let mount = fsmount(
        &queues,
        FsMountFlags::FSMOUNT_CLOEXEC,
        MountAttrFlags::empty(),
    )?;
    Ok(openat(
        mount,
        ".",
        OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC,
        Mode::empty(),
    )?)
}

/// Returns the names in such a folder.
pub(super) fn names(folder: impl AsFd) -> io::Result<Vec<OsString>> {
    let entries = Dir::read_from(folder)?.collect::<Result<Vec<_>, _>>()?;
    let names = entries
        .into_iter()
        .map(|entry| entry.file_name().to_bytes().to_vec());
    Ok(names
        .filter(|name| name != b"." && name != b"..")
        .map(OsString::from_vec)
        .collect())
}
