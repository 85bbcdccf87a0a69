#![allow(unsafe_code, reason = "an fcntl that has no safe wrapper")]
//! Descriptors that signal a process: file leases (`F_SETLEASE`) that a snapshot would break, and signals to a thread
//! (`F_OWNER_TID`), with which CRIU (4.2) restores no image unless it is the first one.
//!
//! The kernel notifies a process with a write lease when another process opens the file, as ckpt-run does to save its
//! content. A frozen process cannot react: the open waits for `/proc/sys/fs/lease-break-time`, and afterwards the
//! signal kills a job without a handler for it. Readers do not break read leases, and CRIU restores those.

use std::os::fd::AsRawFd;

use nix::errno::Errno;
use nix::fcntl::OFlag;
use nix::libc;

use super::{Finding, Obstacle};
use crate::job::descriptors::{Descriptor, Descriptors};
use crate::job::files::flags;
use crate::job::nodes::Borrower;

/// Searches for a lease that an open for reading would break or has broken.
pub(super) fn find(open: &[Descriptors]) -> Option<Obstacle> {
    for Descriptors { process, all } in open {
        // Only files have leases.
        let mut files = all.iter().filter(|one| one.target.is_absolute());
        if let Some(leased) = files.find(|one| one.info().lines().any(is_write_lease)) {
            return Some(Obstacle::of(process, Finding::Lease(leased.target.clone())));
        }
    }
    None
}

/// Searches for a descriptor that signals a thread other than the first (`O_ASYNC`).
pub(super) fn find_signalled_thread(open: &[Descriptors]) -> Option<Obstacle> {
    for Descriptors { process, all } in open {
        let mut signalling = all.iter().filter(|one| has_async(one));
        let to_thread = signalling.find(|one| {
            let owner = Borrower::new(process.host_pid).and_then(|it| owner_of(&it, one.number));
            owner.is_some_and(|owner| {
                owner.kind == F_OWNER_TID && ![0, process.host_pid].contains(&owner.pid)
            })
        });
        if let Some(one) = to_thread {
            return Some(Obstacle::of(process, Finding::SignalsThread(one.number)));
        }
    }
    None
}

fn has_async(descriptor: &Descriptor) -> bool {
    flags(descriptor).is_ok_and(|flags| flags.contains(OFlag::O_ASYNC))
}

/// `struct f_owner_ex`.
#[repr(C)]
struct Owner {
    kind: libc::c_int,
    pid: libc::c_int,
}

const F_OWNER_TID: libc::c_int = 0;
const F_GETOWN_EX: libc::c_int = 16;

fn owner_of(borrower: &Borrower, number: i32) -> Option<Owner> {
    let file = borrower.borrow(number)?;
    let mut owner = Owner { kind: 0, pid: 0 };
    // SAFETY: the kernel writes the structure.
    let got = unsafe { libc::fcntl(file.as_raw_fd(), F_GETOWN_EX, &raw mut owner) };
    Errno::result(got).ok().map(|_| owner)
}

/// Returns true for a lease in `/proc/PID/fdinfo/FD`, except a read lease that is not being broken.
fn is_write_lease(line: &str) -> bool {
    let mut words = line.split_whitespace().skip(2);
    line.starts_with("lock:")
        && words.next() == Some("LEASE")
        && (words.next(), words.next()) != (Some("ACTIVE"), Some("READ"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn write_and_broken_leases_are_distinguished_from_locks() {
        for (line, expected) in [
            (
                "lock:\t1: LEASE  ACTIVE    WRITE 14193 fe:00:1003 0 EOF",
                true,
            ),
            (
                "lock:\t2: LEASE  BREAKING  READ 14193 fe:00:1003 0 EOF",
                true,
            ),
            (
                "lock:\t1: LEASE  BREAKING  UNLCK 14193 fe:00:1003 0 EOF",
                true,
            ),
            (
                "lock:\t1: LEASE  ACTIVE    READ 14193 fe:00:1003 0 EOF",
                false,
            ),
            (
                "lock:\t1: FLOCK  ADVISORY  WRITE 14193 fe:00:1003 0 EOF",
                false,
            ),
            (
                "lock:\t1: POSIX  ADVISORY  WRITE 14193 fe:00:1003 0 EOF",
                false,
            ),
            ("flags:\t02120002", false),
            ("", false),
        ] {
            assert_eq!(is_write_lease(line), expected, "{line}");
        }
    }
}
