//! Display of an image, for fuzzing.

use super::control::status;
use super::store::image_names::Summary;
use super::store::list;
use crate::history::Entry;
use crate::store::ImageEntry;

/// Formats an image as a line of a list.
pub(crate) fn listed(entry: &ImageEntry) {
    let summary = Summary::of(entry, None);
    assert!(serde_json::to_string(&summary).is_ok());
    assert!(!list::table(&[summary]).to_string().is_empty());
}

/// Draws the live view of these events.
pub(crate) fn watched(events: &[Entry]) {
    status::fuzz_status::watched(events);
}
