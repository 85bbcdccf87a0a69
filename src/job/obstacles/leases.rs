//! File leases (`F_SETLEASE`) that a snapshot would break.
//!
//! The kernel notifies a process with a write lease when another process opens the file, as ckpt-run does to save its
//! content. A frozen process cannot react: the open waits for `/proc/sys/fs/lease-break-time`, and afterwards the
//! signal kills a job without a handler for it. Readers do not break read leases, and CRIU restores those.

use super::{Finding, Obstacle};
use crate::job::descriptors::Descriptors;

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
