//! What an image says of device memory that is in it apart from the processes.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

/// Longest part of a segment in one stream of an image: parts are read and written in parallel, and end together if they
/// are short.
const PART_BYTES: u64 = 64 << 20;
/// That of images which do not say it.
const PART_BYTES_UNSAID: u64 = 256 << 20;
/// Shorter parts make more streams than there can be.
const PART_BYTES_MIN: u64 = 1 << 20;
/// Most segments that an image may name; an agent has 16,384.
const SEGMENTS_MAX: usize = 1 << 20;

/// Device memory in an image, process by process.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ResidentFacts {
    /// The processes that it belongs to.
    pub processes: Vec<ResidentProcess>,
    /// Longest part of a segment in one stream, bytes.
    #[serde(default = "part_bytes_unsaid")]
    pub part_bytes: u64,
}

fn part_bytes_unsaid() -> u64 {
    PART_BYTES_UNSAID
}

/// Device memory of a process.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ResidentProcess {
    /// Pid as the job sees it.
    pub pid: i32,
    /// In the order in which its agent let go of them.
    pub segments: Vec<ResidentSegment>,
}

/// A piece of device memory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ResidentSegment {
    /// Where the process has it mapped.
    pub address: u64,
    /// Bytes.
    pub len: u64,
    /// UUID of its GPU, as `GPU-…`.
    pub gpu: String,
}

/// A part of a segment and the stream that holds it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Part {
    /// Number of the segment among those of all processes.
    pub segment: usize,
    pub begin: u64,
    pub end: u64,
    pub stream: String,
}

impl ResidentFacts {
    pub(super) fn new(processes: Vec<ResidentProcess>) -> Self {
        Self {
            processes,
            part_bytes: PART_BYTES,
        }
    }

    /// All parts, in order.
    pub(super) fn parts(&self) -> Vec<Part> {
        let step = usize::try_from(self.part_bytes).unwrap_or(usize::MAX);
        let mut parts = Vec::new();
        let mut number = 0;
        for process in &self.processes {
            for (index, segment) in process.segments.iter().enumerate() {
                let pid = process.pid;
                let begins = (0..segment.len).step_by(step);
                parts.extend(begins.map(|begin| Part {
                    segment: number,
                    begin,
                    end: segment.len.min(begin + self.part_bytes),
                    stream: format!("gpu/{pid}/{index}/{}", begin / self.part_bytes),
                }));
                number += 1;
            }
        }
        parts
    }

    /// All segments, in order.
    pub(super) fn segments(&self) -> impl Iterator<Item = &ResidentSegment> {
        self.processes.iter().flat_map(|process| &process.segments)
    }

    /// Device memory in all, bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.segments()
            .fold(0, |sum, segment| sum.saturating_add(segment.len))
    }

    /// Whether an image can have told this; what is read from a disk is not believed.
    pub(super) fn is_sane(&self) -> bool {
        let pids: BTreeSet<i32> = self.processes.iter().map(|process| process.pid).collect();
        self.part_bytes >= PART_BYTES_MIN
            && pids.len() == self.processes.len()
            && self.segments().count() <= SEGMENTS_MAX
            && self.segments().all(|segment| {
                segment.len > 0 && segment.address.checked_add(segment.len).is_some()
            })
            && self.bytes() < u64::MAX
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn facts(lens: &[u64]) -> ResidentFacts {
        let segment = |len: &u64| ResidentSegment {
            address: 1 << 40,
            len: *len,
            gpu: String::new(),
        };
        let process = |pid| ResidentProcess {
            pid,
            segments: lens.iter().map(segment).collect(),
        };
        ResidentFacts::new(vec![process(300), process(301)])
    }

    #[test]
    fn parts_cover_every_byte_once() {
        let facts = facts(&[1, PART_BYTES, PART_BYTES + 1]);
        let parts = facts.parts();
        let streams: Vec<&str> = parts.iter().map(|part| &*part.stream).collect();
        assert_eq!(
            streams[..5],
            [
                "gpu/300/0/0",
                "gpu/300/1/0",
                "gpu/300/2/0",
                "gpu/300/2/1",
                "gpu/301/0/0"
            ]
        );
        let lens = parts.iter().map(|part| part.end - part.begin);
        assert_eq!(lens.sum::<u64>(), facts.bytes());
        assert_eq!(parts.last().map(|part| part.segment), Some(5));
    }

    #[test]
    fn images_that_do_not_say_it_have_parts_of_256_mib() {
        let old: ResidentFacts = serde_json::from_str(r#"{"processes":[]}"#).unwrap();
        assert_eq!(old.part_bytes, 256 << 20);
    }

    #[test]
    fn nonsense_is_told_from_facts() {
        assert!(facts(&[1, 2]).is_sane() && facts(&[]).is_sane());
        for lens in [&[0][..], &[u64::MAX - 5, 6], &[u64::MAX]] {
            assert!(!facts(lens).is_sane(), "{lens:?}");
        }
        let mut short = facts(&[1]);
        short.part_bytes = 0;
        assert!(!short.is_sane());
        let mut twice = facts(&[1]);
        twice.processes[1].pid = twice.processes[0].pid;
        assert!(!twice.is_sane());
    }
}
