//! A snapshot: from the first check of the job to the durable image.
//!
//! `take_snapshot` is the entry point, `freeze` the part in which the job is frozen, `dump` and `criu_dump` are CRIU's
//! part. A snapshot blocks; the supervisor runs it on a separate thread and does not know its phases.

mod appended_files;
mod contents;
pub(crate) mod criu_dump;
pub(crate) mod criu_log;
pub(crate) mod disk_space;
pub(crate) mod dump;
mod durable_files;
pub(crate) mod error;
pub(crate) mod freeze;
pub(crate) mod job_facts;
mod kept_files;
mod long_freeze;
pub(crate) mod paused;
mod postponement;
pub(crate) mod take_snapshot;

pub use disk_space::policy;
pub use error::SnapshotError;
