//! The live view for fuzzing.

use jiff::Timestamp;
use jiff::tz::TimeZone;

use super::view::{View, drawn};
use crate::history::Entry;
use crate::supervisor::Status;

/// Checks that no text of an event is drawn outside of its cells.
pub(in crate::cli) fn watched(events: &[Entry]) {
    let view = View {
        status: Status::default(),
        events: events.to_vec(),
        trouble: None,
        now: Timestamp::UNIX_EPOCH,
        zone: TimeZone::UTC,
        colors: true,
    };
    for (width, height) in [(80, 24), (30, 9)] {
        let buffer = drawn(&view, width, height);
        let mut cells = buffer.content.iter();
        assert!(cells.all(|cell| !cell.symbol().chars().any(char::is_control)));
    }
}
