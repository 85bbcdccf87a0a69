//! What kinds of processes and resources survive: each job uses one kind throughout, is snapshotted and killed in
//! the middle, restored, and must end like a run that was never interrupted.

#[path = "../common/mod.rs"]
mod common;

mod devices;
mod events;
mod files;
mod folders;
mod memory;
mod processes;
mod rounds;
mod sockets;
mod survival;
mod system_v;
