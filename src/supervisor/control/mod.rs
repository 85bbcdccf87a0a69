//! The control socket: other processes request snapshots, pauses, the status and the end of a run.

pub(super) mod client;
#[cfg(any(fuzzing, test))]
pub(crate) mod fuzz_control;
pub(super) mod server;
