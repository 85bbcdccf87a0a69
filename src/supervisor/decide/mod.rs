//! The decisions of the loop: a state machine without I/O, clock and threads.
//!
//! ```text
//! Event, Now ──▶ Machine::on ──▶ Vec<Action>
//! ```
//! [`state_machine`] has the state and the table of events; each other file decides about one family of events. An action is
//! carried out by `effects`, which reports its result as another event. Tests drive the machine with random events.

pub(super) mod action;
pub(super) mod event;
mod exits;
mod pauses;
mod restorable_images;
mod restores;
pub(super) mod snapshot_timer;
mod snapshots;
pub(super) mod stage;
pub(super) mod state_machine;
mod stops;
mod suspicion;
#[cfg(test)]
mod tests;
#[cfg(test)]
mod world;
#[cfg(test)]
mod world_steps;
