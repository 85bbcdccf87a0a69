//! Hang detection: samples of the job, the rules by which it counts as hung, and what is done then.

pub mod detector;
pub(super) mod sampler;
pub(super) mod stack_report;
pub(super) mod watchdog;
