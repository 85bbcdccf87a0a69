//! What is shown of an image, for fuzzing.

use super::images::Summary;
use super::{list, status};
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
    status::fuzz::watched(events);
}
