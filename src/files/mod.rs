//! The files that a job writes, open or closed: the record of changes, the files kept in an image, and the rollback to
//! it.
//!
//! ```text
//! watcher (in the sandbox) ── fanotify ──▶ record (lines in the store) ──▶ Record: per path, who wrote and when
//! snapshot, job frozen:  Record + previous set ──▶ changes ──▶ contents, KeptFiles
//! restore:               KeptFiles + Record    ──▶ Rollback: checked first, then executed
//! ```
//! Files that are open at the snapshot are also in the list of module `job`, because CRIU opens them by name.

mod attributes;
mod changes;
mod describe;
mod fanotify;
mod file_comparison;
mod file_set;
mod folder_scan;
mod held;
mod job_files;
mod job_links;
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
pub use file_comparison::SpareContents;
pub use file_set::{Content, KeptFile, KeptFiles, Kind, StreamPlace, Unkept, Writer, is_in_memory};
pub use held::Held;
pub(crate) use job_files::REPORTS_ONLY;
pub use job_files::{ACCOUNTING, Changes, Choice, ImageFiles, JobFiles, Kept};
pub use lost::{Lost, OnLost, RollbackError};
pub(crate) use marks::mounts_to_report;
pub use put_back::{Done, Sources};
pub(crate) use record::MOUNTS_VARIABLE;
pub use record::changed_by_job;
pub use record_line::obituary;
pub use rollback::Rollback;
pub use watcher::{LOG_DESCRIPTOR, WATCHER_ARGUMENT, main as watcher_main};
