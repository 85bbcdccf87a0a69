//! Checks of this machine: they show if snapshots and restores can work here, and how to fix the problems found.
//!
//! `ckpt-run doctor` and `ckpt-run config check` print the results. The checks change nothing.

pub(crate) mod capabilities;
pub(crate) mod checks;
pub(crate) mod config_check;
mod gpu_checks;
mod host_checks;
mod seccomp;
pub(crate) mod space_checks;
mod user_sandbox;

pub use checks::{Check, Status, examine};
pub use config_check::MissingParts;
