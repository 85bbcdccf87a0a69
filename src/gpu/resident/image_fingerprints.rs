//! Fingerprints of an image's device memory at its snapshot. The image stores them with their keys, so that each restore,
//! also by another process on another machine, can compare the memory on the GPU with that of the snapshot.
//!
//! ```text
//! stream:  keys (KEY_BYTES) │ fingerprints of the blocks of all parts, in the order of the image's facts
//! ```
//! An image has the stream only if the GPU computed all fingerprints. Images of earlier versions do not have it.

use std::sync::Arc;

use super::error::ResidentError;
use super::known_blocks::block;
use crate::copier::{BLOCK_BYTES, FINGERPRINT_BYTES, Fingerprint, KEY_BYTES};
use crate::run::resident_facts::{FINGERPRINTS, Part, ResidentFacts};
use crate::store::{ImageReader, StreamOpener, WriteError};

/// Random keys of fingerprints: [`KEY_BYTES`] bytes.
pub(crate) type Keys = Arc<[u8]>;

/// Maximum size of the stream: fingerprints of 8 TiB of device memory.
const STREAM_BYTES_MAX: u64 = 1 << 30;

/// Fingerprints from an image.
#[derive(Debug)]
pub(crate) struct ImageFingerprints {
    keys: Keys,
    fingerprints: Vec<Fingerprint>,
    /// Number of the first block of each segment that is not the same memory as another.
    segments: Vec<usize>,
}

impl ImageFingerprints {
    /// Reads the fingerprints of an image; `None` if it has none.
    ///
    /// # Errors
    /// The facts are not valid, or the fingerprints cannot be read or are not as many as the image's memory has blocks.
    pub fn read(image: &ImageReader, facts: &ResidentFacts) -> Result<Option<Self>, ResidentError> {
        if !facts.is_sane() {
            return Err(ResidentError::Facts);
        }
        if image.len_of(FINGERPRINTS).is_none() {
            return Ok(None);
        }
        let bytes = image.read_to_vec(FINGERPRINTS, STREAM_BYTES_MAX)?;
        let (keys, rest) = bytes
            .split_at_checked(KEY_BYTES)
            .ok_or(ResidentError::Facts)?;
        let (fingerprints, odd) = rest.as_chunks::<FINGERPRINT_BYTES>();
        let (mut segments, mut count) = (Vec::new(), 0_usize);
        let originals = facts.segments().filter(|one| one.same_as.is_none());
        for segment in originals {
            segments.push(count);
            count = count.saturating_add(block(segment.len));
        }
        // The GPU computes fingerprints of whole blocks only.
        let is_whole = facts.bytes().is_multiple_of(BLOCK_BYTES);
        if !is_whole || !odd.is_empty() || fingerprints.len() != count {
            return Err(ResidentError::Facts);
        }
        Ok(Some(Self {
            keys: keys.into(),
            fingerprints: fingerprints.to_vec(),
            segments,
        }))
    }

    pub fn keys(&self) -> &Keys {
        &self.keys
    }

    /// Returns the fingerprints of a part's blocks, in order.
    pub fn of(&self, part: &Part) -> Option<&[Fingerprint]> {
        let segment = self.fingerprints.get(*self.segments.get(part.segment)?..)?;
        segment.get(block(part.begin)..block(part.end))
    }
}

/// Writes the fingerprints of all parts, in the order of the facts, into an image.
pub(super) fn write(
    keys: &Keys,
    fingerprints: &[&[Fingerprint]],
    streams: &StreamOpener,
) -> Result<(), WriteError> {
    let mut stream = streams.open(FINGERPRINTS)?;
    stream.write_all(keys)?;
    for part in fingerprints {
        stream.write_all(part.as_flattened())?;
    }
    stream.finish()?;
    Ok(())
}
