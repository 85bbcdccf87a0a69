//! Wait for a lease that another supervisor holds, or has not released.

use std::time::Duration;

use super::lease::Watched;
use super::shared_state::Holder;
use super::state_log::{Entry, StateLog};
use crate::clock;
use crate::printable::chain;
use crate::store::RemoteError;

/// Time between two looks at another supervisor's lease.
const LOOK: Duration = Duration::from_secs(1);

/// Treatment of a lease that is not released.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Patience {
    /// Wait until it has expired, unless the holder is this store.
    UntilExpired { own: String },
    /// Wait as long, and fail if its holder renews it, unless the holder is this one.
    UntilRenewed { own: Option<String> },
    /// Treat it as free, even if its holder may still run the job.
    TakeOver,
}

/// Callback with the holder of a lease, and with the time to wait at least.
pub(super) type Report<'a> = &'a mut dyn FnMut(&Holder, Duration);

/// Wait for a lease.
pub(super) struct LeaseWait<'a> {
    log: &'a StateLog,
    patience: Patience,
    watched: Option<Watched>,
    /// Called once.
    report: Option<Report<'a>>,
    is_failing: bool,
}

impl<'a> LeaseWait<'a> {
    pub(super) fn new(log: &'a StateLog, patience: Patience, report: Report<'a>) -> Self {
        Self {
            log,
            patience,
            watched: None,
            report: Some(report),
            is_failing: false,
        }
    }

    /// Waits until the lease can be taken. Returns the newest entry, as far as known; `known` is an earlier one.
    pub(super) fn until_free(
        &mut self,
        mut known: Option<Entry>,
    ) -> Result<Option<Entry>, RemoteError> {
        while let Some(entry) = &known {
            let left = self.time_left(entry)?;
            if left.is_zero() {
                break;
            }
            if let Some(report) = self.report.take() {
                report(&entry.state.holder, left);
            }
            std::thread::sleep(left.min(LOOK));
            match self.log.newest(Some(entry)) {
                Ok(newest) => known = newest,
                // A renewal that is not seen now is seen later, at the latest when the next entry exists already.
                Err(error @ RemoteError::Request { .. }) => {
                    if !std::mem::replace(&mut self.is_failing, true) {
                        tracing::warn!("still waiting for the lease: {}", chain(&error));
                    }
                }
                Err(error) => return Err(error),
            }
        }
        Ok(known)
    }

    /// Returns the time until the lease of this entry can be taken, unless it is renewed before.
    fn time_left(&mut self, Entry { state, .. }: &Entry) -> Result<Duration, RemoteError> {
        let is_free = match &self.patience {
            Patience::UntilExpired { own } => state.holder.store == *own,
            Patience::UntilRenewed { own } => own.as_ref() == Some(&state.holder.store),
            Patience::TakeOver => true,
        };
        if is_free || state.released {
            return Ok(Duration::ZERO);
        }
        let now = clock::since_boot();
        let ttl = Duration::from_millis(state.ttl_ms);
        let first = || Watched::new(state.renewals, ttl, now);
        let watched = self.watched.get_or_insert_with(first);
        let is_renewed = watched.see(state.renewals, ttl, now);
        if is_renewed && matches!(self.patience, Patience::UntilRenewed { .. }) {
            return Err(RemoteError::Held {
                url: self.log.url().to_owned(),
                host: state.holder.host.clone(),
            });
        }
        Ok(watched.free_at().saturating_sub(now))
    }
}
