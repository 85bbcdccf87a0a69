//! The supervisor: starts the job, takes snapshots, restores it, ends with its exit code.
//!
//! Start reading at [`run`](run::run), then `supervise` (the loop and its states), `beginnings` and `endings`,
//! `snapshot` and `restore` (the two ways, phase by phase).

mod beginnings;
mod candidates;
mod chronicle;
mod computing;
mod control;
mod diagnosis;
mod endings;
mod event;
#[cfg(any(fuzzing, test))]
pub(crate) mod fuzz;
mod ground;
pub mod hang;
mod hang_sampler;
mod hang_watch;
mod hook;
mod hooks;
pub mod interval;
mod leash;
mod metrics;
mod notify;
mod operation;
mod pauses;
pub(crate) mod progress_line;
mod requests;
pub mod restart;
mod run;
pub mod schedule;
mod signals;
mod status;
mod stop;
mod stopping;
mod supervise;
mod terminal;
mod timing;

pub use control::{
    ControlError, request_pause, request_snapshot, request_status, request_stop, request_unpause,
};

pub use run::{RunError, RunOptions, What, run};

pub use status::{State, Status, StatusError, status_of_store};

pub use timing::seen_in;
