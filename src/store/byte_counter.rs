//! Counter of an image's bytes at a stage of processing, readable from any thread at any time.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Monotonic count of bytes. Clones share the same count.
#[derive(Clone, Debug, Default)]
pub struct ByteCounter(Arc<AtomicU64>);

impl ByteCounter {
    /// Returns the present count.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }

    pub(crate) fn add(&self, bytes: usize) {
        self.0.fetch_add(bytes as u64, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use crate::store::format::chunk::{CHUNK_BYTES, ZEROS};
    use crate::store::format::codec::tests::noise;
    use crate::store::tests::support::{OPTIONS, temporary_store};

    #[test]
    fn bytes_are_counted_once_when_taken_stored_and_returned() {
        let (_folder, store) = temporary_store();
        let lock = store.lock().unwrap();
        let mut writer = store.begin(&lock, OPTIONS).unwrap();
        let mut bytes = noise(1, 2 * CHUNK_BYTES + 77);
        bytes.extend_from_slice(&ZEROS);
        let all = 2 * bytes.len() as u64;
        // The second stream consists of known chunks.
        for name in ["a", "b"] {
            let mut stream = writer.stream(name).unwrap();
            stream.write_all(&bytes).unwrap();
            stream.finish().unwrap();
        }
        let (taken, stored) = (writer.taken(), writer.stored());
        assert_eq!(taken.bytes(), all);
        writer.settle().unwrap();
        assert_eq!((taken.bytes(), stored.bytes()), (all, all));
        let image = writer.commit(b"").unwrap().id;
        let reader = store.read(image).unwrap();
        let given = reader.given();
        assert_eq!(given.bytes(), 0);
        reader.copy_to("a", &mut std::io::sink()).unwrap();
        assert_eq!(given.bytes(), all / 2);
    }
}
