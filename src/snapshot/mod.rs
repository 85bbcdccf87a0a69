//! A snapshot: from the first check of the job to the durable image.
//!
//! `take_snapshot` is the entry, `freeze` the part in which the job is frozen, `dump` and `criu_dump` the part
//! that CRIU does. Blocks; the supervisor calls it on a thread of its own and knows nothing of its phases.

pub(crate) mod criu_dump;
pub(crate) mod criu_log;
pub(crate) mod disk_space;
pub(crate) mod dump;
pub(crate) mod error;
pub(crate) mod freeze;
pub(crate) mod job_facts;
pub(crate) mod paused;
pub(crate) mod take_snapshot;

pub use disk_space::policy;
pub use error::SnapshotError;
