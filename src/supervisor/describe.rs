//! Numbers and errors as people read them.

use std::error::Error;
use std::time::Duration;

use bytesize::ByteSize;

/// An error with its causes, on one line.
#[must_use]
pub fn chain(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(next) = cause {
        let more = next.to_string();
        if !text.ends_with(&more) {
            text = format!("{text}: {more}");
        }
        cause = next.source();
    }
    text
}

/// `0.42s`
#[must_use]
pub fn seconds(time: Duration) -> String {
    format!("{:.2}s", time.as_secs_f64())
}

/// `1.5 GiB`
#[must_use]
pub fn size(bytes: u64) -> String {
    ByteSize::b(bytes).display().iec().to_string()
}
