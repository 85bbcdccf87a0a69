//! Measurement of the computing time that writing an image takes from the job, on the snapshot's thread.

use std::sync::Mutex;
use std::time::{Duration, Instant};

use crate::clock;
use crate::run::running_job::Job;
use crate::supervisor::policy::interval;
use crate::sync::locked;

/// CPU time of the job, idle and while an image is written.
#[derive(Debug, Default)]
pub(crate) struct Meter {
    /// CPU time at the end of the last snapshot, or when the job was first looked at.
    idle_from: Option<(Instant, Duration)>,
    /// CPU seconds a second while no image is written.
    rate: f64,
    released: Option<(Instant, Duration)>,
    slowdown: Option<Duration>,
}

impl Meter {
    /// The snapshot begins.
    fn begins(&mut self, at: Instant, used: Duration) {
        if let Some((since, before)) = self.idle_from {
            let passed = at.saturating_duration_since(since).as_secs_f64();
            self.rate = used.saturating_sub(before).as_secs_f64() / passed.max(f64::EPSILON);
        }
        (self.released, self.slowdown) = (None, None);
    }

    /// The image is durable.
    fn ends(&mut self, at: Instant, used: Duration) {
        if let Some((since, before)) = self.released.take()
            && self.idle_from.is_some()
        {
            let window = at.saturating_duration_since(since);
            let slowdown = interval::slowdown(self.rate, window, used.saturating_sub(before));
            self.slowdown = Some(slowdown);
        }
        self.idle_from = Some((at, used));
    }
}

/// Informs the [`Meter`] that a snapshot of the job begins. A job that cannot be inspected has exited.
pub(crate) fn snapshot_begins(meter: &Mutex<Meter>, job: &Job) {
    if let Some(used) = job.cpu_time() {
        locked(meter).begins(clock::now(), used);
    }
}

/// Informs the [`Meter`] that the job computes again.
pub(crate) fn job_released(meter: &Mutex<Meter>, job: &Job) {
    locked(meter).released = job.cpu_time().map(|used| (clock::now(), used));
}

/// Informs the [`Meter`] that the image is durable; returns the computing time that writing it took from the job.
pub(crate) fn snapshot_ends(meter: &Mutex<Meter>, job: &Job) -> Duration {
    let mut meter = locked(meter);
    if let Some(used) = job.cpu_time() {
        meter.ends(clock::now(), used);
    }
    meter.slowdown.take().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_meter_tells_what_writing_took_from_the_job() {
        let start = clock::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let used = Duration::from_secs;
        let mut meter = Meter::default();
        // The first snapshot only begins to measure.
        meter.begins(at(10), used(40));
        meter.released = Some((at(11), used(40)));
        meter.ends(at(20), used(60));
        assert_eq!(meter.slowdown, None);
        // Four CPUs for 100 s, then two of them for 10 s.
        meter.begins(at(120), used(460));
        meter.released = Some((at(121), used(460)));
        meter.ends(at(131), used(480));
        assert_eq!(meter.slowdown, Some(Duration::from_secs(5)));
    }
}
