//! The supervisor: starts the job, takes snapshots, restores it, ends with its exit code.
//!
//! Start reading at [`run`], which checks everything and starts the loop in `event_loop`. `decide` contains the state of
//! the run and what each event leads to, `effects` carries it out, `observers` report it. `policy` contains calculations
//! that decisions use. `preemption` asks clouds if they take the machine back.

pub(crate) mod control;
mod decide;
mod effects;
mod error;
mod event_loop;
pub(crate) mod hang;
pub(crate) mod hooks;
mod inbox;
mod notice;
pub(crate) mod observers;
pub(crate) mod policy;
mod preemption;
mod run_job;

pub use control::client::{
    ControlError, request_pause, request_snapshot, request_status, request_stop, request_unpause,
};

pub use error::RunError;
pub use run_job::{RunOptions, What, run};

pub use preemption::announcement::{Action, Announcement, Cloud};

pub use observers::run_phase::State;
pub use observers::run_status::{Status, status_of_store};

pub use decide::snapshot_timer::seen_in;
