//! NVML kept initialized between two looks at the GPUs.

use std::sync::Mutex;

use super::loader::available;
use super::nvml::Nvml;
use crate::sync::locked;

/// Spares the looks in between ([`inventory`](super::inventory), [`uses`](super::uses)) the initialization, which NVML
/// counts and does once; it is most of what a look costs.
///
/// What is kept has the GPUs' device files open, which is in the way of whoever resets a GPU or changes how it is split
/// up, and knows the GPUs that were there when it began.
#[derive(Default)]
pub struct KeptNvml(Mutex<Option<Nvml>>);

impl KeptNvml {
    /// Keeps it, if it is not kept and there is one. Blocks as long as a look does.
    pub fn keep(&self) {
        let mut kept = locked(&self.0);
        if kept.is_none() && available() {
            // Without it every look says why there is none.
            *kept = Nvml::load().ok().flatten();
        }
    }

    /// Lets go of it, so that the next look finds what is there then.
    pub fn release(&self) {
        *locked(&self.0) = None;
    }
}

impl std::fmt::Debug for KeptNvml {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("KeptNvml").finish_non_exhaustive()
    }
}
