//! (in progress)

pub mod restart;
pub mod schedule;
