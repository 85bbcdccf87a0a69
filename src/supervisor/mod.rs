//! The supervisor: starts the job, takes snapshots, restores it, ends with its exit code.
//!
//! Start reading at [`run`](run::run), then `supervise` (the loop and its states), `beginnings` and `endings`,
//! `snapshot` and `restore` (the two ways, phase by phase).

mod beginnings;
mod candidates;
mod carried;
mod chronicle;
mod computing;
mod control;
mod diagnosis;
pub mod doctor;
mod dump;
mod dump_end;
mod dump_log;
mod dumper;
mod endings;
mod event;
mod freeze;
#[cfg(any(fuzzing, test))]
pub(crate) mod fuzz;
mod ground;
pub mod hang;
mod hang_sampler;
mod hang_watch;
mod hook;
mod hooks;
mod huge_pages;
pub mod interval;
mod lacks;
mod leash;
mod metrics;
mod notify;
mod operation;
mod pause;
mod pauses;
mod privileges;
pub(crate) mod progress_line;
mod record;
mod requests;
pub mod restart;
mod restore;
mod restore_error;
mod restore_gpu;
mod room;
mod run;
pub mod schedule;
mod signals;
mod snapshot;
mod snapshot_error;
mod status;
mod stop;
mod stopping;
mod supervise;
mod terminal;
mod timing;

pub use carried::companions;
pub use control::{
    ControlError, request_pause, request_snapshot, request_status, request_stop, request_unpause,
};

pub use lacks::Lacks;

pub use restore_error::RestoreError;
pub use room::policy;
pub use run::{RunError, RunOptions, What, run};

pub use snapshot_error::SnapshotError;
pub use status::{State, Status, StatusError, status_of_store};

pub use timing::seen_in;
