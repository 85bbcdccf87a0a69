//! Checks of this machine: can snapshots and restores work here, and what would cure what is missing?
//!
//! `ckpt-run doctor` and `ckpt-run config check` print the results. Nothing is changed.

pub(crate) mod capabilities;
pub(crate) mod checks;
pub(crate) mod config_check;
mod gpu_checks;
mod host_checks;
pub(crate) mod space_checks;

pub use checks::{Check, Status, examine};
pub use config_check::MissingParts;
