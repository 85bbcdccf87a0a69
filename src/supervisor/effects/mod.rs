//! Effects: the actions of the machine are carried out here, and nothing is decided.
//!
//! Blocking work runs on threads of its own, which report their results as messages to the loop.

mod job_start;
mod meter;
pub(super) mod perform;
mod threads;
