//! What is shown of an image, for fuzzing.

use super::images::Summary;
use super::list;
use crate::store::ImageEntry;

/// A line of a list.
pub(crate) fn listed(entry: &ImageEntry) {
    let summary = Summary::from(entry);
    assert!(serde_json::to_string(&summary).is_ok());
    assert!(!list::table(&[summary]).to_string().is_empty());
}
