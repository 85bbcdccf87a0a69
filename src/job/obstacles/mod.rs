//! State of the job that CRIU cannot dump or restore, or restores as something else, and what a snapshot would harm.
//!
//! It is looked for before a snapshot freezes anything, so that the job does not wait for a refusal, and once more while
//! the tasks are frozen: a process may have come to it in between.

mod covered;
mod hugetlb;
mod leases;
mod namespaces;
mod obstacle;
mod proc_files;
mod search;
mod sessions;
mod strays;
mod watches;

pub use hugetlb::have_huge_pages;
pub use obstacle::{Finding, Obstacle, ProcessName};
pub(super) use proc_files::is_proc_file;
pub use search::{When, find_obstacle};
