//! File system access: the only code of the store that changes the disk.

pub mod durable;
pub(crate) mod fence;
pub(super) mod lock;
pub(super) mod ops;
pub(super) mod store_place;
