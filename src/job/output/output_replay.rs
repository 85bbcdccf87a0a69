//! Detection of a restored job's output that was already delivered before the crash.
//!
//! A restored job repeats its output between the snapshot and the crash. Bytes written to a pipe or a terminal cannot
//! be removed, so the repetition is suppressed line by line, as long as it is identical. From the first different line
//! on, all output is delivered.

use std::collections::VecDeque;

/// Limit on the stored delivered output per stream. If a job writes more between two snapshots, its repetition is
/// delivered a second time.
const HISTORY_BYTES_MAX: usize = 4 << 20;

/// Most recently delivered bytes of one stream, and the position of a repetition.
#[derive(Clone, Debug, Default)]
pub(super) struct Replay {
    /// The most recent bytes, up to position `end`.
    history: VecDeque<u8>,
    /// Bytes delivered of the stream, as in an uninterrupted run.
    end: u64,
    /// Position of the next byte from the job; less than `end` while the job repeats output.
    next: u64,
    /// Unfinished line of the repetition, equal to the history so far.
    held: Vec<u8>,
    /// Count of delivered bytes at the last line of another writer.
    foreign_line: Option<u64>,
}

impl Replay {
    /// Returns the position of the next byte from the job.
    pub fn position(&self) -> u64 {
        self.next
    }

    /// Returns the number of bytes that were delivered after `position`.
    pub fn delivered_since(&self, position: u64) -> Option<u64> {
        self.end.checked_sub(position)
    }

    /// Returns true if the job may be within a line, which a line of another writer would split.
    pub fn is_inside_line(&self) -> bool {
        let last = self.history.back();
        self.foreign_line != Some(self.end) && last.is_some_and(|byte| !is_line_end(*byte))
    }

    /// Records that another writer now writes a line to the same sink. Returns true if that line begins on a new line.
    pub fn begin_foreign_line(&mut self) -> bool {
        self.begin_foreign_line_after(is_line_end)
    }

    /// Same as `begin_foreign_line`, for a terminal, which still shows the text before a `\r`.
    pub fn begin_foreign_line_on_terminal(&mut self) -> bool {
        self.begin_foreign_line_after(|byte| byte == b'\n')
    }

    fn begin_foreign_line_after(&mut self, is_end: impl Fn(u8) -> bool) -> bool {
        let before = self.foreign_line.replace(self.end);
        before == Some(self.end) || self.history.back().is_none_or(|byte| is_end(*byte))
    }

    /// Continues from `position`. Later output is a repetition where the history covers it.
    pub fn rewind(&mut self, position: u64) {
        self.held.clear();
        let oldest = self.end - self.history.len() as u64;
        if (oldest..=self.end).contains(&position) {
            self.next = position;
        } else {
            self.forget(position);
        }
    }

    /// Resets the output to `position` after the sink was truncated. No output will be repeated.
    pub fn forget(&mut self, position: u64) {
        self.history.clear();
        self.held.clear();
        self.end = position;
        self.next = position;
    }

    /// Accepts bytes from the job and returns those to deliver.
    pub fn take(&mut self, bytes: &[u8]) -> Vec<u8> {
        let mut fresh = Vec::new();
        let mut rest = bytes;
        while let Some((&byte, after)) = rest.split_first() {
            if self.next == self.end {
                break;
            }
            rest = after;
            let behind = usize::try_from(self.end - self.next).unwrap_or(usize::MAX);
            if self
                .history
                .len()
                .checked_sub(behind)
                .and_then(|index| self.history.get(index))
                != Some(&byte)
            {
                // The repetition ends here, so its unfinished line is new output.
                fresh.append(&mut self.held);
                fresh.push(byte);
                self.next = self.end;
                break;
            }
            self.next += 1;
            self.held.push(byte);
            if is_line_end(byte) || self.next == self.end {
                self.held.clear();
            }
        }
        fresh.extend_from_slice(rest);
        self.delivered(&fresh);
        fresh
    }

    fn delivered(&mut self, bytes: &[u8]) {
        if bytes.is_empty() {
            return;
        }
        self.history.extend(bytes);
        let excess = self.history.len().saturating_sub(HISTORY_BYTES_MAX);
        self.history.drain(..excess);
        self.end += bytes.len() as u64;
        self.next = self.end;
    }
}

fn is_line_end(byte: u8) -> bool {
    byte == b'\n' || byte == b'\r'
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_repetition_is_suppressed_and_the_stream_continues() {
        let mut replay = Replay::default();
        assert_eq!(replay.take(b"1\n2\n"), b"1\n2\n");
        let mark = replay.position();
        assert_eq!(replay.take(b"3\n4"), b"3\n4");
        replay.rewind(mark);
        assert_eq!(replay.take(b"3\n"), b"");
        assert_eq!(replay.take(b"4\n5\n"), b"\n5\n");
    }

    #[test]
    fn a_line_that_differs_is_delivered_whole() {
        let mut replay = Replay::default();
        replay.take(b"loss 0.5\nloss 0.4\n");
        replay.rewind(0);
        assert_eq!(
            replay.take(b"loss 0.5\nloss 0.3\nend\n"),
            b"loss 0.3\nend\n"
        );
    }

    #[test]
    fn output_older_than_the_history_is_delivered_again() {
        let mut replay = Replay::default();
        replay.take(b"start\n");
        replay.take(&vec![b'x'; HISTORY_BYTES_MAX]);
        replay.rewind(0);
        assert_eq!(replay.take(b"start\n"), b"start\n");
    }

    proptest! {
        #[test]
        fn output_of_a_deterministic_job_is_delivered_once(
            text in proptest::collection::vec(prop_oneof![Just(b'\n'), Just(b'a'), Just(b'b')], 0..200),
            crashes in proptest::collection::vec((0usize..200, 0usize..200), 0..6),
            piece in 1usize..20,
        ) {
            let mut replay = Replay::default();
            let mut heard = Vec::new();
            let run = |replay: &mut Replay, heard: &mut Vec<u8>, from: usize, to: usize| {
                for part in text[from.min(to)..to].chunks(piece) {
                    heard.extend(replay.take(part));
                }
            };
            let mut at = 0;
            for (snapshot, crash) in crashes {
                let snapshot = at.max(snapshot.min(text.len()));
                run(&mut replay, &mut heard, at, snapshot);
                prop_assert_eq!(replay.position(), snapshot as u64);
                let crash = snapshot.max(crash.min(text.len()));
                run(&mut replay, &mut heard, snapshot, crash);
                replay.rewind(snapshot as u64);
                at = snapshot;
            }
            run(&mut replay, &mut heard, at, text.len());
            prop_assert_eq!(heard, text);
        }
    }
}
