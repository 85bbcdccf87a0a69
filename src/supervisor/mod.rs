//! The loop that owns the job, and the policies it asks.

pub mod restart;
pub mod schedule;
