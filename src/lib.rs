//! Supervises a GPU job on Linux: snapshots it on a schedule or a signal,
//! restores it when it crashes, and never changes the job.
//!
//! The command line is a thin layer over this library.

pub mod cli;
pub mod clock;
pub mod config;
pub mod criu;
pub mod cuda;
pub mod job;
pub mod sandbox;
pub mod store;
pub mod supervisor;
pub mod telemetry;
