//! Blocks of device memory that are the same as in an earlier image, found by fingerprints that the GPU computes. Only
//! the other blocks are copied.
//!
//! ```text
//! newest image: fingerprints ──┐
//! lane: fingerprints of a part ┴▶ the same: chunks of the newest image, by their names    changed: copied
//!                              └▶ kept with the new image, once it is committed
//! ```
//! After a fill from an image, the GPU computes the fingerprints again. So the first image of another supervisor copies the
//! changes only, too. What they are compared with need not be the state that the job continued from, because equal
//! fingerprints mean equal bytes.
//!
//! Images store the fingerprints of their snapshot with the keys (`image_fingerprints.rs`). At a restore they show that the
//! GPU has the same memory again. This replaces the comparison of each chunk with its check and name, which takes a third
//! of the processors' time, and covers the way to the GPU as well. After a restore, the image's keys stay in use.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::thread::{Builder, JoinHandle};

use super::error::ResidentError;
use super::image_fingerprints::{self, ImageFingerprints, Keys};
use crate::copier::{BLOCK_BYTES, Fingerprint, KEY_BYTES};
use crate::run::resident_facts::{Part, ResidentFacts};
use crate::store::{
    EarlierStreams, ImageId, ImageReader, Store, StreamOpener, StreamWriter, WriteError,
};
use crate::sync::locked;

/// Part of a process's device memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Place {
    /// Pid as the job sees it.
    pub pid: i32,
    pub address: u64,
    pub len: u64,
}

impl Place {
    /// Returns the place of a part of a segment, which has this pid and address.
    pub fn of((pid, address): (i32, u64), part: &Part) -> Self {
        Self {
            pid,
            address: address + part.begin,
            len: part.end - part.begin,
        }
    }
}

/// Fingerprints of the blocks of a part, and the stream of the image that holds it.
#[derive(Clone, Debug)]
struct Recorded {
    stream: String,
    fingerprints: Vec<Fingerprint>,
}

type Parts = HashMap<Place, Recorded>;

/// Streams of the newest image, and the fingerprints of its device memory.
type Earlier = (EarlierStreams, Arc<Parts>);

/// Bytes that an image may have to copy besides twice those of the image before.
const MORE_BYTES: u64 = 1 << 30;

/// Device memory in the image that was committed or restored last.
#[derive(Clone, Debug)]
struct Newest {
    image: ImageId,
    keys: Option<Keys>,
    parts: Arc<Parts>,
    /// Bytes that were copied from the GPU for it, or to the GPU from it.
    copied: u64,
}

/// Blocks of device memory in the image that was committed or restored last (the newest image).
#[derive(Debug)]
pub(crate) struct KnownBlocks {
    /// Random keys, or those of the image whose restore was prepared or begun last. `None` if there is no randomness, and
    /// then all memory is copied.
    keys: Mutex<Option<Keys>>,
    newest: Mutex<Option<Newest>>,
}

impl Default for KnownBlocks {
    fn default() -> Self {
        let mut keys = vec![0; KEY_BYTES];
        let filled = getrandom::fill(&mut keys);
        Self {
            keys: Mutex::new(filled.is_ok().then(|| keys.into())),
            newest: Mutex::default(),
        }
    }
}

impl KnownBlocks {
    /// Returns the keys for the next copier.
    pub(super) fn keys(&self) -> Option<Keys> {
        locked(&self.keys).clone()
    }

    /// Returns the fingerprints of an image that is about to be restored, and uses its keys from now on.
    pub(super) fn recall(
        &self,
        image: &ImageReader,
        facts: &ResidentFacts,
    ) -> Result<Option<ImageFingerprints>, ResidentError> {
        let found = ImageFingerprints::read(image, facts)?;
        if let Some(found) = &found {
            *locked(&self.keys) = Some(Arc::clone(found.keys()));
        }
        Ok(found)
    }

    /// Prepares the comparison for an image that is about to be written: a thread reads the manifest of the newest image.
    /// `keys` are those of the copier.
    pub(super) fn changes(&self, store: &Store, keys: Option<Keys>) -> Changes {
        let newest = locked(&self.newest).clone();
        let newest = newest.filter(|newest| newest.keys == keys);
        let expected = newest.as_ref().map(|newest| expected(newest.copied));
        let reading = newest.and_then(|Newest { image, parts, .. }| {
            let (store, thread) = (store.clone(), Builder::new().name("blocks".to_owned()));
            // An image that is gone or unreadable is not compared with.
            let read = move || Some((store.earlier_streams(image).ok()?, parts));
            thread.spawn(read).ok()
        });
        Changes {
            expected,
            reading: Mutex::new(reading),
            ..Changes::with(keys)
        }
    }

    /// Keeps what was found about an image, which is committed or was read.
    pub fn keep(&self, image: ImageId, changes: &Changes) {
        let found = std::mem::take(&mut *locked(&changes.found));
        let copied = changes.copied.load(Ordering::Relaxed);
        tracing::debug!(%image, copied, parts = found.len(), "device memory is known by its fingerprints");
        *locked(&self.newest) = Some(Newest {
            image,
            keys: changes.keys.clone(),
            parts: Arc::new(found),
            copied,
        });
    }
}

/// Comparison of device memory with the newest image, while another one is written.
#[derive(Debug, Default)]
pub(crate) struct Changes {
    /// Keys of the fingerprints.
    keys: Option<Keys>,
    /// Estimate of the bytes to copy; `None` without an earlier image.
    expected: Option<u64>,
    reading: Mutex<Option<JoinHandle<Option<Earlier>>>>,
    earlier: OnceLock<Option<Earlier>>,
    found: Mutex<Parts>,
    /// Number of bytes that were copied.
    copied: AtomicU64,
}

/// Returns an estimate of the bytes to copy, from the bytes copied for the image before.
fn expected(copied: u64) -> u64 {
    copied.saturating_mul(2).saturating_add(MORE_BYTES)
}

impl Changes {
    /// Starts without an earlier image.
    pub(super) fn with(keys: Option<Keys>) -> Self {
        Self {
            keys,
            ..Self::default()
        }
    }

    /// Returns an estimate of how many of `bytes` will be copied, as the memory changes about as much from image to image.
    pub(super) fn expected_of(&self, bytes: u64) -> u64 {
        self.expected.map_or(bytes, |expected| expected.min(bytes))
    }

    fn earlier(&self) -> Option<&Earlier> {
        let wait = || locked(&self.reading).take()?.join().ok().flatten();
        self.earlier.get_or_init(wait).as_ref()
    }

    /// Appends a part to its stream: `read` copies a range of it. `found` has the stream's name and the fingerprints of
    /// the part, if the GPU has computed them.
    pub(super) fn append<E: From<WriteError>>(
        &self,
        place: Place,
        found: Option<(&str, Vec<Fingerprint>)>,
        stream: &mut StreamWriter,
        mut read: impl FnMut(&mut StreamWriter, Range<u64>) -> Result<(), E>,
    ) -> Result<(), E> {
        let Some((name, fingerprints)) = found else {
            self.copied.fetch_add(place.len, Ordering::Relaxed);
            return read(stream, 0..place.len);
        };
        let known = self.earlier();
        let known = known.and_then(|(streams, parts)| Some((streams, parts.get(&place)?)));
        let unread = if let Some((streams, before)) = known {
            let is_same = |range: Range<u64>| {
                let blocks = block(range.start)..block(range.end + BLOCK_BYTES - 1);
                let before = before.fingerprints.get(blocks.clone());
                before.is_some() && before == fingerprints.get(blocks)
            };
            stream.append_changes((streams, &before.stream), place.len, is_same, &mut read)?
        } else {
            read(stream, 0..place.len)?;
            0
        };
        self.copied
            .fetch_add(place.len.saturating_sub(unread), Ordering::Relaxed);
        self.record(place, name, fingerprints);
        Ok(())
    }

    /// Records a part that was filled from its stream. Without `fingerprints`, the next image copies it.
    pub(super) fn filled(
        &self,
        place: Place,
        stream: &str,
        fingerprints: Option<Vec<Fingerprint>>,
    ) {
        self.copied.fetch_add(place.len, Ordering::Relaxed);
        if let Some(fingerprints) = fingerprints {
            self.record(place, stream, fingerprints);
        }
    }

    fn record(&self, place: Place, stream: &str, fingerprints: Vec<Fingerprint>) {
        let recorded = Recorded {
            stream: stream.to_owned(),
            fingerprints,
        };
        locked(&self.found).insert(place, recorded);
    }

    /// Writes the fingerprints of all parts into the image, if the GPU has computed all of them.
    pub(super) fn write_fingerprints(
        &self,
        places: impl Iterator<Item = Place>,
        streams: &StreamOpener,
    ) -> Result<(), WriteError> {
        let found = locked(&self.found);
        let of = |place| Some(&*found.get(&place)?.fingerprints);
        let all: Option<Vec<&[Fingerprint]>> = places.map(of).collect();
        match (&self.keys, all) {
            (Some(keys), Some(all)) => image_fingerprints::write(keys, &all, streams),
            _ => Ok(()),
        }
    }
}

/// Returns the number of the block that contains an offset.
pub(super) fn block(offset: u64) -> usize {
    usize::try_from(offset / BLOCK_BYTES).unwrap_or(usize::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn estimate_is_never_more_than_all_memory() {
        const GIB: u64 = 1 << 30;
        let of = |copied: Option<u64>, bytes| {
            let expected = copied.map(expected);
            let changes = Changes {
                expected,
                ..Changes::default()
            };
            changes.expected_of(bytes)
        };
        assert_eq!(of(None, 50 * GIB), 50 * GIB, "no image before");
        assert_eq!(of(Some(GIB), 50 * GIB), 3 * GIB);
        assert_eq!(of(Some(0), 50 * GIB), MORE_BYTES);
        assert_eq!(of(Some(64 * GIB), 50 * GIB), 50 * GIB);
        assert_eq!(of(Some(u64::MAX), GIB), GIB);
    }
}
