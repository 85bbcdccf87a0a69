//! Reasons of failures in CRIU's log, translated for the user.

use std::fmt;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::Path;

use crate::known_errors::{self, Symptom};

/// Limit on the bytes read from the end of a log. CRIU writes errors last.
const TAIL_BYTES_MAX: u64 = 256 << 10;

/// The reason why CRIU failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reason {
    /// The cause in plain words if it is known, otherwise CRIU's first error.
    pub cause: String,
    /// The remedy, if one is known.
    pub remedy: Option<&'static str>,
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.cause)?;
        self.remedy.map_or(Ok(()), |remedy| write!(f, "; {remedy}"))
    }
}

/// Errors after which CRIU continues: it cannot raise a limit without `CAP_SYS_RESOURCE`, and does not find
/// /dev/net/tun in containers.
const HARMLESS: &[&str] = &[
    "Can't setup RLIMIT_NOFILE for self",
    "tun: Unable to create tun",
];

/// Errors caused by a lack of memory or disk space, or by a killed process of CRIU, perhaps for lack of memory. The
/// image is not at fault.
const SHORTAGES: &[&str] = &[
    "Cannot allocate memory",
    "No space left on device",
    "mapping with 0xfffffffffffffff4",
    "killed by signal 9",
    "was killed by 9 unexpectedly",
    "unexpectedly signaled with 9",
    "didn't stop as expected: status=9",
    "bad status: errno=0, status=9",
    "Compat vdso helper isn't stopped",
];

/// Errors caused by a temporary state of the job: data that it has not read or accepted yet, data that arrives from
/// another program while CRIU reads a socket, and a process of several threads that is exiting.
const PASSING: &[&str] = &[
    "Non-empty write queue on an in-flight socket",
    "Found a closed in-flight socket",
    "netlink: The socket has data to read",
    "\trecv failed (",
    "Zombies with threads are not supported",
    "Control messages in queue, not supported",
    "No CTL for TTY dump",
    "Can't make VM id",
];

/// Reads the end of CRIU's log and returns the reason of the failure. Returns `None` if the log has no error.
#[must_use]
pub fn reason_in(log: &Path) -> Option<Reason> {
    reason(&end_of(log)?)
}

/// Returns true if CRIU's log has an error caused by a lack of memory or disk space, or by a killed process.
#[must_use]
pub fn reports_shortage(log: &Path) -> bool {
    end_of(log).is_some_and(|log| has_error(&log, SHORTAGES))
}

/// Returns true if CRIU's log has an error caused by a temporary state of the job.
#[must_use]
pub fn reports_passing(log: &Path) -> bool {
    end_of(log).is_some_and(|log| has_error(&log, PASSING))
}

fn end_of(log: &Path) -> Option<String> {
    let mut file = File::open(log).ok()?;
    let length = file.metadata().ok()?.len();
    file.seek(SeekFrom::Start(length.saturating_sub(TAIL_BYTES_MAX)))
        .ok()?;
    let mut tail = Vec::new();
    file.take(TAIL_BYTES_MAX).read_to_end(&mut tail).ok()?;
    Some(String::from_utf8_lossy(&tail).into_owned())
}

fn errors(log: &str) -> impl Iterator<Item = &str> {
    log.lines()
        .filter(|line| line.contains("Error (") && !HARMLESS.iter().any(|text| line.contains(text)))
}

fn has_error(log: &str, texts: &[&str]) -> bool {
    errors(log).any(|line| texts.iter().any(|text| line.contains(text)))
}

fn reason(log: &str) -> Option<Reason> {
    let errors: Vec<&str> = errors(log).collect();
    let symptoms: Vec<Symptom<'_>> = errors.iter().map(|line| Symptom::Criu(line)).collect();
    if let Some((known, Symptom::Criu(line))) = known_errors::find(&symptoms) {
        return Some(Reason {
            cause: format!("{} (CRIU: {})", known.cause, message(line)),
            remedy: Some(known.remedy),
        });
    }
    errors.first().map(|line| Reason {
        cause: format!("CRIU: {}", message(line)),
        remedy: None,
    })
}

/// Returns the line without CRIU's timestamp, pid and source position.
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
    fn a_known_error_has_plain_words_and_a_remedy() {
        let reason = reason(SHRUNK).unwrap();
        assert_eq!(
            reason.cause,
            "a file that the job has open changed its size (CRIU: File tmp/log.txt has bad size 10 (expect 20))"
        );
        assert_eq!(
            reason.remedy,
            Some("put the file back as it was at the snapshot, or restore an older image")
        );
    }

    #[test]
    fn the_reason_of_unknown_errors_is_crius_first_error() {
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
    fn an_error_for_lack_of_memory_or_a_kill_is_a_shortage() {
        let line = "(00.2)  300: Error (criu/mem.c:9): Can't mmap: Cannot allocate memory\n";
        assert!(has_error(&format!("{SHRUNK}{line}"), SHORTAGES));
        for killed in [
            "(00.1) Error (criu/cr-restore.c:1269): 421 killed by signal 9: Killed\n",
            "Error (criu/vdso.c:700): vdso: Child unexpectedly signaled with 9: Killed\n",
            "Error (criu/util.c:1510): Can't wait or bad status: errno=0, status=9\n",
        ] {
            assert!(has_error(killed, SHORTAGES), "{killed}");
        }
        assert!(!has_error(&line.replace("Error", "Warn "), SHORTAGES));
        assert!(!has_error(SHRUNK, SHORTAGES));
    }

    #[test]
    fn a_log_without_errors_gives_no_reason() {
        assert_eq!(reason("(00.1) Warn  (a.c:1): meh\n"), None);
    }
}
