//! Numbers and errors as people read them.

use std::error::Error;
use std::path::Path;
use std::time::Duration;

use bytesize::ByteSize;

use crate::criu;
use crate::sandbox::Ended;

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

/// Why CRIU failed: its log's reason, or how it ended.
pub(super) fn why(log: &Path, ended: Ended) -> String {
    criu::reason_in(log).map_or_else(
        || format!("CRIU ended without a reason ({ended:?}); does `ckpt-run doctor` know one?"),
        |reason| reason.to_string(),
    )
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
