//! A rehearsal: the user's own job is run, snapshotted, killed and restored in a place of its own, and what can be
//! compared is compared. Nothing of the user's store is touched; the files that the job writes are really written.
//!
//! ```text
//! rehearse ──▶ acts (in order) ──▶ trial        a supervisor like any other, in a temporary folder
//!                              ──▶ signs, look  what the job does: processes, CPU time, output
//!                              ──▶ compare      output and files before the kill and after the restore
//!          ──▶ Report, with the interval that follows
//! ```
//! It asks the supervisor as any user does, over the control socket and the event log, and knows nothing of how
//! snapshots are taken.

mod acts;
mod compare;
mod equal;
mod error;
mod look;
mod rehearsal_report;
mod remedy;
mod run_rehearsal;
mod signs;
mod trial;

pub use error::RehearsalError;
pub use rehearsal_report::{Compared, Equality, Failure, Figures, Outcome, Report, Step};
pub use run_rehearsal::{Options, rehearse};
