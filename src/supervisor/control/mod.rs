//! The control socket: other processes ask the supervisor for snapshots, pauses, its status and its end.

pub(super) mod client;
#[cfg(any(fuzzing, test))]
pub(super) mod fuzz_control;
pub(super) mod server;
