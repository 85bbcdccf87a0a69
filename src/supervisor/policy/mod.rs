//! Decisions of the supervisor as pure functions: no I/O, no threads, and the time comes as an argument.

pub(super) mod compute_clock;
pub(super) mod crash_progress;
pub mod interval;
pub mod restart;
pub mod schedule;
