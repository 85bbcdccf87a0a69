//! The supervisor: starts the job, takes snapshots, restores it, ends with its exit code.
//!
//! Start reading at [`run`], which checks everything and hands over to the loop in `event_loop`. `handlers` contains the
//! loop's reactions to events, `policy` its decisions, `observers` its reports to the outside.

pub(crate) mod control;
mod error;
mod event;
mod event_loop;
#[cfg(any(fuzzing, test))]
pub(crate) mod fuzz_supervisor;
pub(crate) mod handlers;
pub(crate) mod hang;
pub(crate) mod hooks;
pub(crate) mod observers;
pub(crate) mod policy;
mod run_job;
mod stage;

pub use control::client::{
    ControlError, request_pause, request_snapshot, request_status, request_stop, request_unpause,
};

pub use error::RunError;
pub use run_job::{RunOptions, What, run};

pub use observers::run_phase::State;
pub use observers::run_status::{Status, StatusError, status_of_store};

pub use handlers::snapshot_timer::seen_in;
