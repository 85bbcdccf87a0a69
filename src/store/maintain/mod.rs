//! Maintenance of a store: selection of the images to keep, removal, verification, repair, comparison and copies.

pub(super) mod comparison;
pub(super) mod disk_usage;
pub(super) mod garbage;
pub(super) mod hole_punch;
pub(super) mod image_copy;
pub(super) mod image_list;
pub(super) mod image_removal;
pub(super) mod pins;
pub(super) mod reclaimable;
pub(super) mod relocate;
pub(crate) mod retention;
pub(super) mod scan;
pub(super) mod store_repair;
pub(super) mod sweep;
pub(super) mod verification;
pub(super) mod verify_report;
