//! Choice of a place for a line of ckpt-run that splits none of the job's lines.

use std::os::fd::AsFd;

use nix::poll::{PollFd, PollFlags, poll};

use super::State;

/// Milliseconds for which a line of ckpt-run waits for the rest of the job's line. The kernel needs less time to wake
/// and schedule a writer that was blocked by a full terminal. A snapshot takes much longer, and at worst waits for
/// this.
const PLACE_WAIT: u8 = 20;
/// Limit on the reads that search for the end of a job's line. A line that is still longer is split.
const PLACE_READS_MAX: usize = 8;

impl State {
    /// Searches for a place where a line of ckpt-run splits no line of the job. If the job writes faster than ckpt-run
    /// reads, all data read so far may end within a line. Returns the bytes after that place; those before it are
    /// pending.
    pub(super) fn make_place(&mut self) -> Vec<u8> {
        for _ in 0..PLACE_READS_MAX {
            if !self.replay.is_inside_line() || !self.writes_more() {
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

    /// Returns true if the job writes more within [`PLACE_WAIT`].
    fn writes_more(&self) -> bool {
        let Some(source) = &self.source else {
            return false;
        };
        let mut watched = [PollFd::new(source.as_fd(), PollFlags::POLLIN)];
        poll(&mut watched, PLACE_WAIT).is_ok_and(|ready| ready > 0)
    }
}

/// Returns the last offset at which a line begins or is redrawn.
fn last_place(bytes: &[u8]) -> Option<usize> {
    let place = bytes
        .iter()
        .rposition(|byte| *byte == b'\n' || *byte == b'\r')?;
    Some(place + usize::from(bytes[place] == b'\n'))
}
