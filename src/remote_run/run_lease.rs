//! A lease whose loss ends the run: the job is killed in time, or this process ends.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use super::lease_keeper::{Lease, OnLoss};
use crate::store::RemoteError;
use crate::sync::{locked, wait_until};

/// Lease of a run that this process supervises, or is about to. It is renewed from the beginning.
pub(crate) struct RunLease {
    loss: Arc<Mutex<Loss>>,
    end: Arc<JobEnd>,
    job_limit: OwnedFd,
}

/// The end of a job whose lease is lost.
#[derive(Default)]
pub(crate) struct JobEnd {
    has_come: Mutex<bool>,
    changed: Condvar,
}

/// The loss of a lease, or who is told of it.
enum Loss {
    /// The lease is held, and nobody waits for its loss.
    None,
    /// Lost to this holder, if it is known, before anybody waited for that.
    Untold(Option<String>),
    Watched(Arc<OnLoss>),
}

impl RunLease {
    pub(super) fn new(lease: &Lease) -> Result<Self, RemoteError> {
        let loss = Arc::new(Mutex::new(Loss::None));
        let shared = Arc::clone(&loss);
        lease.keep(Box::new(move |holder| {
            let mut loss = locked(&shared);
            match &*loss {
                Loss::None => *loss = Loss::Untold(holder),
                Loss::Untold(_) => {}
                Loss::Watched(on_loss) => {
                    let on_loss = Arc::clone(on_loss);
                    drop(loss);
                    on_loss(holder);
                }
            }
        }))?;
        Ok(Self {
            loss,
            end: Arc::default(),
            job_limit: lease.job_limit()?,
        })
    }

    /// Has `on_loss` called when this supervisor must not run the job any longer.
    ///
    /// # Errors
    /// The lease is lost already, to this holder if it is known.
    pub(crate) fn watch(&self, on_loss: OnLoss) -> Result<(), Option<String>> {
        let mut loss = locked(&self.loss);
        if let Loss::Untold(holder) = &*loss {
            return Err(holder.clone());
        }
        *loss = Loss::Watched(Arc::new(on_loss));
        Ok(())
    }

    /// Returns a timer that expires when the job must not run any longer, even if this process does not run then.
    pub(crate) fn job_limit(&self) -> BorrowedFd<'_> {
        self.job_limit.as_fd()
    }

    /// Returns true if the job must not run any longer.
    pub(crate) fn ends_the_job(&self) -> bool {
        let mut timer = [PollFd::new(self.job_limit(), PollFlags::POLLIN)];
        poll(&mut timer, PollTimeout::ZERO).is_ok_and(|count| count > 0)
    }

    /// Returns the end of the job, for the callback of a loss.
    pub(crate) fn job_end(&self) -> Arc<JobEnd> {
        Arc::clone(&self.end)
    }
}

impl JobEnd {
    /// Notes that the job of a lost lease was killed, or has ended.
    pub(crate) fn note(&self) {
        *locked(&self.has_come) = true;
        self.changed.notify_all();
    }

    /// Returns true if the job ends within this time.
    pub(crate) fn comes_within(&self, limit: Duration) -> bool {
        let has_come = locked(&self.has_come);
        *wait_until(&self.changed, has_come, limit, |has_come| *has_come)
    }
}
