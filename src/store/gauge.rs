//! How many bytes of an image have passed some point. Filled by whoever moves them, read by anybody at any time.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// A count of bytes that only grows. Clones are the same count.
#[derive(Clone, Debug, Default)]
pub struct Gauge(Arc<AtomicU64>);

impl Gauge {
    /// The count so far.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }

    pub(crate) fn add(&self, bytes: usize) {
        self.0.fetch_add(bytes as u64, Ordering::Relaxed);
    }
}
