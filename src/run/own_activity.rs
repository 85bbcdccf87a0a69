//! The traces of ckpt-run's own work in a job, so that they are not mistaken for signs of the job's activity.
//!
//! ```text
//! snapshot:  begins ─ lock, suspend, CRIU, resume ─ computes ─ drain ─ copied ─ NVML_WINDOW ─ … ─ ends
//! CPU time:       └────── not the job's own ──────────┘
//! GPU work:       └────── perhaps not the job's own ────────────────────────────┘
//! ```
//! CRIU's code inside the job's processes is accounted to them, and so is the driver's work there. NVML reports the
//! work of all programs that use a GPU. This module must not know which signs are evaluated, nor what they mean.

use std::sync::{Mutex, MutexGuard};
use std::time::{Duration, Instant};

use super::running_job::Job;
use crate::clock;
use crate::job;
use crate::sync::locked;

/// Time after ckpt-run's last work on a GPU in which NVML may still report it. NVML's utilization covers the recent
/// past, up to a second; the rest is a margin for the work that is done when ckpt-run learns of the end.
const NVML_WINDOW: Duration = Duration::from_millis(1500);

/// ckpt-run's work in one job and on its GPUs.
#[derive(Debug, Default)]
pub(crate) struct OwnActivity(Mutex<Marks>);

#[derive(Debug, Clone, Copy, Default)]
struct Marks {
    cpu: Cpu,
    gpu: Gpu,
}

/// CPU time of the job's processes that is not the job's own.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
struct Cpu {
    /// CPU time of the processes when ckpt-run's current work began; `None` if there is none.
    since: Option<Duration>,
    /// CPU time that the processes used during all earlier work of ckpt-run.
    ours: Duration,
}

impl Cpu {
    /// Records the start of the work; of several attempts the first one counts.
    fn begins(&mut self, used: Duration) {
        self.since.get_or_insert(used);
    }

    fn ends(&mut self, used: Duration) {
        if let Some(since) = self.since.take() {
            self.ours += used.saturating_sub(since);
        }
    }

    /// Returns the job's own part of the CPU time `used`, which was read between `before` and `after`. Returns `None`
    /// while ckpt-run works in the job.
    fn own(before: Self, used: Duration, after: Self) -> Option<Duration> {
        let calm = before.since.is_none() && before == after;
        calm.then(|| used.saturating_sub(before.ours))
    }
}

/// ckpt-run's work on GPUs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
enum Gpu {
    #[default]
    Untouched,
    Touched,
    LeftAt(Instant),
}

impl Gpu {
    /// Returns true if a measurement at this time may include ckpt-run's work.
    fn shows(self, looked: Instant) -> bool {
        match self {
            Self::Untouched => false,
            Self::Touched => true,
            Self::LeftAt(left) => looked < left + NVML_WINDOW,
        }
    }
}

impl OwnActivity {
    fn marks(&self) -> MutexGuard<'_, Marks> {
        locked(&self.0)
    }

    /// Records that ckpt-run begins to work in the job, whose processes have used this much CPU time.
    pub fn begins(&self, used: Duration) {
        let mut marks = self.marks();
        marks.cpu.begins(used);
        marks.gpu = Gpu::Touched;
    }

    /// Returns the job's own part of the CPU time that `look` returns for its processes; `None` if that cannot be
    /// determined at present.
    pub fn own_cpu_time(&self, look: impl FnOnce() -> Duration) -> Option<Duration> {
        let before = self.marks().cpu;
        let used = look();
        Cpu::own(before, used, self.marks().cpu)
    }

    /// Returns true if the GPU work seen in a measurement that began at `looked` and has just ended may be ckpt-run's.
    pub fn shows_on_gpu(&self, looked: Instant) -> bool {
        self.marks().gpu.shows(looked)
    }

    /// Records that no part of ckpt-run works on the GPUs any more.
    pub fn leaves_gpu(&self, now: Instant) {
        self.marks().gpu = Gpu::LeftAt(now);
    }
}

impl Job {
    /// Returns the CPU time that the job's processes have used, including ckpt-run's work in them; `None` if they
    /// cannot be inspected, because they have exited.
    pub fn cpu_time(&self) -> Option<Duration> {
        let root = job::child_with_pid(self.sandbox.pid(), self.pids.root).ok()?;
        Some(job::cpu_time(&job::tree(root).ok()?))
    }

    /// Does work that stops the job's processes without a snapshot, as debuggers do. The CPU time that this costs the
    /// job is not its own.
    pub fn disturbed<T>(&self, work: impl FnOnce() -> T) -> T {
        if let Some(used) = self.cpu_time() {
            self.own_activity.marks().cpu.begins(used);
        }
        let result = work();
        self.continues();
        result
    }

    /// Records that the job computes again, after ckpt-run's work in it.
    pub fn continues(&self) {
        let used = self.cpu_time().unwrap_or_default();
        self.own_activity.marks().cpu.ends(used);
    }

    /// Records that ckpt-run's work in the job and on its GPUs has ended, successfully or not.
    pub fn left_alone(&self) {
        if self.own_activity.marks().cpu.since.is_some() {
            self.continues();
        }
        let mut marks = self.own_activity.marks();
        if marks.gpu == Gpu::Touched {
            marks.gpu = Gpu::LeftAt(clock::now());
        }
    }
}

#[cfg(test)]
impl OwnActivity {
    /// Ends the work that `begins` recorded. The job has used this much CPU time by now.
    pub(crate) fn ends(&self, used: Duration) {
        self.marks().cpu.ends(used);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);
    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn cpu_time_is_unknown_during_own_activity() {
        let own_activity = OwnActivity::default();
        assert_eq!(own_activity.own_cpu_time(|| 7 * MS), Some(7 * MS));
        let began_meanwhile = own_activity.own_cpu_time(|| {
            own_activity.begins(7 * MS);
            8 * MS
        });
        assert_eq!(began_meanwhile, None);
        assert_eq!(own_activity.own_cpu_time(|| 8 * MS), None);
        // Another attempt: the CPU time of the first attempt is not the job's own either.
        own_activity.begins(10 * MS);
        let ended_meanwhile = own_activity.own_cpu_time(|| {
            own_activity.ends(17 * MS);
            17 * MS
        });
        assert_eq!(ended_meanwhile, None);
        assert_eq!(own_activity.own_cpu_time(|| 20 * MS), Some(10 * MS));
        // Work that has ended already is not ended again.
        own_activity.ends(30 * MS);
        assert_eq!(own_activity.own_cpu_time(|| 30 * MS), Some(20 * MS));
    }

    #[test]
    fn gpu_work_may_be_ours_until_nvml_has_forgotten_it() {
        let own_activity = OwnActivity::default();
        let now = clock::now();
        assert!(!own_activity.shows_on_gpu(now));
        own_activity.begins(Duration::ZERO);
        assert!(own_activity.shows_on_gpu(now + 100 * SECOND));
        // The job continues, and its memory is copied meanwhile.
        own_activity.ends(Duration::ZERO);
        assert!(own_activity.shows_on_gpu(now + 100 * SECOND));
        own_activity.leaves_gpu(now + 100 * SECOND);
        assert!(own_activity.shows_on_gpu(now + 100 * SECOND + NVML_WINDOW.mul_f64(0.99)));
        assert!(!own_activity.shows_on_gpu(now + 100 * SECOND + NVML_WINDOW));
    }
}
