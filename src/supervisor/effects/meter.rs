//! Measurement of the computing time that writing an image takes from the job, on the snapshot's thread.

use std::time::{Duration, Instant};

use crate::clock;
use crate::run::running_job::Job;
use crate::supervisor::policy::interval;

/// A time, and the CPU time that the job has used until then.
type Reading = (Instant, Duration);

/// Reads the CPU time of the job; `None` if the job has exited.
pub(super) fn read(job: &Job) -> Option<Reading> {
    job.cpu_time().map(|used| (clock::now(), used))
}

/// CPU time of the job, idle and while an image is written.
#[derive(Debug, Default)]
pub(crate) struct Meter {
    /// The end of the last snapshot.
    idle_from: Option<Reading>,
    /// CPU seconds per second while no image is written.
    rate: f64,
    released: Option<Reading>,
}

impl Meter {
    pub fn snapshot_begins(&mut self, now: Option<Reading>) {
        if let Some((at, used)) = now
            && let Some((since, before)) = self.idle_from
        {
            let passed = at.saturating_duration_since(since).as_secs_f64();
            self.rate = used.saturating_sub(before).as_secs_f64() / passed.max(f64::EPSILON);
        }
        self.released = None;
    }

    pub fn job_released(&mut self, now: Option<Reading>) {
        self.released = now;
    }

    /// Notes that the image is durable. Returns the computing time that writing it took from the job.
    pub fn snapshot_ends(&mut self, now: Option<Reading>) -> Duration {
        let (Some((at, used)), released) = (now, self.released.take()) else {
            return Duration::ZERO;
        };
        let is_first = self.idle_from.replace((at, used)).is_none();
        match released {
            Some((since, before)) if !is_first => {
                let window = at.saturating_duration_since(since);
                interval::slowdown(self.rate, window, used.saturating_sub(before))
            }
            _ => Duration::ZERO,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_meter_tells_what_writing_took_from_the_job() {
        let start = clock::now();
        let reading = |at, used| {
            let [at, used] = [at, used].map(Duration::from_secs);
            Some((start + at, used))
        };
        let mut meter = Meter::default();
        // The first snapshot only begins to measure.
        meter.snapshot_begins(reading(10, 40));
        meter.job_released(reading(11, 40));
        assert_eq!(meter.snapshot_ends(reading(20, 60)), Duration::ZERO);
        // Four CPUs for 100 s, then two of them for 10 s.
        meter.snapshot_begins(reading(120, 460));
        meter.job_released(reading(121, 460));
        let slowdown = meter.snapshot_ends(reading(131, 480));
        assert_eq!(slowdown, Duration::from_secs(5));
    }
}
