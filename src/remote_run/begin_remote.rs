//! A run whose images are also in a remote store: its beginning, its uploads and its end.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use super::lease_keeper::{Lease, Terms};
use super::lease_wait::Patience;
use super::local_record::LocalRecord;
use super::run_lease::RunLease;
use super::shared_state::{Change, Holder, State};
use super::uploader::{CompanionsOf, UploadProgress, Uploader};
use crate::clock;
use crate::printable::{chain, size};
use crate::store::RemoteError;
use crate::store::RemoteImage;
use crate::store::remote::bucket::Bucket;
use crate::store::remote::download;
use crate::store::remote::upload::Uploads;
use crate::store::{ImageId, Manifest, Store, StoreLock};
use crate::sync::locked;

/// Time for one operation on data with all its attempts: a pack of 32 MiB within it needs 110 KiB/s.
const DATA_LIMIT: Duration = Duration::from_secs(300);
/// Part of the lease that one operation on the state may take with all its attempts.
pub(super) const STATE_LIMIT: u32 = 4;

/// Settings of a remote store.
#[derive(Clone, Debug)]
pub(crate) struct RemoteTerms {
    /// The address.
    pub url: String,
    /// Duration of the lease.
    pub lease: Duration,
    /// Number of images to keep in the remote store.
    pub keep: u32,
    /// Limit on the speed of uploads.
    pub bytes_per_second: Option<u64>,
    /// Take the lease at once, even if its holder may still run the job.
    pub take_over: bool,
    /// Begin anew: nothing is restored, and a finished run is no obstacle.
    pub fresh: bool,
}

/// Point from which this machine continues the run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Begun {
    /// The newest image of the local store, if there is one: no other machine has continued the run.
    Local,
    /// This image of the local store; newer ones are of a course of the run that another machine has left.
    From(ImageId),
    /// The newest of these images, which are in the remote store. Older images of the local store are of another course
    /// of the run, or older than them.
    Elsewhere { oldest: ImageId, newest: ImageId },
    /// The beginning: another machine has begun the run and has no image.
    Start,
    /// Nowhere: the job has ended by itself, with exit code 0.
    Finished,
}

/// Run in a remote store, whose lease this process holds.
pub(crate) struct RemoteRun {
    bucket: Bucket,
    terms: RemoteTerms,
    lease: Arc<Lease>,
    run_lease: RunLease,
    record: Arc<Mutex<LocalRecord>>,
    uploader: Mutex<Option<Arc<Uploader>>>,
    /// True once the run is to stop within a time: no snapshot waits for its upload.
    is_hurried: AtomicBool,
    /// The state before, until the job can have run here.
    before: Mutex<Option<Change>>,
    /// Images that were abandoned before a restore began whose job has not run.
    abandoned_before: Mutex<Option<BTreeSet<String>>>,
}

/// A supervisor that could not begin leaves the run as it was: the former holder can continue as if nothing had happened.
impl Drop for RemoteRun {
    fn drop(&mut self) {
        let change = locked(&self.before).take();
        if let Some(change) = change {
            // Not in this thread, which may be one of an async runtime.
            std::thread::scope(|scope| {
                scope.spawn(|| self.release(&change));
            });
        }
    }
}

impl std::fmt::Debug for RemoteRun {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("RemoteRun").field(&self.bucket).finish()
    }
}

impl RemoteRun {
    /// Acquires the lease of the run, and finds out where it continues. Blocks while another supervisor holds the
    /// lease.
    pub(crate) fn begin(
        terms: RemoteTerms,
        store: &Store,
        lock: &StoreLock,
    ) -> Result<(Self, Begun), RemoteError> {
        let bucket = Bucket::open(&terms.url, DATA_LIMIT)?;
        let states = Bucket::open(&terms.url, terms.lease / STATE_LIMIT)?;
        states.check_create_only()?;
        let record = LocalRecord::load(store)?;
        let host = nix::unistd::gethostname().unwrap_or_default();
        let holder = Holder {
            store: record.identity.clone(),
            host: host.to_string_lossy().into_owned(),
        };
        let patience = if terms.take_over {
            Patience::TakeOver
        } else {
            Patience::UntilExpired {
                own: holder.store.clone(),
            }
        };
        let lease_terms = Terms {
            holder,
            ttl: terms.lease,
            patience,
            fresh: terms.fresh,
        };
        let (lease, before) = Lease::acquire(&states, &lease_terms, |holder, left| {
            tracing::info!(
                "waiting {} s for the lease of {}: the supervisor on {} holds it, or has not ended it; --take-over takes \
                 it at once, if that machine is gone",
                left.as_secs() + 1,
                terms.url,
                holder.host
            );
        })?;
        let lease = Arc::new(lease);
        let run = Self {
            bucket,
            terms,
            run_lease: RunLease::new(&lease)?,
            lease,
            record: Arc::new(Mutex::new(record)),
            uploader: Mutex::new(None),
            is_hurried: AtomicBool::new(false),
            before: Mutex::new(Some(match &before {
                Some(state) => Change::GiveBack(Box::new(state.clone())),
                None => Change::Release { finished: false },
            })),
            abandoned_before: Mutex::default(),
        };
        let begun = run.find_beginning(before.as_ref(), store, lock)?;
        if begun == Begun::Finished {
            run.end(true);
        }
        Ok((run, begun))
    }

    /// Finds out where the run continues after the state `before`.
    fn find_beginning(
        &self,
        before: Option<&State>,
        store: &Store,
        lock: &StoreLock,
    ) -> Result<Begun, RemoteError> {
        let mut record = locked(&self.record);
        let images = self.lease.state().images;
        record
            .images
            .retain(|_, object| images.iter().any(|image| image.object == *object));
        let begun = match before {
            Some(state) if !self.terms.fresh => {
                continued(state, &mut record, &self.bucket, store, lock)?
            }
            Some(_) | None => Begun::Local,
        };
        record.tenure = Some(self.lease.state().tenure);
        record.save(store)?;
        Ok(begun)
    }

    /// Notes that the job can run here from now on: the lease is not given back to the holder before.
    pub(crate) fn has_begun(&self) {
        *locked(&self.before) = None;
    }

    pub(crate) fn run_lease(&self) -> &RunLease {
        &self.run_lease
    }

    /// Starts the thread that uploads images.
    pub(crate) fn start_uploads(
        &self,
        store: &Store,
        companions: CompanionsOf,
    ) -> Result<(), RemoteError> {
        let (bucket, lease) = (self.bucket.clone(), Arc::clone(&self.lease));
        let (own, rate) = (store.clone(), self.terms.bytes_per_second);
        let begin = move || {
            let state = lease.state();
            Uploads::begin(&bucket, state.series, &state.images, own.secrets(), rate)
        };
        let (record, own) = (Arc::clone(&self.record), store.clone());
        let uploaded = move |id: ImageId, image: &RemoteImage| {
            let mut record = locked(&record);
            record.images.insert(id, image.object.clone());
            if let Err(error) = record.save(&own) {
                tracing::warn!("{}", chain(&error));
            }
        };
        let uploader = Uploader::start(
            store.clone(),
            Arc::clone(&self.lease),
            self.terms.keep,
            Box::new(begin),
            companions,
            Box::new(uploaded),
        )?;
        *locked(&self.uploader) = Some(Arc::new(uploader));
        Ok(())
    }

    /// Has an image uploaded, and waits until it is in the remote store. Returns false if the wait has ended before: the
    /// run is to stop within a time, its lease is lost, or `is_over` has returned true.
    pub(crate) fn upload_and_wait(&self, id: ImageId, is_over: &dyn Fn() -> bool) -> bool {
        let uploader = locked(&self.uploader).clone();
        let is_over = || self.is_hurried.load(Ordering::Relaxed) || is_over();
        uploader.is_some_and(|uploader| {
            uploader.upload(id);
            uploader.wait(id, &is_over)
        })
    }

    /// Ends the waits of snapshots for their uploads.
    pub(crate) fn hurry(&self) {
        self.is_hurried.store(true, Ordering::Relaxed);
    }

    /// Has an image uploaded, which is complete in the local store.
    pub(crate) fn upload(&self, id: ImageId) {
        if let Some(uploader) = &*locked(&self.uploader) {
            uploader.upload(id);
        }
    }

    /// Has the newest image uploaded, unless it was.
    pub(crate) fn upload_backlog(&self, newest: Option<ImageId>) {
        let known = locked(&self.record).images.keys().last().copied();
        if let Some(newest) = newest.filter(|newest| Some(*newest) > known) {
            self.upload(newest);
        }
    }

    /// Returns the progress of the uploads.
    pub(crate) fn progress(&self) -> UploadProgress {
        let uploader = locked(&self.uploader);
        let progress = uploader
            .as_ref()
            .map(|uploader| uploader.progress())
            .unwrap_or_default();
        let uploaded = progress
            .uploaded
            .or(locked(&self.record).images.keys().last().copied());
        UploadProgress {
            url: self.bucket.url().to_owned(),
            uploaded,
            ..progress
        }
    }

    /// Returns true if an image came from another machine.
    pub(crate) fn has_come(&self, id: ImageId) -> bool {
        locked(&self.record).came.contains(&id)
    }

    /// Abandons the images that are newer than `id`, because the job is about to be restored from that one. Makes no
    /// request if there are none. Files of the job must not change before.
    ///
    /// # Errors
    /// The state was not changed.
    pub(crate) fn return_to(&self, id: ImageId) -> Result<(), RemoteError> {
        let mut before = locked(&self.abandoned_before);
        let images = self.lease.state().images;
        let present = abandoned(&images);
        // Those that an earlier restore abandoned are taken up again if its job has not run.
        let known = before.clone().unwrap_or_else(|| present.clone());
        let wanted = abandoned_by(id, &images, &known, &locked(&self.record));
        if wanted != present {
            self.lease.change(&Change::Abandon(wanted))?;
            before.get_or_insert(known);
        }
        Ok(())
    }

    /// Notes that the job has run, or may have run, from the image of the last [`return_to`](Self::return_to).
    pub(crate) fn has_returned(&self) {
        *locked(&self.abandoned_before) = None;
    }

    /// Returns true while an image waits for its upload, or is being uploaded.
    pub(crate) fn is_behind(&self) -> bool {
        let uploader = locked(&self.uploader);
        uploader
            .as_ref()
            .is_some_and(|uploader| uploader.progress().waiting.is_some())
    }

    /// Ends the lease, so that no other machine needs to wait. `finished` is true if the job has ended by itself, with
    /// exit code 0.
    pub(crate) fn end(&self, finished: bool) {
        let before = locked(&self.abandoned_before).take();
        match before.map_or(Ok(()), |before| self.lease.change(&Change::Abandon(before))) {
            // Another supervisor has taken the lease.
            Ok(()) | Err(RemoteError::Fenced { .. }) => {}
            Err(error) => tracing::warn!(
                "the newer images stay abandoned in the remote store: {}",
                chain(&error)
            ),
        }
        self.release(&Change::Release { finished });
    }

    fn release(&self, change: &Change) {
        *locked(&self.before) = None;
        if let Some(uploader) = locked(&self.uploader).take() {
            uploader.close();
        }
        self.lease.end(change);
    }
}

/// Returns the abandoned images, by their objects.
fn abandoned(images: &[RemoteImage]) -> BTreeSet<String> {
    let abandoned = images.iter().filter(|image| image.abandoned);
    abandoned.map(|image| image.object.clone()).collect()
}

/// Returns the images that are abandoned when the job is restored from image `id` of the local store. `before` are those
/// that were abandoned until then.
fn abandoned_by(
    id: ImageId,
    images: &[RemoteImage],
    before: &BTreeSet<String>,
    record: &LocalRecord,
) -> BTreeSet<String> {
    let is_abandoned = |object: &String| {
        let here = record.images.iter().filter(|(_, known)| *known == object);
        let mut here = here.map(|(here, _)| *here).peekable();
        if here.peek().is_none() {
            return before.contains(object);
        }
        let mut is_newer = true;
        for here in here {
            if here == id {
                return false;
            }
            is_newer &= here > id;
        }
        is_newer || before.contains(object)
    };
    let objects = images.iter().map(|image| &image.object);
    objects
        .filter(|object| is_abandoned(object))
        .cloned()
        .collect()
}

/// Finds out where a run continues that the remote store knows.
fn continued(
    state: &State,
    record: &mut LocalRecord,
    bucket: &Bucket,
    store: &Store,
    lock: &StoreLock,
) -> Result<Begun, RemoteError> {
    if state.finished {
        return Ok(Begun::Finished);
    }
    let is_ours = state.holder.store == record.identity && record.tenure == Some(state.tenure);
    if is_ours && !store.images()?.is_empty() {
        offer_again(state, record, bucket, store, lock);
        return Ok(Begun::Local);
    }
    let Some(newest) = state.newest() else {
        return Ok(if is_ours { Begun::Local } else { Begun::Start });
    };
    let known = record
        .images
        .iter()
        .rfind(|(_, object)| **object == newest.object);
    // Without the remote store, the number can have been given to another image since.
    let is_same = |manifest: Manifest| manifest.created_unix_ms == newest.created_unix_ms;
    if let Some((id, _)) = known
        && store.manifest(*id).is_ok_and(is_same)
    {
        let id = *id;
        offer_again(state, record, bucket, store, lock);
        return Ok(Begun::From(id));
    }
    offer_all(state, record, bucket, store, lock)
}

/// Offers the images of the run that came from another machine and were not downloaded, under their numbers. One that
/// cannot be read now is missing if the newer ones cannot be restored.
fn offer_again(
    state: &State,
    record: &LocalRecord,
    bucket: &Bucket,
    store: &Store,
    lock: &StoreLock,
) {
    for (id, object) in &record.images {
        let images = &mut state.images.iter();
        let image = images.find(|image| image.object == *object && !image.abandoned);
        if let Some(image) = image.filter(|_| record.came.contains(id))
            && store.manifest(*id).is_err()
            && let Err(error) = download::offer(bucket, image, *id, store, lock)
        {
            not_readable(image, &error);
        }
    }
}

/// Offers the images of the run. Nothing of them is downloaded yet but their manifests.
fn offer_all(
    state: &State,
    record: &mut LocalRecord,
    bucket: &Bucket,
    store: &Store,
    lock: &StoreLock,
) -> Result<Begun, RemoteError> {
    record.came.clear();
    let mut offered = Vec::new();
    let mut failure = None;
    for image in state.images.iter().filter(|image| !image.abandoned) {
        let last = record.came.last().copied();
        let id = download::next_number(image, last, store)?;
        record.images.insert(id, image.object.clone());
        record.came.insert(id);
        match download::offer(bucket, image, id, store, lock) {
            Ok(()) => offered.push((id, image)),
            Err(error @ RemoteError::Damaged { .. }) => {
                not_readable(image, &error);
                failure = Some(error);
            }
            Err(error) => return Err(error),
        }
    }
    let (Some((oldest, _)), Some((newest, image))) = (offered.first(), offered.last()) else {
        // The state has a newest image, which could not be read.
        return failure.map_or(Ok(Begun::Start), Err);
    };
    let age = clock::unix_ms().saturating_sub(image.created_unix_ms) / 1000;
    tracing::info!(
        image = %newest,
        size = %size(image.raw_bytes),
        age_seconds = age,
        made_on = %state.holder.host,
        "the run continues from its images in {}",
        bucket.url()
    );
    Ok(Begun::Elsewhere {
        oldest: *oldest,
        newest: *newest,
    })
}

fn not_readable(image: &RemoteImage, error: &RemoteError) {
    tracing::warn!(object = %image.object, "an image of the run cannot be read: {}", chain(error));
}
