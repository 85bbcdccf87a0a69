//! What the verbs print: data to stdout, talk to stderr.

use std::io::{self, Write};
use std::process::ExitCode;

use serde::Serialize;

use super::Failure;

/// Says something to the user.
pub(super) fn say(text: &str) {
    // Without a stderr there is nobody to tell.
    let _ = writeln!(io::stderr(), "ckpt-run: {text}");
}

/// Says what went wrong, in the manner of all our errors.
pub(super) fn fail(text: &str) {
    say(&format!("error: {text}"));
}

/// Prints data. A reader that went away, as in `list | head`, has seen what it wanted.
pub(super) fn print(text: &str) -> Result<ExitCode, Failure> {
    match io::stdout().write_all(text.as_bytes()) {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => {
            Err(io::Error::new(error.kind(), format!("cannot write to stdout: {error}")).into())
        }
        Ok(()) | Err(_) => Ok(ExitCode::SUCCESS),
    }
}

/// Prints data as JSON.
pub(super) fn print_json(data: &impl Serialize) -> Result<ExitCode, Failure> {
    print(&format!("{}\n", serde_json::to_string_pretty(data)?))
}

/// The text on one line, without what could steer a terminal.
pub(super) fn plain(text: &str) -> String {
    let plain = |c: char| if c.is_control() { ' ' } else { c };
    text.chars().map(plain).collect()
}
