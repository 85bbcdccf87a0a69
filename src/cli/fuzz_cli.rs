//! What is shown of an image, for fuzzing.

use super::control::status;
use super::store::image_names::Summary;
use super::store::list;
use crate::history::Entry;
use crate::store::ImageEntry;

/// A line of a list.
pub(crate) fn listed(entry: &ImageEntry) {
    let summary = Summary::of(entry, None);
    assert!(serde_json::to_string(&summary).is_ok());
    assert!(!list::table(&[summary]).to_string().is_empty());
}

/// The live view of these events.
pub(crate) fn watched(events: &[Entry]) {
    status::fuzz_status::watched(events);
}
