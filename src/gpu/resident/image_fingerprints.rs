//! Fingerprints of an image's device memory at its snapshot. The image stores them with their keys, so that each restore,
//! also by another process on another machine, can compare the memory on the GPU with that of the snapshot.
//!
//! ```text
//! stream:  keys (KEY_BYTES) │ fingerprints of the blocks of all parts, in the order of the image's facts
//! ```
//! An image has the stream only if the GPU computed all fingerprints. Images of earlier versions do not have it.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

use super::error::ResidentError;
use super::known_blocks::block;
use crate::copier::{BLOCK_BYTES, Fingerprint, KEY_BYTES};
use crate::run::resident_facts::{FINGERPRINTS, Part, ResidentFacts};
use crate::store::{ImageReader, StreamOpener, WriteError};

/// Random keys of fingerprints: [`KEY_BYTES`] bytes.
pub(crate) type Keys = Arc<[u8]>;

/// Fingerprints from an image.
#[derive(Debug)]
pub(crate) struct ImageFingerprints {
    keys: Keys,
    /// Of all parts.
    fingerprints: Vec<Fingerprint>,
    /// Place of each part in `fingerprints`, by the part's stream.
    places: HashMap<String, Range<usize>>,
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
        let Some(len) = image.len_of(FINGERPRINTS) else {
            return Ok(None);
        };
        // The GPU computes fingerprints of whole blocks only.
        let blocks = facts.bytes() / BLOCK_BYTES;
        let expected = KEY_BYTES as u64 + blocks * size_of::<Fingerprint>() as u64;
        if len != expected || !facts.bytes().is_multiple_of(BLOCK_BYTES) {
            return Err(ResidentError::Facts);
        }
        let (mut places, mut begin) = (HashMap::new(), 0);
        for part in facts.parts() {
            let end = begin + block(part.end - part.begin);
            places.insert(part.stream, begin..end);
            begin = end;
        }
        let mut bytes = Vec::new();
        image.copy_to(FINGERPRINTS, &mut bytes)?;
        let (keys, fingerprints) = bytes.split_at(KEY_BYTES);
        Ok(Some(Self {
            keys: keys.into(),
            fingerprints: fingerprints.as_chunks().0.to_vec(),
            places,
        }))
    }

    pub fn keys(&self) -> &Keys {
        &self.keys
    }

    /// Returns the fingerprints of a part's blocks, in order.
    pub fn of(&self, part: &Part) -> Option<&[Fingerprint]> {
        self.fingerprints
            .get(self.places.get(&part.stream)?.clone())
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
