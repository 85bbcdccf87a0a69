//! The lease of this supervisor: it is acquired at the start, renewed by a thread, and watched by another one that
//! reports its end in time, even if a request hangs or the machine was suspended.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::Builder;
use std::time::Duration;

use nix::sys::time::TimeSpec;
use nix::sys::timerfd::{ClockId, Expiration, TimerFd, TimerFlags, TimerSetTimeFlags};

use super::lease::{Held, Time};
use super::lease_wait::{LeaseWait, Patience};
use super::shared_state::{Change, Holder, State};
use super::state_log::{Entry, StateLog};
use crate::clock;
use crate::printable::chain;
use crate::store::RemoteError;
use crate::store::remote::bucket::Bucket;
use crate::sync::{locked, wait_for};

/// Time between two attempts to renew a lease.
const RETRY: Duration = Duration::from_millis(500);

/// Terms on which a lease is acquired.
#[derive(Clone, Debug)]
pub(crate) struct Terms {
    pub(crate) holder: Holder,
    pub(crate) ttl: Duration,
    /// Treatment of a lease that another supervisor has not released.
    pub(super) patience: Patience,
    /// Begin the run anew, without its images.
    pub(crate) fresh: bool,
}

/// Lease that this process holds. Dropped, it is not renewed any more.
pub(crate) struct Lease {
    shared: Arc<Shared>,
}

struct Shared {
    log: StateLog,
    bucket: Bucket,
    epoch: u64,
    /// Held while an entry is appended, which takes as long as a request.
    entry: Mutex<Entry>,
    held: Mutex<Held>,
    timer: TimerFd,
    /// Expires when the job must not run any longer, also if this process does not run; disarmed at the end.
    job_limit: TimerFd,
    ended: Mutex<bool>,
    end: Condvar,
}

/// Callback for the loss of a lease, which is called at most once by each of two threads.
pub(crate) type OnLoss = Box<dyn Fn(Option<String>) + Send + Sync>;

impl Lease {
    /// Waits for the lease of the run and takes it. Returns it with the state before, if the run has one. `report` is
    /// told once who holds it, and how long it must be waited at least.
    pub(crate) fn acquire(
        bucket: &Bucket,
        terms: &Terms,
        mut report: impl FnMut(&Holder, Duration),
    ) -> Result<(Self, Option<State>), RemoteError> {
        let log = StateLog::new(bucket.clone());
        let ttl_ms = u64::try_from(terms.ttl.as_millis()).unwrap_or(u64::MAX);
        let mut wait = LeaseWait::new(&log, terms.patience.clone(), &mut report);
        let mut known = log.newest(None)?;
        loop {
            let before = wait.until_free(known)?;
            let next = match &before {
                Some(entry) => taken(&entry.state, terms, ttl_ms, bucket)?,
                None => State::first(terms.holder.clone(), ttl_ms),
            };
            let begun = clock::since_boot();
            if let Some(entry) = log.append(before.as_ref(), next)? {
                let held = Held::new(terms.ttl, begun);
                let lease = Self::new(log.clone(), bucket.clone(), entry, held)?;
                return Ok((lease, before.map(|entry| entry.state)));
            }
            known = log.newest(before.as_ref())?;
        }
    }

    fn new(log: StateLog, bucket: Bucket, entry: Entry, held: Held) -> Result<Self, RemoteError> {
        let timer = || {
            TimerFd::new(ClockId::CLOCK_BOOTTIME, TimerFlags::TFD_CLOEXEC)
                .map_err(|errno| RemoteError::Thread(errno.into()))
        };
        let shared = Arc::new(Shared {
            log,
            bucket,
            epoch: entry.state.epoch,
            entry: Mutex::new(entry),
            held: Mutex::new(held),
            timer: timer()?,
            job_limit: timer()?,
            ended: Mutex::new(false),
            end: Condvar::new(),
        });
        Ok(Self { shared })
    }

    /// Renews the lease from now on. `on_loss` is called when this supervisor must not run the job any longer, with the
    /// new holder if it is known.
    pub(crate) fn keep(&self, on_loss: OnLoss) -> Result<(), RemoteError> {
        let on_loss = Arc::new(on_loss);
        let (shared, lost) = (Arc::clone(&self.shared), Arc::clone(&on_loss));
        shared.arm();
        Builder::new()
            .name("lease".to_owned())
            .spawn(move || shared.renew(&**lost))
            .map_err(RemoteError::Thread)?;
        let (shared, lost) = (Arc::clone(&self.shared), on_loss);
        Builder::new()
            .name("lease-end".to_owned())
            .spawn(move || shared.watch(&**lost))
            .map_err(RemoteError::Thread)?;
        Ok(())
    }

    /// Returns a timer that expires when the job must not run any longer, even if this process does not run then.
    pub(crate) fn job_limit(&self) -> Result<OwnedFd, RemoteError> {
        let timer = self.shared.job_limit.as_fd();
        timer.try_clone_to_owned().map_err(RemoteError::Thread)
    }

    /// Returns the present state.
    pub(crate) fn state(&self) -> State {
        locked(&self.shared.entry).state.clone()
    }

    /// Changes the state, which also renews the lease.
    ///
    /// # Errors
    /// [`RemoteError::Fenced`] if another supervisor has taken the lease: the change was not made.
    pub(crate) fn change(&self, change: &Change) -> Result<(), RemoteError> {
        self.shared.change(change)
    }

    /// Ends the lease: others need not wait.
    pub(crate) fn release(&self, change: &Change) -> Result<(), RemoteError> {
        self.shared.stop();
        self.shared.change(change)
    }

    /// Ends the lease like [`release`](Self::release), and warns if others need to wait.
    pub(crate) fn end(&self, change: &Change) {
        match self.release(change) {
            // Another supervisor has taken the lease.
            Ok(()) | Err(RemoteError::Fenced { .. }) => {}
            Err(error) => tracing::warn!(
                "the lease of the run was not released, another machine waits until it has expired: {}",
                chain(&error)
            ),
        }
    }
}

/// Returns the state after a takeover of the lease.
fn taken(
    before: &State,
    terms: &Terms,
    ttl_ms: u64,
    bucket: &Bucket,
) -> Result<State, RemoteError> {
    let taken = before.taken_by(terms.holder.clone(), ttl_ms);
    if !terms.fresh {
        return Ok(taken);
    }
    match taken.images.iter().find(|image| image.pinned.is_some()) {
        None => Ok(taken.anew()),
        Some(pinned) => Err(RemoteError::PinnedBefore {
            url: bucket.url().to_owned(),
            image: pinned.id,
        }),
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.shared.stop();
    }
}

impl Shared {
    fn change(&self, change: &Change) -> Result<(), RemoteError> {
        let mut entry = locked(&self.entry);
        loop {
            let Ok(state) = entry.state.changed(self.epoch, change) else {
                return Err(self.fenced(&entry));
            };
            let begun = clock::since_boot();
            if let Some(next) = self.log.append(Some(&*entry), state)? {
                *entry = next;
                locked(&self.held).renewed(begun);
                self.arm();
                return Ok(());
            }
            // Another supervisor's entry, one of a verb, which repeats this lease, or one of ours whose request had
            // seemed to fail.
            if let Some(newest) = self.log.newest(Some(&*entry))? {
                *entry = newest;
            }
        }
    }

    fn fenced(&self, entry: &Entry) -> RemoteError {
        RemoteError::Fenced {
            url: self.bucket.url().to_owned(),
            host: entry.state.holder.host.clone(),
        }
    }

    /// Renews the lease until it is lost or ended.
    fn renew(&self, on_loss: &dyn Fn(Option<String>)) {
        let mut is_reported = false;
        let mut wait = self.until_renewal();
        while !self.has_ended(wait) {
            match self.change(&Change::Renew) {
                Ok(()) => {
                    if std::mem::take(&mut is_reported) {
                        tracing::info!("the lease of the run is renewed again");
                    }
                    wait = self.until_renewal();
                }
                Err(RemoteError::Fenced { host, .. }) => {
                    if !self.has_ended(Duration::ZERO) {
                        on_loss(Some(host));
                    }
                    return;
                }
                Err(error) => {
                    if !std::mem::replace(&mut is_reported, true) {
                        let left = locked(&self.held)
                            .deadline()
                            .saturating_sub(clock::since_boot());
                        tracing::warn!(
                            "cannot renew the lease of the run, the job is stopped in {} s if this lasts: {}",
                            left.as_secs(),
                            chain(&error)
                        );
                    }
                    wait = RETRY;
                }
            }
        }
    }

    /// Waits for the deadline of the lease.
    fn watch(&self, on_loss: &dyn Fn(Option<String>)) {
        loop {
            // EINTR and a cancelled timer lead to another look.
            let _ = self.timer.wait();
            if self.has_ended(Duration::ZERO) {
                return;
            }
            if !locked(&self.held).is_valid(clock::since_boot()) {
                on_loss(None);
                return;
            }
            self.arm();
        }
    }

    fn until_renewal(&self) -> Duration {
        let next: Time = locked(&self.held).next_renewal();
        next.saturating_sub(clock::since_boot())
    }

    /// Sets the timers to the ends of the lease. After its end, the first one expires at once, and the second one never.
    fn arm(&self) {
        // Held until the timers are set: a renewal must not arm them again after the end.
        let has_ended = locked(&self.ended);
        let held = *locked(&self.held);
        let at = |timer: &TimerFd, time: Duration| {
            let time = Expiration::OneShot(TimeSpec::from_duration(time));
            timer.set(time, TimerSetTimeFlags::TFD_TIMER_ABSTIME)
        };
        let armed = if *has_ended {
            at(&self.timer, Duration::from_nanos(1)).and_then(|()| self.job_limit.unset())
        } else {
            at(&self.timer, held.deadline()).and_then(|()| at(&self.job_limit, held.job_limit()))
        };
        if let Err(errno) = armed {
            tracing::error!("cannot watch the lease of the run: {errno}");
        }
    }

    /// Returns true if the lease has ended by `limit` from now.
    fn has_ended(&self, limit: Duration) -> bool {
        let ended = locked(&self.ended);
        if *ended || limit.is_zero() {
            return *ended;
        }
        *wait_for(&self.end, ended, limit).0
    }

    fn stop(&self) {
        *locked(&self.ended) = true;
        self.end.notify_all();
        self.arm();
    }
}
