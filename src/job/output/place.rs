//! Where a line of ours goes between what the job writes: where it tears none of the job's lines.

use std::os::fd::AsFd;

use nix::poll::{PollFd, PollFlags, poll};

use super::State;

/// Milliseconds that a line of ours waits for the rest of what the job is writing: longer than the kernel takes to wake a writer
/// whose terminal was full and who gets a processor in turn, and little beside a snapshot, which waits for it at worst.
const PLACE_WAIT: u8 = 20;
/// Reads in which the end of a job's line is looked for; one that draws longer lines than these has its line torn.
const PLACE_READS_MAX: usize = 8;

impl State {
    /// Looks for a place for a line of ours that tears nothing: a job that writes faster than we read is met in the
    /// middle of what it draws. Returns what comes after that place; all before it is pending.
    pub(super) fn make_place(&mut self) -> Vec<u8> {
        for _ in 0..PLACE_READS_MAX {
            if !self.replay.is_inside_line() || !self.comes_more() {
                break;
            }
            let before = self.pending.len();
            if !matches!(self.pull(), Ok(true)) {
                break;
            }
            if let Some(piece) = self.pending.get_mut(before)
                && let Some(place) = last_place(piece)
            {
                return piece.split_off(place);
            }
        }
        Vec::new()
    }

    /// Whether the job writes more within a moment.
    fn comes_more(&self) -> bool {
        let Some(source) = &self.source else {
            return false;
        };
        let mut watched = [PollFd::new(source.as_fd(), PollFlags::POLLIN)];
        poll(&mut watched, PLACE_WAIT).is_ok_and(|ready| ready > 0)
    }
}

/// Where in the bytes a line begins or is drawn anew.
fn last_place(bytes: &[u8]) -> Option<usize> {
    let place = bytes
        .iter()
        .rposition(|byte| *byte == b'\n' || *byte == b'\r')?;
    Some(place + usize::from(bytes[place] == b'\n'))
}
