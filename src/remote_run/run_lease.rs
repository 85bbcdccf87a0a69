//! A lease whose loss ends the run: the job is killed in time, or this process ends.

use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use super::lease_keeper::{Lease, OnLoss};
use crate::store::RemoteError;
use crate::sync::{locked, wait_until};

/// Lease of a run that this process supervises, or is about to. It is renewed from the beginning.
pub(crate) struct RunLease {
    loss: Arc<Mutex<Loss>>,
    /// True once the job of a lost lease was killed.
    obeyed: (Mutex<bool>, Condvar),
}

/// The loss of a lease, or who is told of it.
enum Loss {
    /// Not lost, and nobody is to be told yet.
    None,
    /// Lost to this holder, if it is known, before anybody was to be told.
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
            obeyed: Default::default(),
        })
    }

    /// Has `on_loss` called when this supervisor must not run the job any longer, at once if that is so now.
    pub(crate) fn watch(&self, on_loss: OnLoss) -> Result<(), RemoteError> {
        let on_loss = Arc::new(on_loss);
        let before = std::mem::replace(
            &mut *locked(&self.loss),
            Loss::Watched(Arc::clone(&on_loss)),
        );
        if let Loss::Untold(holder) = before {
            let thread = std::thread::Builder::new().name("lease-lost".to_owned());
            let told = thread.spawn(move || on_loss(holder));
            told.map_err(RemoteError::Thread)?;
        }
        Ok(())
    }

    /// Notes that the job of a lost lease was killed, or has ended.
    pub(crate) fn obey(&self) {
        *locked(&self.obeyed.0) = true;
        self.obeyed.1.notify_all();
    }

    /// Returns true if the job is killed within this time.
    pub(crate) fn is_obeyed_within(&self, limit: Duration) -> bool {
        let obeyed = locked(&self.obeyed.0);
        *wait_until(&self.obeyed.1, obeyed, limit, |obeyed| *obeyed)
    }
}
