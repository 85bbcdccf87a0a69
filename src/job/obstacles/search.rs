//! Search for an obstacle to a snapshot.
//!
//! ```text
//! before the freeze   every kind
//! tasks frozen        kinds that are found at once and that CRIU does not report itself
//! ```
//! The kinds do not use this file.

use super::obstacle::Obstacle;
use super::{
    covered, descriptor_numbers, ends, first_threads, hugetlb, leases, mappings, namespaces,
    proc_files, removed, reopened, sessions, strays, terminals, watches,
};
use crate::job::descriptors::Descriptors;
use crate::job::sockets;
use crate::job::tree::{self, Process, TreeError};

/// The moment of a search.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum When {
    /// The job computes.
    Ahead,
    /// The tasks are frozen: kinds that take longer to find, and kinds that CRIU reports itself, are omitted.
    Frozen,
}

/// Looks for the first obstacle in the job's processes, which have `open` open; the first of them is the root of the tree.
/// A process that exits meanwhile has none. `sandbox` is pid 1 of the sandbox, as the host sees it.
///
/// # Errors
/// The processes of the sandbox cannot be read.
pub fn find_obstacle(
    sandbox: i32,
    processes: &[Process],
    open: &[Descriptors],
    when: When,
) -> Result<Option<Obstacle>, TreeError> {
    if let Some(stray) = strays::find(sandbox, processes)? {
        return Ok(Some(stray));
    }
    let stat = |one: &Process| Some((*one, tree::stat(one.host_pid).ok()?));
    let stats: Vec<_> = processes.iter().filter_map(stat).collect();
    let found = sessions::find(&stats)
        .or_else(|| leases::find(open))
        .or_else(|| namespaces::find(processes))
        .or_else(|| proc_files::find(processes, open))
        .or_else(|| watches::find(open))
        .or_else(|| terminals::find(open))
        .or_else(|| ends::find(&stats))
        .or_else(|| removed::find(&stats, open))
        .or_else(|| removed::find_moved_sockets(open))
        .or_else(|| leases::find_signalled_thread(open));
    Ok(match when {
        When::Ahead => found
            .or_else(|| first_threads::find(processes))
            .or_else(|| covered::find(processes, open))
            .or_else(|| reopened::find(open))
            .or_else(|| hugetlb::find(processes))
            .or_else(|| mappings::find(processes))
            .or_else(|| descriptor_numbers::find(open))
            .or_else(|| sockets::find_unknown_kind(open)),
        When::Frozen => found,
    })
}
