#![allow(unsafe_code, reason = "an ioctl that no library has")]
//! Terminals that the job has created, and whose programs have all ended.
//!
//! The kernel tells the end of the last program to the creator: its reads fail (EIO), as `script` and pexpect expect. CRIU
//! (4.2) opens only the creator's end again, which then waits for a program for ever. Before the restored processes run,
//! the other end is opened and closed.

use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};

use nix::libc::{O_CLOEXEC, O_NOCTTY, O_RDWR, TIOCGPTPEER};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use serde::{Deserialize, Serialize};

use crate::checked;
use crate::job::descriptors::Descriptors;
use crate::job::nodes::Borrower;
use crate::job::tree::Process;

nix::ioctl_write_int_bad!(
    /// Opens the other end of a terminal.
    open_other_end,
    TIOCGPTPEER
);

/// Limit on the time until a closed end is closed: a process that another thread has just forked has it, too, until it
/// executes its program.
const CLOSING_MS: u16 = 2000;

/// Creator's end of a terminal without programs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HungUp {
    /// Pid as the job sees it.
    #[serde(deserialize_with = "checked::pid")]
    pub pid: i32,
    /// The descriptor in that process.
    #[serde(deserialize_with = "checked::descriptor")]
    pub descriptor: i32,
}

/// Lists the terminals of frozen processes whose programs have ended.
#[must_use]
pub fn hung_up_terminals(open: &[Descriptors]) -> Vec<HungUp> {
    let mut found = Vec::new();
    for Descriptors { process, all } in open {
        let ends = all.iter().filter(|one| one.is_terminals_first_end());
        let hung_up = ends.filter(|one| {
            let end = Borrower::new(process.host_pid).and_then(|it| it.borrow(one.number));
            end.is_some_and(|end| has_hung_up(&end, PollTimeout::ZERO))
        });
        found.extend(hung_up.map(|one| HungUp {
            pid: process.pid,
            descriptor: one.number,
        }));
    }
    found
}

/// Tells the ends of their programs to the creators in the restored `processes`. Returns a line for each failure.
#[must_use]
pub fn hang_up_terminals(recorded: &[HungUp], processes: &[Process]) -> Vec<String> {
    let failed = |it: &&HungUp| {
        let process = processes.iter().find(|process| process.pid == it.pid);
        let borrower = process.and_then(|process| Borrower::new(process.host_pid));
        // A process that has exited needs nothing.
        let end = borrower.and_then(|process| process.borrow(it.descriptor));
        end.is_some_and(|end| !hang_up(&end))
    };
    let line = |it: &HungUp| {
        let HungUp { pid, descriptor } = it;
        format!(
            "process {pid} does not learn that the programs in its terminal (descriptor {descriptor}) have ended"
        )
    };
    recorded.iter().filter(failed).map(line).collect()
}

fn hang_up(end: &OwnedFd) -> bool {
    if has_hung_up(end, PollTimeout::ZERO) {
        return true; // by another descriptor
    }
    let Some(other) = other_end(end) else {
        return false;
    };
    drop(other);
    has_hung_up(end, PollTimeout::from(CLOSING_MS))
}

fn other_end(end: &impl AsRawFd) -> Option<OwnedFd> {
    let flags = O_RDWR | O_NOCTTY | O_CLOEXEC;
    // SAFETY: flags, without pointers.
    let other = unsafe { open_other_end(end.as_raw_fd(), flags) }.ok()?;
    // SAFETY: the kernel has just installed this descriptor for this process; it has no other owner.
    Some(unsafe { OwnedFd::from_raw_fd(other) })
}

fn has_hung_up(end: &impl AsFd, limit: PollTimeout) -> bool {
    let mut asked = [PollFd::new(end.as_fd(), PollFlags::empty())];
    poll(&mut asked, limit).is_ok()
        && asked[0]
            .revents()
            .is_some_and(|events| events.contains(PollFlags::POLLHUP))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::job::tree::describe;
    use nix::fcntl::OFlag;
    use nix::pty::{grantpt, posix_openpt, unlockpt};

    #[test]
    fn a_terminal_hangs_up_once_its_other_end_was_closed() {
        let pid = i32::try_from(std::process::id()).unwrap();
        let new = || {
            let flags = OFlag::O_RDWR | OFlag::O_NOCTTY | OFlag::O_CLOEXEC;
            let end = posix_openpt(flags).unwrap();
            grantpt(&end).unwrap();
            unlockpt(&end).unwrap();
            end
        };
        let is_listed = |descriptor| {
            let found = hung_up_terminals(&[Descriptors::of(pid).unwrap()]);
            found.contains(&HungUp { pid, descriptor })
        };
        let (end, restored) = (new(), new());
        let other = other_end(&end);
        assert!(other.is_some() && !is_listed(end.as_raw_fd()));
        drop(other);
        // Other tests fork.
        assert!(has_hung_up(&end, PollTimeout::NONE));
        assert!(is_listed(end.as_raw_fd()) && !is_listed(restored.as_raw_fd()));
        let descriptor = restored.as_raw_fd();
        for _ in 0..2 {
            let own = describe(pid).unwrap();
            assert_eq!(
                hang_up_terminals(&[HungUp { pid, descriptor }], &[own]),
                [""; 0]
            );
            assert!(is_listed(descriptor));
        }
    }
}
