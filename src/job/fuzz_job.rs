//! Fuzzing entry points for parsers of the kernel's facts about a job.

use super::sockets::diagnosis::{Found, next_message, refused};
use super::timers::State;

/// Parses a timer's `/proc/PID/fdinfo/FD`.
pub(crate) fn timer(text: &str) -> bool {
    State::parse(text).is_some()
}

/// Parses an answer of the kernel's socket diagnosis (netlink messages).
pub(crate) fn netlink(answer: &[u8]) -> bool {
    let (mut rest, mut found) = (answer, false);
    while let Some((_, body)) = next_message(&mut rest) {
        found |= Found::parse(body).is_some();
        // Success and failure are both valid answers.
        let _ = refused(body);
    }
    found
}
