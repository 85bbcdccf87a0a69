//! The loop's reactions to events: methods of `Supervisor`, one file per family of events.

pub(super) mod background;
pub(super) mod exits;
pub(super) mod failed_restores;
pub(super) mod pauses;
pub(super) mod restorable_images;
pub(super) mod signals;
pub(super) mod snapshot_timer;
pub(super) mod snapshots;
pub(super) mod starts;
