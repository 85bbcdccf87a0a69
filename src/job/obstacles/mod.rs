//! State of the job that CRIU cannot dump or does not restore correctly, and state that a snapshot would damage.
//!
//! The search runs before a snapshot freezes the job, so that a refused snapshot causes no interruption. It runs again
//! while the job is frozen, because such state may have appeared in between.

mod covered;
mod descriptor_numbers;
mod ends;
mod first_threads;
mod hugetlb;
mod leases;
mod mappings;
mod mount_tree;
mod namespaces;
mod obstacle;
mod proc_files;
mod removed;
mod reopened;
mod search;
mod sessions;
mod strays;
mod terminals;
mod unmounted;
mod watches;

pub use ends::{ExitCode, exit_codes};
pub use hugetlb::have_huge_pages;
pub use obstacle::{Finding, Obstacle, ProcessName};
pub(super) use proc_files::is_proc_file;
pub use search::{When, find_obstacle};
pub use unmounted::find_unmounted;
