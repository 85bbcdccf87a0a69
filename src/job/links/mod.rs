//! Hard links that CRIU makes for open files without names, and the locks by which jobs take turns in a folder.

mod folder_locks;
mod link_turns;

pub use link_turns::{DumpLock, remove_links};
