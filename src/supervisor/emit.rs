//! The one place where what happens to a run becomes an entry of its history.

use super::supervise::Supervisor;
use crate::history;

impl Supervisor {
    /// Something happened that a reader of the history wants to know.
    #[expect(clippy::unused_self, reason = "the history is the supervisor's")]
    pub fn emit(&self, event: &history::Event) {
        tracing::debug!(?event, "history");
    }
}
