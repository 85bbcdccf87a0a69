//! The files that a job writes, open or closed: who wrote what, which of them an image keeps, and how a restore makes
//! them equal to the snapshot.
//!
//! ```text
//! watcher (in the sandbox) ── fanotify ──▶ record (lines in the store) ──▶ Record: per path, who wrote and when
//! snapshot, job frozen:  Record + previous set ──▶ what changed ──▶ contents, KeptFiles
//! restore:               KeptFiles + Record    ──▶ Rollback: checked first, then carried out
//! ```
//! The files that the job has open at the snapshot are in `job`'s list as well, because CRIU opens them by name.

mod attributes;
mod changes;
mod describe;
mod fanotify;
mod file_set;
mod folder_scan;
mod held;
mod job_files;
mod lost;
mod marker;
mod marks;
mod passing;
mod patterns;
mod put_back;
mod record;
mod record_line;
mod rollback;
#[cfg(test)]
mod rollback_tests;
mod watcher;

pub use changes::{OpenUse, OpenUses, SoFar};
pub use file_set::{Content, Kept, KeptFile, KeptFiles, Kind, Unkept, Writer, is_in_memory};
pub use held::Held;
pub use job_files::{Changes, Choice, JobFiles};
pub use lost::{Lost, OnLost, RollbackError};
pub use put_back::Sources;
pub use record::changed_by_job;
pub use rollback::Rollback;
pub use watcher::{LOG_DESCRIPTOR, WATCHER_ARGUMENT, main as watcher_main, obituary};
