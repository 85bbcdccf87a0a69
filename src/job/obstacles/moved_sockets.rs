//! Unix sockets whose file no longer has the name by which it was bound.
//!
//! CRIU (4.2) binds a socket again by that name. It neither renames nor links the file afterwards: programs would connect to
//! the file that is at the present name, which belongs to no socket then, and fail (ECONNREFUSED).

use super::{Finding, Obstacle};
use crate::job::descriptors::Descriptors;
use crate::job::nodes::{Borrower, BoundFile, is_socket};

/// Searches for the first such socket.
pub(super) fn find(open: &[Descriptors]) -> Option<Obstacle> {
    for Descriptors { process, all } in open {
        let mut sockets = all.iter().filter(|one| is_socket(&one.target)).peekable();
        if sockets.peek().is_none() {
            continue;
        }
        let Some(borrower) = Borrower::new(process.host_pid) else {
            continue;
        };
        let finding = sockets.find_map(|one| match borrower.file_to_bind(one.number)? {
            BoundFile::At(_) => None,
            BoundFile::Moved { name, path } => Some(Finding::MovedSocket { name, path }),
            BoundFile::Linked { name } => Some(Finding::LinkedSocket(name)),
            BoundFile::Lost(name) => Some(Finding::LostSocket(name)),
        });
        if let Some(finding) = finding {
            return Some(Obstacle::of(process, finding));
        }
    }
    None
}
