//! The formatting of numbers and errors for the user.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::Duration;

use crate::criu;
use crate::sandbox::Ended;

pub use crate::printable::{chain, size};

/// Limit on the quoted bytes of CRIU's output if it wrote no log: the linker's error, a usage error.
const PRINTED_BYTES_MAX: usize = 1024;

/// Returns the reason why CRIU failed: the reason in its log and the path where the log is kept, or its exit status.
/// `printed` is its stderr output.
pub(crate) fn why(log: &Path, kept: &Path, ended: Ended, printed: Option<&File>) -> String {
    if !log.exists() {
        let words = printed.map(words_in).filter(|words| !words.is_empty());
        let words = words.map_or_else(String::new, |words| format!(", and printed: {words}"));
        return format!(
            "CRIU ended with {ended} before it opened its log{words}; `ckpt-run doctor` checks if CRIU works here"
        );
    }
    let reason = criu::reason_in(log).map_or_else(
        || {
            format!(
                "CRIU ended with {ended} and logged no reason; `ckpt-run doctor` may find the cause"
            )
        },
        |reason| reason.to_string(),
    );
    format!("{reason}{}", named(kept))
}

/// Returns ` (log: PATH)` if CRIU has opened its log, otherwise an empty string.
pub(crate) fn logged(log: &Path) -> String {
    if log.exists() {
        named(log)
    } else {
        String::new()
    }
}

fn named(log: &Path) -> String {
    format!(" (log: {})", log.display())
}

/// Returns the start of a file on one line, without control characters, which could manipulate a terminal.
fn words_in(file: &File) -> String {
    let mut bytes = vec![0; PRINTED_BYTES_MAX];
    // Unreadable output is left out.
    let length = file.read_at(&mut bytes, 0).unwrap_or(0);
    let text = String::from_utf8_lossy(&bytes[..length]);
    let words: Vec<&str> = text
        .split(|c: char| c.is_whitespace() || c.is_control())
        .filter(|word| !word.is_empty())
        .collect();
    words.join(" ")
}

/// Formats a time, as in `0.42s`.
pub(crate) fn seconds(time: Duration) -> String {
    format!("{:.2}s", time.as_secs_f64())
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    #[test]
    fn a_log_that_criu_never_opened_is_not_named() {
        let folder = tempfile::tempdir().unwrap();
        let log = folder.path().join("dump.log");
        let mut printed = tempfile::tempfile().unwrap();
        let silent = why(&log, &log, Ended::Exited(1), Some(&printed));
        assert!(
            silent.starts_with("CRIU ended with exit code 1 before it opened its log; "),
            "{silent}"
        );
        printed
            .write_all(b"criu: libnet.so.1:\n\x1b[1mno such file\n")
            .unwrap();
        let told = why(&log, &log, Ended::Exited(127), Some(&printed));
        assert!(
            told.contains("its log, and printed: criu: libnet.so.1: [1mno such file; "),
            "{told}"
        );
        assert!(!told.contains("dump.log"), "{told}");
        std::fs::write(&log, "(00.1) Error (a.c:1): first\n").unwrap();
        assert_eq!(
            why(&log, Path::new("/kept.log"), Ended::Signaled(9), None),
            "CRIU: first (log: /kept.log)"
        );
    }
}
