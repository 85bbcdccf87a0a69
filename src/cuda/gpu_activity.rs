//! The recent work of GPUs, for the detection of a hanging job.

use std::collections::BTreeSet;

use super::gpu::GPUS_MAX;
use super::loader::available;
use super::nvml::{Nvml, Route};

/// A query of the GPUs' work that can be repeated cheaply.
pub struct Activity {
    nvml: Nvml,
}

impl Activity {
    /// Loads NVML; returns `None` if there is no GPU or no NVML.
    #[must_use]
    pub fn load() -> Option<Self> {
        if !available() {
            return None;
        }
        let nvml = Nvml::load().ok()??;
        Some(Self { nvml })
    }

    /// Returns true if the GPUs of these processes (by the driver's pids) have worked in the last moments, a second at
    /// most. If none of the processes is listed on a GPU, all GPUs are queried: in a container the driver may use other
    /// pids for them. Returns `None` if no GPU reports its work, as with MIG.
    #[must_use]
    pub fn works(&self, pids: &[i32]) -> Option<bool> {
        let pids: BTreeSet<i32> = pids.iter().copied().collect();
        let all: Vec<u32> = (0..self.nvml.count().ok()?.min(GPUS_MAX)).collect();
        let is_used = |index: &u32| {
            let processes = self.nvml.processes(*index, Route::Own).unwrap_or_default();
            processes.iter().any(|(pid, _)| pids.contains(pid))
        };
        let used: Vec<u32> = all.iter().copied().filter(is_used).collect();
        let asked = if used.is_empty() { all } else { used };
        let told = asked
            .into_iter()
            .filter_map(|index| self.nvml.utilization(index).ok());
        told.map(|percent| percent > 0)
            .reduce(|one, other| one | other)
    }
}

impl std::fmt::Debug for Activity {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Activity").finish_non_exhaustive()
    }
}
