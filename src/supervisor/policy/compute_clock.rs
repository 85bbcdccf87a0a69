//! Clock of the job's computing time: it stops while the job is frozen, paused, stopped, being restored or dead.

use std::time::{Duration, Instant};

/// Adds up the times in which the job computed.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct ComputeClock {
    total: Duration,
    since: Option<Instant>,
}

impl ComputeClock {
    pub fn set(&mut self, computes: bool, now: Instant) {
        if let Some(since) = self.since.take() {
            self.total += now.saturating_duration_since(since);
        }
        self.since = computes.then_some(now);
    }

    /// Leaves out the last part of the time, in which the job was stopped.
    pub fn skip(&mut self, stopped: Duration) {
        if let Some(since) = &mut self.since {
            *since += stopped;
        }
    }

    pub fn total(&self, now: Instant) -> Duration {
        let running = self
            .since
            .map_or(Duration::ZERO, |since| now.saturating_duration_since(since));
        self.total + running
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_time_between_on_and_off_counts() {
        let start = crate::clock::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let mut clock = ComputeClock::default();
        clock.set(true, at(0));
        clock.set(true, at(3));
        clock.set(false, at(5));
        assert_eq!(clock.total(at(100)), Duration::from_secs(5));
        clock.set(true, at(100));
        assert_eq!(clock.total(at(102)), Duration::from_secs(7));
        // Of these 5 s, the job was stopped for 2.
        clock.set(false, at(102));
        clock.set(true, at(200));
        clock.skip(Duration::from_secs(2));
        clock.set(false, at(205));
        assert_eq!(clock.total(at(300)), Duration::from_secs(10));
        clock.set(true, at(300));
        // A time that lies back changes nothing.
        clock.set(false, at(50));
        assert_eq!(clock.total(at(400)), Duration::from_secs(10));
    }
}
