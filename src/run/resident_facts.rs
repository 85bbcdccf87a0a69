//! The facts about device memory that an image stores separately from the processes.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

use crate::checked;

/// Longest part of a segment in one stream of an image: parts are read and written in parallel, and finish at about the
/// same time if they are short.
const PART_BYTES: u64 = 64 << 20;
/// Longest part in images that do not record it.
const PART_BYTES_UNSAID: u64 = 256 << 20;
/// Minimum length of a part: shorter parts would make more streams than an image can have.
const PART_BYTES_MIN: u64 = 1 << 20;
/// Stream with the fingerprints of all device memory in an image.
pub(crate) const FINGERPRINTS: &str = "gpu/fingerprints";
/// Limit on the segments in an image; an agent has 16,384.
const SEGMENTS_MAX: usize = 1 << 20;

/// Device memory in an image, process by process.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ResidentFacts {
    /// The processes that the memory belongs to.
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
    #[serde(deserialize_with = "checked::pid")]
    pub pid: i32,
    /// The segments, in the order in which the agent released them.
    pub segments: Vec<ResidentSegment>,
}

/// A piece of device memory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ResidentSegment {
    /// Address at which the process has the segment mapped.
    pub address: u64,
    /// Length in bytes.
    pub len: u64,
    /// UUID of its GPU, as `GPU-…`.
    pub gpu: String,
    /// Number, among the segments of all processes, of an earlier segment that is the same memory (CUDA IPC): the image
    /// stores the bytes there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub same_as: Option<usize>,
}

/// A part of a segment and the stream that holds it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Part {
    /// Number of the segment among all segments that are not the same memory as another.
    pub segment: usize,
    pub begin: u64,
    pub end: u64,
    pub stream: String,
}

impl ResidentFacts {
    pub(crate) fn new(processes: Vec<ResidentProcess>) -> Self {
        Self {
            processes,
            part_bytes: PART_BYTES,
        }
    }

    /// Returns all parts, in order.
    pub(crate) fn parts(&self) -> Vec<Part> {
        let step = usize::try_from(self.part_bytes).unwrap_or(usize::MAX);
        let mut parts = Vec::new();
        let mut number = 0;
        for process in &self.processes {
            for (index, segment) in process.segments.iter().enumerate() {
                if segment.same_as.is_some() {
                    continue;
                }
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

    /// Returns all segments, in order.
    pub(crate) fn segments(&self) -> impl Iterator<Item = &ResidentSegment> {
        self.processes.iter().flat_map(|process| &process.segments)
    }

    /// Returns process and address of each segment that is not the same memory as another, in order.
    pub(crate) fn places(&self) -> Vec<(i32, u64)> {
        let of = |process: &ResidentProcess| {
            let own = process.segments.iter();
            let originals = own.filter(|segment| segment.same_as.is_none());
            let pid = process.pid;
            originals
                .map(|segment| (pid, segment.address))
                .collect::<Vec<_>>()
        };
        self.processes.iter().flat_map(of).collect()
    }

    /// Returns true if processes share memory.
    pub(crate) fn is_shared(&self) -> bool {
        self.segments().any(|segment| segment.same_as.is_some())
    }

    /// Returns true if memory is restored to a GPU other than its original one.
    pub(crate) fn moves(&self, map: &[(String, String)]) -> bool {
        let had: BTreeSet<&str> = self.segments().map(|segment| &*segment.gpu).collect();
        map.iter()
            .any(|(old, new)| old != new && had.contains(&**old))
    }

    /// Returns the size of all device memory, in bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.sum(|_| true)
    }

    /// Returns the size of the device memory on this GPU, in bytes.
    pub(crate) fn bytes_on(&self, gpu: &str) -> u64 {
        self.sum(|segment| segment.gpu == gpu)
    }

    fn sum(&self, counts: impl Fn(&ResidentSegment) -> bool) -> u64 {
        let originals = self.segments().filter(|segment| segment.same_as.is_none());
        let counted = originals.filter(|segment| counts(segment));
        counted.fold(0, |sum, segment| sum.saturating_add(segment.len))
    }

    /// Returns true if the facts are valid; data read from a disk is not trusted.
    pub(crate) fn is_sane(&self) -> bool {
        let pids: BTreeSet<i32> = self.processes.iter().map(|process| process.pid).collect();
        self.part_bytes >= PART_BYTES_MIN
            && pids.len() == self.processes.len()
            && self.segments().count() <= SEGMENTS_MAX
            && self.segments().all(|segment| {
                segment.len > 0 && segment.address.checked_add(segment.len).is_some()
            })
            && self.is_shared_sanely()
            && self.bytes() < u64::MAX
    }

    fn is_shared_sanely(&self) -> bool {
        let all: Vec<&ResidentSegment> = self.segments().collect();
        let is_sane = |(number, segment): (usize, &&ResidentSegment)| {
            segment.same_as.is_none_or(|place| {
                let original = all.get(place).filter(|_| place < number);
                original.is_some_and(|original| {
                    original.same_as.is_none()
                        && (original.len, &original.gpu) == (segment.len, &segment.gpu)
                })
            })
        };
        all.iter().enumerate().all(is_sane)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn facts(lens: &[u64]) -> ResidentFacts {
        let segment = |len: &u64| ResidentSegment {
            address: 1 << 40,
            len: *len,
            gpu: "a".to_owned(),
            same_as: None,
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
    fn images_without_a_part_size_have_parts_of_256_mib() {
        let old: ResidentFacts = serde_json::from_str(r#"{"processes":[]}"#).unwrap();
        assert_eq!(old.part_bytes, 256 << 20);
    }

    #[test]
    fn memory_that_processes_share_is_in_an_image_once() {
        let mut facts = facts(&[PART_BYTES, 5]);
        assert!(!facts.is_shared());
        facts.processes[1].segments[1].same_as = Some(1);
        assert!(facts.is_sane() && facts.is_shared());
        assert_eq!(facts.bytes(), 2 * PART_BYTES + 5);
        let parts = facts.parts();
        let numbered = parts.iter().map(|part| (&*part.stream, part.segment));
        let expected = [("gpu/300/0/0", 0), ("gpu/300/1/0", 1), ("gpu/301/0/0", 2)];
        assert!(numbered.eq(expected));
    }

    #[test]
    fn memory_moves_with_its_own_gpu_only() {
        let mut facts = facts(&[1, 1]);
        facts.processes[0].segments[1].gpu = "b".to_owned();
        for (map, expected) in [
            (&[][..], false),
            (&[("a", "a"), ("b", "b"), ("c", "d")], false),
            (&[("a", "a"), ("b", "c"), ("c", "b")], true),
            (&[("a", "d")], true),
        ] {
            let pairs = map.iter();
            let map: Vec<_> = pairs
                .map(|(old, new)| ((*old).to_owned(), (*new).to_owned()))
                .collect();
            assert_eq!(facts.moves(&map), expected, "{map:?}");
        }
    }

    #[test]
    fn invalid_facts_are_detected() {
        assert!(facts(&[1, 2]).is_sane() && facts(&[]).is_sane());
        for lens in [&[0][..], &[u64::MAX - 5, 6], &[u64::MAX]] {
            assert!(!facts(lens).is_sane(), "{lens:?}");
        }
        let mut short = facts(&[1]);
        short.part_bytes = 0;
        assert!(!short.is_sane());
        // The segment itself; one of another length; a later one; again one of another length; a missing one.
        for (number, same_as) in [(1, 1), (1, 0), (2, 3), (3, 2), (3, 4)] {
            let mut shared = facts(&[1, 2]);
            let own = &mut shared.processes[number / 2].segments;
            own[number % 2].same_as = Some(same_as);
            assert!(!shared.is_sane(), "{number} as {same_as}");
        }
        let mut chained = facts(&[1, 1]);
        chained.processes[0].segments[1].same_as = Some(0);
        chained.processes[1].segments[0].same_as = Some(1);
        assert!(!chained.is_sane());
        let mut elsewhere = facts(&[1]);
        elsewhere.processes[1].segments[0].same_as = Some(0);
        elsewhere.processes[1].segments[0].gpu = "b".to_owned();
        assert!(!elsewhere.is_sane());
        let mut twice = facts(&[1]);
        twice.processes[1].pid = twice.processes[0].pid;
        assert!(!twice.is_sane());
    }
}
