//! CRIU's log, in the user's words.

use std::fmt;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::Path;

/// How much of a log's end is read: errors are the last thing that CRIU writes.
const TAIL_BYTES_MAX: u64 = 256 << 10;

/// Why CRIU failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reason {
    /// The cause, in the user's words where it is known, otherwise CRIU's first error.
    pub cause: String,
    /// What to do about it, where that is known.
    pub remedy: Option<&'static str>,
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.cause)?;
        self.remedy.map_or(Ok(()), |remedy| write!(f, "; {remedy}"))
    }
}

/// A text that CRIU logs, what it means, and what to do.
struct Known(&'static str, &'static str, &'static str);

const IO_URING: &str = "the job uses io_uring, which CRIU cannot dump";
const HIDE_IO_URING: &str =
    "start it with sandbox.io_uring = \"hide\", which is the default and takes CAP_SYS_ADMIN";

/// In order of precedence: the first that is found in an error line wins.
const KNOWN: &[Known] = &[
    Known(
        "has bad size",
        "a file that the job has open changed its size",
        "put the file back as it was at the snapshot",
    ),
    Known(
        "has bad mode",
        "a file that the job has open changed its type",
        "put the file back as it was at the snapshot",
    ),
    Known(
        "has bad build-ID",
        "a program or library of the job was replaced",
        "reinstall the version that the job was started with",
    ),
    Known(
        "Can't open file",
        "a file that the job has open is gone",
        "put the file back as it was at the snapshot",
    ),
    Known("anon_inode:[io_uring]", IO_URING, HIDE_IO_URING),
    // Since Linux 6.7 such a descriptor cannot be sent through a socket (EINVAL), which is how CRIU gets at all of them.
    Known("send_fds failed (-22)", IO_URING, HIDE_IO_URING),
    Known(
        "Can't handle non-regular mapping",
        "the job maps a device, which CRIU cannot dump",
        "unmap it before snapshots; only what a process without CUDA has of an NVIDIA GPU is left out",
    ),
    Known(
        "Can't dump file",
        "the job has a file open that CRIU cannot dump",
        "close the device or special file before snapshots",
    ),
    Known(
        "Can't lookup mount",
        "the job has a file open from a mount that the sandbox does not see",
        "open the file inside the job",
    ),
    Known(
        "External socket is used",
        "a unix socket of the job is connected to a process outside the job",
        "start both ends inside the job",
    ),
    Known(
        "Task with SysVIPC shmem map",
        "the job uses System V shared memory",
        "use POSIX shared memory (shm_open) or mmap",
    ),
    Known(
        "Can't fork for",
        "a process id of the job is taken",
        "run with isolation = \"namespaces\"",
    ),
    Known(
        "Address already in use",
        "a network address of the job is still in use",
        "wait until the connection's TIME_WAIT is over, or end the program that uses the address",
    ),
    Known(
        "Unexpected rt vDSO area bounds",
        "this CRIU is too old for the running kernel",
        "install CRIU 4.0 or newer (scripts/setup)",
    ),
    Known(
        "No space left on device",
        "the disk is full",
        "free space, or choose another --store",
    ),
    Known(
        "seized by",
        "another tool traces the job",
        "detach the debugger or profiler",
    ),
    Known(
        "Unable to interrupt task",
        "the job could not be stopped",
        "detach the debugger or profiler",
    ),
    Known(
        "Cannot allocate memory",
        "the machine is out of memory",
        "free memory, or lower snapshot.buffer",
    ),
];

/// Errors after which CRIU goes on: it would have liked a higher limit, which takes `CAP_SYS_RESOURCE`.
const HARMLESS: &[&str] = &["Can't setup RLIMIT_NOFILE for self"];

/// Reads the end of CRIU's log and says why it failed. `None` when the log holds no error.
#[must_use]
pub fn reason_in(log: &Path) -> Option<Reason> {
    let mut file = File::open(log).ok()?;
    let length = file.metadata().ok()?.len();
    file.seek(SeekFrom::Start(length.saturating_sub(TAIL_BYTES_MAX)))
        .ok()?;
    let mut tail = Vec::new();
    file.take(TAIL_BYTES_MAX).read_to_end(&mut tail).ok()?;
    reason(&String::from_utf8_lossy(&tail))
}

fn reason(log: &str) -> Option<Reason> {
    let errors: Vec<&str> = log
        .lines()
        .filter(|line| line.contains("Error (") && !HARMLESS.iter().any(|text| line.contains(text)))
        .collect();
    for Known(text, cause, remedy) in KNOWN {
        if let Some(line) = errors.iter().find(|line| line.contains(text)) {
            return Some(Reason {
                cause: format!("{cause} (CRIU: {})", message(line)),
                remedy: Some(remedy),
            });
        }
    }
    errors.first().map(|line| Reason {
        cause: format!("CRIU: {}", message(line)),
        remedy: None,
    })
}

/// The line without CRIU's time stamp, pid and source position.
fn message(line: &str) -> &str {
    line.split_once("Error (")
        .and_then(|(_, rest)| rest.split_once("): "))
        .map_or(line, |(_, message)| message)
        .trim()
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHRUNK: &str = "(00.011) Warn  (criu/kerndat.c:1285): something\n\
        (00.034)    300: Error (criu/files-reg.c:2263): File tmp/log.txt has bad size 10 (expect 20)\n\
        (00.035) Error (criu/cr-restore.c:2605): Restoring FAILED.\n";

    #[test]
    fn a_known_error_is_told_in_the_users_words_with_a_remedy() {
        let reason = reason(SHRUNK).unwrap();
        assert_eq!(
            reason.cause,
            "a file that the job has open changed its size (CRIU: File tmp/log.txt has bad size 10 (expect 20))"
        );
        assert_eq!(
            reason.remedy,
            Some("put the file back as it was at the snapshot")
        );
    }

    #[test]
    fn an_unknown_error_is_criu_s_first() {
        let reason = reason("Error (u.c:1): rlimit: Can't setup RLIMIT_NOFILE for self: no\n(00.1) Error (a.c:1): first\n(00.2) Error (b.c:2): second\n").unwrap();
        assert_eq!(
            reason,
            Reason {
                cause: "CRIU: first".to_owned(),
                remedy: None
            }
        );
    }

    #[test]
    fn a_log_without_errors_gives_no_reason() {
        assert_eq!(reason("(00.1) Warn  (a.c:1): meh\n"), None);
    }
}
