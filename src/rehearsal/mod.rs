//! A rehearsal: the user's own job is run, snapshotted, killed and restored in a separate folder, and its output and
//! files are compared. The user's store is not touched; the files that the job writes are really written.
//!
//! ```text
//! rehearse ──▶ acts (in order) ──▶ trial        an ordinary supervisor in a temporary folder
//!                              ──▶ signs, look  the job's activity: processes, CPU time, output
//!                              ──▶ compare      output and files before the kill and after the restore
//!          ──▶ Report, with the resulting interval
//! ```
//! The rehearsal uses the supervisor as a user does, over the control socket and the event log. It does not know how
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
