//! The rules of a lease: how long its holder may run the job, and when another supervisor may take it.
//!
//! ```text
//! holder   request ──▶ entry created        must have stopped the job
//!          │◀───────── ttl − guard ─────────▶│
//! another             entry seen │◀──────── ttl + guard ────────▶│ may create the next entry
//! ```
//! The holder counts from before its request, the other one from after its answer, each by its own clock, which also
//! counts the time for which the machine was suspended. So the two times cannot overlap as long as the clocks' rates
//! differ by less than the two guards, a fifth of the lease: no clock is compared with another.
//!
//! This module is arithmetic. The time of stopping the job must fit the guard.

use std::time::Duration;

/// Point in time of this machine's clock, as the time since its boot.
pub(crate) type Time = Duration;

/// Part of the lease by which the holder stops earlier and another supervisor waits longer.
const GUARD: u32 = 10;
/// Part of the lease after which it is renewed.
const RENEWAL: u32 = 4;

/// Lease of a holder.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Held {
    ttl: Duration,
    /// Start of the last request that renewed it.
    renewed: Time,
}

impl Held {
    /// Creates a lease from the start of the request that acquired it.
    pub(crate) fn new(ttl: Duration, begun: Time) -> Self {
        let renewed = begun;
        Self { ttl, renewed }
    }

    /// Notes that a request which began then has renewed it. Requests may be noted in any order.
    pub(crate) fn renewed(&mut self, begun: Time) {
        self.renewed = self.renewed.max(begun);
    }

    /// Returns the time at which the job must not run any longer.
    pub(crate) fn deadline(&self) -> Time {
        self.renewed + self.ttl / GUARD * (GUARD - 1)
    }

    /// Returns the time at which the sandbox ends the job of a supervisor that has not done so: in the middle of the guard,
    /// so that time is left for the end of its processes.
    pub(crate) fn job_limit(&self) -> Time {
        self.deadline() + self.ttl / GUARD / 2
    }

    pub(crate) fn is_valid(&self, now: Time) -> bool {
        now < self.deadline()
    }

    /// Returns the time of the next renewal.
    pub(crate) fn next_renewal(&self) -> Time {
        self.renewed + self.ttl / RENEWAL
    }
}

/// Another supervisor's lease, as it is watched from outside.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Watched {
    /// Number of the latest entry by a holder: entries by others do not renew the lease.
    renewals: u64,
    /// End of the first request that saw that entry or a later one.
    seen: Time,
    ttl: Duration,
}

impl Watched {
    /// Starts to watch a lease that was renewed this often by now.
    pub(crate) fn new(renewals: u64, ttl: Duration, seen: Time) -> Self {
        Self {
            renewals,
            seen,
            ttl,
        }
    }

    /// Notes the state of now. Returns true if the lease was renewed since.
    pub(crate) fn see(&mut self, renewals: u64, ttl: Duration, now: Time) -> bool {
        let is_renewed = renewals != self.renewals;
        if is_renewed {
            *self = Self::new(renewals, ttl, now);
        }
        is_renewed
    }

    /// Returns the time at which the lease can be taken, unless a newer entry is seen before.
    pub(crate) fn free_at(&self) -> Time {
        self.seen + self.ttl + self.ttl / GUARD
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_sandbox_acts_after_the_holder_and_before_others() {
        for ttl in [10, 60, 3600].map(Duration::from_secs) {
            let begun = Duration::from_secs(1000);
            let held = Held::new(ttl, begun);
            let next = Watched::new(0, ttl, begun).free_at();
            assert!(held.deadline() < held.job_limit() && held.job_limit() < next);
        }
    }
}
