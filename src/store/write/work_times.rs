//! Time that the workers of an image spend on each step, once the job computes again: it shows what bounded the time
//! until the image is durable.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::clock;

/// Step of a worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum WorkStep {
    /// Waits for the streams: for the copies from the GPUs, and for CRIU.
    Input,
    Hash,
    Compression,
    /// Writes, or waits for the disk.
    Disk,
}

/// Shares of the workers' time, 0 to 1 each; their sum is 1.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct WorkShares {
    /// Waited for the copies from the GPUs and for CRIU.
    pub input: f64,
    /// Computed the names of chunks.
    pub hash: f64,
    /// Compressed chunks.
    pub compression: f64,
    /// Wrote, or waited for the disk.
    pub disk: f64,
}

/// Times of all workers of an image.
#[derive(Debug, Default)]
pub(crate) struct WorkTimes {
    begun: OnceLock<Instant>,
    nanoseconds: [AtomicU64; 4],
}

impl WorkTimes {
    /// Counts from now on: during a freeze, workers wait by intention.
    pub(crate) fn begin(&self) {
        let _ = self.begun.set(clock::now());
    }

    /// Runs a step and counts its time.
    pub(crate) fn measure<T>(&self, step: WorkStep, work: impl FnOnce() -> T) -> T {
        let begun = clock::now();
        let result = work();
        if let Some(since) = self.begun.get() {
            self.add(
                step,
                clock::now().saturating_duration_since(begun.max(*since)),
            );
        }
        result
    }

    /// Adds time to a step.
    pub(crate) fn add(&self, step: WorkStep, time: Duration) {
        let nanoseconds = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        self.nanoseconds[step as usize].fetch_add(nanoseconds, Ordering::Relaxed);
    }

    /// Returns the shares so far; `None` if there was no work.
    #[allow(clippy::cast_precision_loss, reason = "shares are rounded")]
    pub(crate) fn shares(&self) -> Option<WorkShares> {
        let time = |step| self.nanoseconds[step as usize].load(Ordering::Relaxed) as f64;
        let [input, hash, compression, disk] = [
            time(WorkStep::Input),
            time(WorkStep::Hash),
            time(WorkStep::Compression),
            time(WorkStep::Disk),
        ];
        let sum = input + hash + compression + disk;
        (sum > 0.0).then(|| WorkShares {
            input: input / sum,
            hash: hash / sum,
            compression: compression / sum,
            disk: disk / sum,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_are_of_the_time_since_the_beginning() {
        let times = WorkTimes::default();
        times.measure(WorkStep::Input, || ());
        assert_eq!(times.shares(), None);
        times.begin();
        times.add(WorkStep::Hash, Duration::from_secs(1));
        times.add(WorkStep::Disk, Duration::from_secs(3));
        let shares = WorkShares {
            input: 0.0,
            hash: 0.25,
            compression: 0.0,
            disk: 0.75,
        };
        assert_eq!(times.shares(), Some(shares));
    }

    #[test]
    fn a_wait_that_began_before_counts_from_the_beginning() {
        let times = WorkTimes::default();
        times.measure(WorkStep::Input, || {
            std::thread::sleep(Duration::from_millis(2));
            times.begin();
        });
        let counted = times.nanoseconds[WorkStep::Input as usize].load(Ordering::Relaxed);
        let since = times.begun.get().unwrap().elapsed();
        assert!(u128::from(counted) <= since.as_nanos());
    }
}
