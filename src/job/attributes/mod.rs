//! Attributes of the job's threads that CRIU (4.2) does not restore: CPU affinity, I/O priority, timer slack, memory
//! policy, execution domain, core file filter, and control groups. Also record locks on mapped files, and terminals whose
//! programs have ended.
//!
//! A thread inherits them when it is created, so a restored thread has the attributes of ckpt-run. An image records the
//! differences: attributes set by the job, or by the command that started it (`taskset`, `ionice`).

mod control_groups;
mod cpus;
mod hung_up;
mod mapped_locks;
mod memory_policy;
mod thread_attributes;

pub use hung_up::{HungUp, hang_up_terminals, hung_up_terminals};
pub use mapped_locks::{MappedLock, mapped_locks};
pub use thread_attributes::{ThreadAttributes, give_back_attributes, record_attributes};
