//! The decisions of the loop: a state machine without I/O, clock and threads.
//!
//! ```text
//! Event, Now ──▶ Machine::on ──▶ Vec<Action>
//! ```
//! [`machine`] has the state and the table of events; each other file decides about one family of events. An action is
//! carried out by `effects`, which reports its result as another event. Tests drive the machine with random events.

pub(super) mod action;
pub(super) mod event;
mod exits;
pub(super) mod machine;
mod pauses;
mod restorable_images;
mod restores;
pub(super) mod snapshot_timer;
mod snapshots;
pub(super) mod stage;
mod stops;
mod suspicion;
