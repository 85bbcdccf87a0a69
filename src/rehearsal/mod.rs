//! Rehearsal: the user's own job is run, snapshotted, killed and restored, and compared with two uninterrupted runs.
//! Each run has its own copy of the working folder. The user's store is not touched.
//!
//! ```text
//! rehearse ──▶ copies (folder_copy)  a fresh copy of the working folder, mounted over it
//!          ──▶ acts, then after_restore ──▶ trial        an ordinary supervisor in a temporary folder
//!                                   ──▶ signs, job_sample  the job's activity: processes, CPU time, output
//!                                   ──▶ before_kill  output and open files before the kill and after the restore
//!                                   ──▶ not_kept     content of the image
//!          ──▶ uninterrupted (twice) ──▶ trial
//!          ──▶ agreement ──▶ output_match, folder_content, outside
//!          ──▶ Report, with the verdict and the resulting interval
//! ```
//! The rehearsal uses the supervisor as a user does, over the control socket, the event log and the store. It does not
//! know how snapshots are taken.

mod acts;
mod after_restore;
mod agreement;
mod before_kill;
mod copies;
mod error;
mod folder_content;
mod folder_copy;
mod job_sample;
mod not_kept;
mod output_match;
mod outside;
mod rehearsal_report;
mod remedy;
mod run_rehearsal;
mod signs;
mod trial;
mod uninterrupted;

pub use error::RehearsalError;
pub use not_kept::NotKept;
pub use rehearsal_report::{Compared, Equality, Failure, Figures, Outcome, Report, Step, Verdict};
pub use run_rehearsal::{Options, rehearse};
