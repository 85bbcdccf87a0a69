//! Known contents of GPU memory, written to it and read back. The tests on a real GPU include this file.

use std::ops::Range;

use ckpt_run::copier::{CopierError, Lane, SegmentId};

pub const MIB: u64 = 1 << 20;

/// Returns bytes that do not repeat and differ for every seed.
pub fn bytes(seed: u64, len: u64) -> Vec<u8> {
    let mut bytes = vec![0; usize::try_from(len).unwrap()];
    let mut hasher = blake3::Hasher::new();
    hasher.update(&seed.to_le_bytes());
    hasher.finalize_xof().fill(&mut bytes);
    bytes
}

/// Writes the content in pieces of varying lengths, like those of chunks.
pub fn try_fill(
    lane: &mut Lane,
    segment: SegmentId,
    range: Range<u64>,
    mut content: &[u8],
) -> Result<(), CopierError> {
    let mut longest = 1;
    lane.fill(segment, range, |room| {
        longest = (longest * 7) % 5_000_011;
        let len = room.len().min(content.len()).min(longest);
        room[..len].copy_from_slice(&content[..len]);
        content = &content[len..];
        Ok(len)
    })
}

pub fn fill(lane: &mut Lane, segment: SegmentId, range: Range<u64>, content: &[u8]) {
    try_fill(lane, segment, range, content).unwrap();
}

pub fn try_drain(
    lane: &mut Lane,
    segment: SegmentId,
    range: Range<u64>,
) -> Result<Vec<u8>, CopierError> {
    let mut all = Vec::new();
    lane.drain(segment, range, |bytes| {
        all.extend_from_slice(bytes);
        Ok::<_, CopierError>(())
    })?;
    Ok(all)
}

pub fn drain(lane: &mut Lane, segment: SegmentId, range: Range<u64>) -> Vec<u8> {
    try_drain(lane, segment, range).unwrap()
}

/// Compares without printing megabytes of a difference.
pub fn assert_same(found: &[u8], expected: &[u8]) {
    if found == expected {
        return;
    }
    let mut pairs = found.iter().zip(expected);
    let differ = pairs.position(|(one, other)| one != other);
    panic!(
        "{} bytes instead of {}, the first that differs is {differ:?}",
        found.len(),
        expected.len()
    );
}
