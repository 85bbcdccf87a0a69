//! File leases (`F_SETLEASE`) that a snapshot would break.
//!
//! A process with a write lease is asked to give it up when another one opens the file, as ckpt-run does to save the
//! content. A frozen process cannot answer: the open waits for `/proc/sys/fs/lease-break-time`, and afterwards the
//! signal kills a job that does not expect it. Read leases do not mind a reader, and CRIU restores them.

use std::fs;

use super::{Finding, Obstacle};
use crate::job::tree::Process;

/// Looks for a lease that an open for reading breaks, or has broken.
pub(super) fn find(processes: &[Process]) -> Option<Obstacle> {
    for process in processes {
        // A process that has exited meanwhile has no lease.
        let entries = fs::read_dir(format!("/proc/{}/fdinfo", process.host_pid));
        for entry in entries.into_iter().flatten().flatten() {
            let text = fs::read_to_string(entry.path()).unwrap_or_default();
            if text.lines().any(is_write_lease) {
                let link = format!("/proc/{}/fd", process.host_pid);
                let path = fs::read_link(std::path::Path::new(&link).join(entry.file_name()));
                let finding = Finding::Lease(path.unwrap_or_default());
                return Some(Obstacle::of(process, finding));
            }
        }
    }
    None
}

/// Returns true for a lock in `/proc/PID/fdinfo/FD` that is a lease, unless it is a read lease that nobody breaks.
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
    fn write_leases_and_broken_leases_are_told_from_other_locks() {
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
