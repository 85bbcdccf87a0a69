//! Attributes of the job's threads that CRIU (4.2) does not restore: the CPUs that they may run on, the I/O priority, the
//! timer slack, the memory policy, the execution domain, and what a core file contains.
//!
//! A thread inherits them at its creation, so a restored thread has those of ckpt-run. An image records what is different
//! from that: what the job, or the command that started it (`taskset`, `ionice`), has set.

mod cpus;
mod memory_policy;
mod thread_attributes;

pub use thread_attributes::{ThreadAttributes, give_back_attributes, record_attributes};
