//! The shared state of a run: who may continue it, and which images it has.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

use crate::store::RemoteImage;

/// Format of the state that this version writes.
pub(crate) const FORMAT: u32 = 1;

/// Supervisor that holds, or held, the lease of a run.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Holder {
    /// Identity of its local store, random.
    pub store: String,
    /// Name of the machine, for messages.
    pub host: String,
}

/// State of a run in the remote store.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct State {
    /// Format of this entry.
    pub format: u32,
    /// Number of the lease: each takeover has the next one.
    pub epoch: u64,
    /// First epoch of those that this holder has held without another one in between.
    pub tenure: u64,
    /// Series of the objects that the holder uploads, which are named after it. The supervisors of one series follow
    /// each other on one machine, so they use each other's packs.
    pub series: u64,
    /// Number of entries by holders. An entry by a verb repeats it: it does not renew the lease.
    pub renewals: u64,
    /// Supervisor that holds the lease of this epoch.
    pub holder: Holder,
    /// Duration of the lease after each entry, in milliseconds.
    pub ttl_ms: u64,
    /// True if the holder has ended, so nobody needs to wait.
    pub released: bool,
    /// True if the job has ended by itself, with exit code 0.
    pub finished: bool,
    /// Complete images, oldest first.
    pub images: Vec<RemoteImage>,
    /// Random value that distinguishes the entry from any other.
    pub nonce: u64,
}

/// Reason why a state cannot follow another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct NotMine;

impl State {
    /// Creates the first state of a run.
    pub(crate) fn first(holder: Holder, ttl_ms: u64) -> Self {
        Self {
            format: FORMAT,
            epoch: 1,
            tenure: 1,
            series: 1,
            renewals: 1,
            holder,
            ttl_ms,
            released: false,
            finished: false,
            images: Vec::new(),
            nonce: 0,
        }
    }

    /// Returns the state in which another supervisor, or the same one after a restart, has taken the lease.
    pub(crate) fn taken_by(&self, holder: Holder, ttl_ms: u64) -> Self {
        let epoch = self.epoch + 1;
        let is_same = holder.store == self.holder.store;
        Self {
            epoch,
            tenure: if is_same { self.tenure } else { epoch },
            series: if is_same { self.series } else { epoch },
            renewals: self.renewals + 1,
            holder,
            ttl_ms,
            released: false,
            ..self.clone()
        }
    }

    /// Returns the state of a run that begins anew, without images.
    pub(crate) fn anew(self) -> Self {
        Self {
            finished: false,
            images: Vec::new(),
            ..self
        }
    }

    /// Returns the newest image from which the run continues.
    pub(crate) fn newest(&self) -> Option<&RemoteImage> {
        self.images.iter().rfind(|image| !image.abandoned)
    }

    /// Returns the state before a removal of objects that no image needs, for a lease that is free. The supervisors
    /// that follow upload objects of a new series, so none of theirs is removed.
    pub(crate) fn before_removal(&self) -> Self {
        let epoch = self.epoch + 1;
        Self {
            epoch,
            series: epoch,
            renewals: self.renewals + 1,
            released: true,
            ..self.clone()
        }
    }

    /// Returns the state with other images, by a verb that does not hold the lease.
    pub(crate) fn edited(&self, images: Vec<RemoteImage>) -> Self {
        Self {
            images,
            ..self.clone()
        }
    }

    /// Returns the state after a change by the holder of `epoch`.
    ///
    /// # Errors
    /// The lease belongs to a later epoch.
    pub(crate) fn changed(&self, epoch: u64, change: &Change) -> Result<Self, NotMine> {
        if self.epoch != epoch {
            return Err(NotMine);
        }
        let mut state = self.clone();
        state.renewals += 1;
        match change {
            Change::Renew => {}
            Change::Commit { image, old } => {
                state
                    .images
                    .retain(|image| image.pinned.is_some() || !old.contains(&image.object));
                let object = |known: &RemoteImage| known.object == image.object;
                let known = state.images.iter().position(object);
                // A pin of an image that is committed once more stays.
                let image = known.map_or_else(|| image.clone(), |at| state.images.remove(at));
                state.images.push(image);
            }
            Change::Abandon(objects) => {
                for image in &mut state.images {
                    image.abandoned = objects.contains(&image.object);
                }
            }
            Change::GiveBack(before) => {
                // A verb can have changed the images since. There are none if the run was to begin anew.
                let images = match &state.images[..] {
                    [] => before.images.clone(),
                    images => images.to_vec(),
                };
                state = Self {
                    epoch: state.epoch,
                    renewals: state.renewals,
                    released: true,
                    images,
                    ..(**before).clone()
                };
            }
            Change::Release { finished } => {
                state.released = true;
                state.finished = *finished;
            }
        }
        Ok(state)
    }
}

/// Change of the state by the holder of the lease.
#[derive(Clone, Debug)]
pub(crate) enum Change {
    /// A later end of the lease.
    Renew,
    /// A new complete image, and the end of old ones.
    Commit {
        image: RemoteImage,
        /// Images that are no longer kept, by their objects. A pinned one stays.
        old: Vec<String>,
    },
    /// The run continues from an image, or is going to: these are the images that are abandoned, by their objects.
    Abandon(BTreeSet<String>),
    /// The end of a supervisor that has not run the job: the run is as it was in this state, under its former holder.
    GiveBack(Box<State>),
    /// The end of the supervisor.
    Release {
        /// True if the job has ended by itself, with exit code 0.
        finished: bool,
    },
}
