//! Background upload of the run's images, the newest first. An image that is superseded before its upload begins is
//! left out.

use std::sync::{Arc, Condvar, Mutex};
use std::thread::Builder;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::lease_keeper::Lease;
use super::remote_retention::plan_by_rules;
use super::shared_state::Change;
use crate::clock;
use crate::printable::chain;
use crate::store::RemoteError;
use crate::store::RemoteImage;
use crate::store::remote::upload::Uploads;
use crate::store::{ByteCounter, Companion, ImageId, Policy, ReadError, Store};
use crate::sync::{locked, wait, wait_for, wait_until};

/// Delays before the next attempt after a failure.
const RETRY_MIN: Duration = Duration::from_secs(1);
const RETRY_MAX: Duration = Duration::from_secs(60);
/// Interval between two checks if a wait for an upload is over for another reason.
const LOOK: Duration = Duration::from_millis(100);

/// Returns the files that accompany an image.
pub(crate) type CompanionsOf = Box<dyn Fn(ImageId) -> Vec<Companion> + Send>;

/// Callback for an image that is in the remote store.
pub(crate) type Uploaded = Box<dyn Fn(ImageId, &RemoteImage) + Send>;
/// Reads what the remote store has.
pub(crate) type Begin = Box<dyn Fn() -> Result<Uploads, RemoteError> + Send>;

/// Progress of the uploads of a run.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct UploadProgress {
    /// Address of the remote store.
    pub url: String,
    /// Newest image that is complete in the remote store.
    pub uploaded: Option<ImageId>,
    /// Newest image that is to be uploaded, or is being uploaded.
    pub waiting: Option<ImageId>,
    /// Bytes that this supervisor has uploaded.
    pub sent_bytes: u64,
    /// Reason of the latest failure, if the upload has not succeeded since.
    pub failure: Option<String>,
}

/// Uploads images of a store in a thread.
pub(crate) struct Uploader {
    shared: Arc<Shared>,
}

struct Shared {
    store: Store,
    lease: Arc<Lease>,
    keep: u32,
    state: Mutex<State>,
    changed: Condvar,
    sent: ByteCounter,
}

#[derive(Default)]
struct State {
    progress: UploadProgress,
    is_closed: bool,
}

impl Uploader {
    /// Starts the thread.
    pub(crate) fn start(
        store: Store,
        lease: Arc<Lease>,
        keep: u32,
        begin: Begin,
        companions: CompanionsOf,
        uploaded: Uploaded,
    ) -> Result<Self, RemoteError> {
        let shared = Arc::new(Shared {
            store,
            lease,
            keep,
            state: Mutex::default(),
            changed: Condvar::new(),
            sent: ByteCounter::default(),
        });
        let thread = Arc::clone(&shared);
        Builder::new()
            .name("uploader".to_owned())
            .spawn(move || thread.run(&begin, &companions, &uploaded))
            .map_err(RemoteError::Thread)?;
        Ok(Self { shared })
    }

    /// Has an image uploaded, which is complete in the local store, unless it was.
    pub(crate) fn upload(&self, id: ImageId) {
        let mut state = locked(&self.shared.state);
        if state.progress.uploaded < Some(id) {
            state.progress.waiting = state.progress.waiting.max(Some(id));
        }
        drop(state);
        self.shared.changed.notify_all();
    }

    /// Waits until an image, or a newer one, is in the remote store. Returns false if it is not: the uploads have ended,
    /// or `is_over` has returned true.
    pub(crate) fn wait(&self, id: ImageId, is_over: &dyn Fn() -> bool) -> bool {
        let mut state = locked(&self.shared.state);
        loop {
            let UploadProgress {
                uploaded, waiting, ..
            } = state.progress;
            if uploaded >= Some(id) {
                return true;
            }
            if state.is_closed || waiting.is_none() || is_over() {
                return false;
            }
            (state, _) = wait_for(&self.shared.changed, state, LOOK);
        }
    }

    /// Ends the uploads. One under way continues until its next request has ended.
    pub(crate) fn close(&self) {
        locked(&self.shared.state).is_closed = true;
        self.shared.changed.notify_all();
    }

    /// Returns the progress.
    pub(crate) fn progress(&self) -> UploadProgress {
        let progress = locked(&self.shared.state).progress.clone();
        let sent_bytes = self.shared.sent.bytes();
        UploadProgress {
            sent_bytes,
            ..progress
        }
    }
}

impl Drop for Uploader {
    fn drop(&mut self) {
        self.close();
    }
}

impl Shared {
    fn run(&self, begin: &Begin, companions: &CompanionsOf, uploaded: &Uploaded) {
        let mut uploads = None;
        let mut delay = RETRY_MIN;
        while let Some(id) = self.next() {
            let result = match &mut uploads {
                Some(uploads) => {
                    let companions = companions(id);
                    self.upload(uploads, id, &companions, uploaded)
                }
                none @ None => begin().map(|begun| *none = Some(begun)),
            };
            match result {
                Ok(()) => delay = RETRY_MIN,
                // A rotation has removed it; a newer one follows.
                Err(RemoteError::Read(ReadError::Missing { .. })) => self.done(id),
                Err(RemoteError::Fenced { .. }) => {
                    // The lease's own thread ends the run.
                    locked(&self.state).is_closed = true;
                    self.changed.notify_all();
                }
                Err(error) => {
                    let reason = chain(&error);
                    let mut state = locked(&self.state);
                    // Reasons differ in times and names of objects, also during one outage.
                    if state.progress.failure.is_none() {
                        tracing::warn!(image = %id, "cannot upload the image, it is tried again: {reason}");
                    }
                    state.progress.failure = Some(reason);
                    // A newer image does not shorten the wait: the server may be overloaded.
                    drop(wait_until(&self.changed, state, delay, |state| {
                        state.is_closed
                    }));
                    delay = (delay * 2).min(RETRY_MAX);
                }
            }
        }
    }

    fn done(&self, id: ImageId) {
        let mut state = locked(&self.state);
        if state.progress.waiting == Some(id) {
            state.progress.waiting = None;
        }
        drop(state);
        self.changed.notify_all();
    }

    /// Returns the next image to upload; `None` at the end.
    fn next(&self) -> Option<ImageId> {
        let mut state = locked(&self.state);
        loop {
            if state.is_closed {
                return None;
            }
            if let Some(id) = state.progress.waiting {
                return Some(id);
            }
            state = wait(&self.changed, state);
        }
    }

    fn upload(
        &self,
        uploads: &mut Uploads,
        id: ImageId,
        companions: &[Companion],
        uploaded: &Uploaded,
    ) -> Result<(), RemoteError> {
        let begun = clock::now();
        let before = self.sent.bytes();
        let image = uploads.upload(&self.store, id, companions, &self.sent)?;
        let old = self.old_beside(&image);
        self.lease.change(&Change::Commit {
            image: image.clone(),
            old,
        })?;
        uploaded(id, &image);
        tracing::info!(
            image = %id,
            sent = %crate::printable::size(self.sent.bytes() - before),
            seconds = begun.elapsed().as_secs_f64(),
            "the image is in the remote store"
        );
        // After the message: who waits for this has read it.
        let mut state = locked(&self.state);
        state.progress.uploaded = Some(id);
        state.progress.failure = None;
        drop(state);
        self.done(id);
        let removed = uploads.remove_garbage(&self.lease.state().images);
        if let Err(error) = removed {
            tracing::warn!(
                "cannot remove old images of the remote store: {}",
                chain(&error)
            );
        }
        Ok(())
    }

    /// Returns the objects of the images that are not kept beside a new one.
    fn old_beside(&self, image: &RemoteImage) -> Vec<String> {
        let mut images = self.lease.state().images;
        images.retain(|known| known.object != image.object);
        images.push(image.clone());
        let policy = Policy {
            keep_last: self.keep,
            keep_within: Duration::ZERO,
            keep_hourly: 0,
            keep_daily: 0,
        };
        let planned = plan_by_rules(&images, &policy);
        let old = images.into_iter().zip(planned);
        old.filter(|(_, planned)| planned.fate.is_removed())
            .map(|(image, _)| image.object)
            .collect()
    }
}
