//! Unread data in terminals that the job has created.
//!
//! CRIU (4.2) reads such data and writes it into the terminal again, through its line discipline: some of it is lost, changed,
//! or acts as keys. The plugin keeps CRIU from that, so an image has none of it, and a terminal must be empty. The kernel does
//! not show a line that was typed in part.

use std::collections::HashSet;
use std::os::fd::AsFd;

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use super::{Finding, Obstacle};
use crate::job::descriptors::{Descriptor, Descriptors};
use crate::job::nodes::Borrower;

/// Searches for the first terminal with unread data, of those whose other end the job has.
pub(super) fn find(open: &[Descriptors]) -> Option<Obstacle> {
    let ours: HashSet<u32> = open
        .iter()
        .flat_map(|of| &of.all)
        .filter_map(created)
        .collect();
    if ours.is_empty() {
        return None;
    }
    // Each end is looked at once.
    let mut seen = HashSet::new();
    open.iter().find_map(|of| {
        let ends = of.all.iter().filter_map(|one| {
            let number = created(one).or_else(|| opened(one).filter(|it| ours.contains(it)))?;
            Some((one, number))
        });
        let mut new = ends.filter(|(one, number)| seen.insert((opened(one).is_some(), *number)));
        let (_, number) = new.find(|(one, _)| has_unread(of.process.host_pid, one))?;
        Some(Obstacle::of(&of.process, Finding::Terminal(number)))
    })
}

/// Returns the number of the terminal whose first end ("master") this is.
fn created(descriptor: &Descriptor) -> Option<u32> {
    let info = descriptor
        .is_terminals_first_end()
        .then(|| descriptor.info())?;
    let number = info
        .lines()
        .find_map(|line| line.strip_prefix("tty-index:"))?;
    number.trim().parse().ok()
}

/// Returns the number of the terminal that programs have open by this descriptor.
fn opened(descriptor: &Descriptor) -> Option<u32> {
    let name = descriptor.target.strip_prefix("/dev/pts").ok()?;
    name.to_str()?.parse().ok()
}

/// Returns true if data, or the end of a file that was typed, can be read.
fn has_unread(pid: i32, descriptor: &Descriptor) -> bool {
    let Some(end) = Borrower::new(pid).and_then(|it| it.borrow(descriptor.number)) else {
        return false;
    };
    let mut asked = [PollFd::new(end.as_fd(), PollFlags::POLLIN)];
    let is_ready = poll(&mut asked, PollTimeout::ZERO).is_ok()
        && asked[0]
            .revents()
            // A hung-up terminal reports both, and has nothing.
            .is_some_and(|events| {
                events.contains(PollFlags::POLLIN) && !events.contains(PollFlags::POLLERR)
            });
    // A terminal may report that it is ready only when it has as much as its program wants (VMIN).
    is_ready || rustix::io::ioctl_fionread(&end).is_ok_and(|bytes| bytes > 0)
}
