//! Verbs beside a supervisor that holds the lease, with a folder as the storage.

use std::collections::BTreeSet;
use std::fs;

use super::*;
use crate::remote_run::lease_keeper::{Lease, Terms};
use crate::remote_run::lease_wait::Patience;
use crate::remote_run::shared_state::Change;
use crate::store::ByteCounter;
use crate::store::remote::upload::Uploads;
use crate::store::tests::support::{noise, read_stream, temporary_store, write_image};

const LIMIT: Duration = Duration::from_secs(60);

/// Run with images, whose supervisor holds the lease.
struct Scene {
    folder: tempfile::TempDir,
    store: Store,
    bucket: Bucket,
    lease: Lease,
    uploads: Uploads,
}

impl Scene {
    fn new() -> Self {
        let (folder, store) = temporary_store();
        let bucket = Bucket::open(&url(&folder), LIMIT).unwrap();
        let lease = acquire(&bucket, "holder");
        let uploads = Uploads::begin(&bucket, lease.state().series, &[], None, None).unwrap();
        Self {
            folder,
            store,
            bucket,
            lease,
            uploads,
        }
    }

    /// Uploads an image with some new chunks; returns it without a commit.
    fn upload(&mut self) -> RemoteImage {
        let lock = self.store.lock().unwrap();
        let number = self.store.images().unwrap().len() as u64;
        let streams = [
            ("same", noise(100, 300_000)),
            ("new", noise(number, 300_000)),
        ];
        let streams = streams.iter().map(|(name, bytes)| (*name, &bytes[..]));
        let id = write_image(&self.store, &lock, &streams.collect::<Vec<_>>()).id;
        let sent = ByteCounter::default();
        self.uploads.upload(&self.store, id, &[], &sent).unwrap()
    }

    /// Adds images to the run.
    fn with_images(mut self, count: usize) -> Self {
        for _ in 0..count {
            let image = self.upload();
            self.lease.change(&committed(image)).unwrap();
        }
        self
    }

    fn verbs(&self) -> RemoteImages {
        RemoteImages::open(&url(&self.folder), None).unwrap()
    }

    fn objects(&self) -> BTreeSet<String> {
        let list = |folder| self.bucket.list(folder, None).unwrap();
        let objects = [list("images"), list("packs")].concat();
        objects.into_iter().map(|object| object.name).collect()
    }

    fn release(&self) {
        let change = Change::Release { finished: false };
        self.lease.release(&change).unwrap();
    }
}

fn url(folder: &tempfile::TempDir) -> String {
    format!("file://{}/bucket", folder.path().display())
}

fn acquire(bucket: &Bucket, store: &str) -> Lease {
    let terms = Terms {
        holder: Holder {
            store: store.to_owned(),
            host: "host".to_owned(),
        },
        ttl: Duration::from_secs(3600),
        patience: Patience::UntilExpired {
            own: store.to_owned(),
        },
        fresh: false,
    };
    Lease::acquire(bucket, &terms, |_, _| {}).unwrap().0
}

fn committed(image: RemoteImage) -> Change {
    Change::Commit {
        image,
        old: Vec::new(),
    }
}

fn id(number: u64) -> ImageId {
    ImageId::new(number).unwrap()
}

fn numbers(images: &[ImageEntry]) -> Vec<u64> {
    images.iter().map(|image| image.id.number()).collect()
}

#[test]
fn a_pin_leaves_the_lease_to_its_holder() {
    let mut scene = Scene::new().with_images(2);
    let verbs = scene.verbs();
    verbs.pin(id(1), "good\x1bnote").unwrap();
    let image = scene.upload();
    // The holder does not know the entry of the pin.
    assert_eq!(scene.lease.state().images[0].pinned, None);
    let objects = scene.lease.state().images.into_iter();
    let old = objects.map(|image| image.object).collect();
    scene.lease.change(&Change::Commit { image, old }).unwrap();
    let images = verbs.images().unwrap();
    assert_eq!(numbers(&images), [1, 3]);
    assert_eq!(images[0].pinned.as_deref(), Some("good note"));
    assert!(verbs.unpin(id(1)).unwrap());
    assert!(!verbs.unpin(id(1)).unwrap());
}

#[test]
fn an_entry_of_a_verb_does_not_renew_the_lease() {
    let scene = Scene::new().with_images(1);
    let before = scene.verbs().state().unwrap();
    scene.verbs().pin(id(1), "").unwrap();
    let after = scene.verbs().state().unwrap();
    assert_eq!(before.renewals, after.renewals);
    scene.lease.change(&Change::Renew).unwrap();
    assert!(scene.verbs().state().unwrap().renewals > after.renewals);
}

#[test]
fn changes_of_many_verbs_at_once_are_all_made() {
    let scene = Scene::new().with_images(4);
    std::thread::scope(|scope| {
        for number in 1..=4 {
            let verbs = scene.verbs();
            scope.spawn(move || verbs.pin(id(number), &number.to_string()).unwrap());
        }
        for _ in 0..10 {
            scene.lease.change(&Change::Renew).unwrap();
        }
    });
    let notes = scene.verbs().images().unwrap().into_iter();
    let notes: Vec<String> = notes.filter_map(|image| image.pinned).collect();
    assert_eq!(notes, ["1", "2", "3", "4"]);
}

#[test]
fn forgotten_images_leave_their_objects_to_the_holder() {
    let mut scene = Scene::new().with_images(3);
    let verbs = scene.verbs();
    verbs.pin(id(2), "").unwrap();
    let objects = scene.objects();
    let forget = |numbers: &[u64]| {
        let ids: Vec<ImageId> = numbers.iter().map(|number| id(*number)).collect();
        verbs.forget(Removal::Named(&ids))
    };
    for refused in [2, 3, 9] {
        let error = forget(&[1, refused]).unwrap_err();
        assert!(matches!(error, RemoteError::Forget { .. }), "{error}");
    }
    assert_eq!(numbers(&verbs.images().unwrap()), [1, 2, 3]);
    forget(&[1]).unwrap();
    assert_eq!(numbers(&verbs.images().unwrap()), [2, 3]);
    assert_eq!(scene.objects(), objects);
    // The next image relies on chunks of the forgotten one.
    let image = scene.upload();
    scene.lease.change(&committed(image)).unwrap();
    let images = scene.lease.state().images;
    scene.uploads.remove_garbage(&images).unwrap();
    // One manifest is gone; the new image has added one and a pack.
    assert_eq!(scene.objects().len(), objects.len() + 1);
    let (_folder, other) = temporary_store();
    let lock = other.lock().unwrap();
    let copy = verbs.copy(id(4), &other, &lock, &|_, _| {}).unwrap();
    assert!(read_stream(&other, copy.id, "same") == noise(100, 300_000));
}

#[test]
fn prune_removes_what_no_image_needs() {
    let mut scene = Scene::new().with_images(2);
    let needed = scene.objects();
    // An upload that was interrupted before its commit.
    scene.upload();
    let all = scene.objects();
    assert_eq!(all.len(), needed.len() + 2);
    scene.release();
    let verbs = scene.verbs();
    let (prunable, holder) = verbs.prunable().unwrap();
    assert_eq!((prunable.manifests, prunable.packs, holder), (1, 1, None));
    assert_eq!(scene.objects(), all);
    let pruned = verbs.prune(|_, _| panic!("the lease is free")).unwrap();
    assert_eq!(pruned, prunable);
    assert_eq!(scene.objects(), needed);
    assert!(verbs.verify(Selection::All, &|_, _| {}).unwrap().is_whole());
    // The same store continues as if nothing had happened, and its objects have other names.
    let before = scene.lease.state();
    let after = acquire(&scene.bucket, "holder").state();
    assert_eq!(after.tenure, before.tenure);
    assert!(after.series > before.series);
}

#[test]
fn prune_is_refused_while_a_holder_renews() {
    let mut scene = Scene::new().with_images(1);
    scene.upload();
    let objects = scene.objects();
    let verbs = scene.verbs();
    assert_eq!(verbs.prunable().unwrap().1.unwrap().host, "host");
    let mut is_asked = false;
    let refused = verbs.prune(|holder, _| {
        assert_eq!(holder.host, "host");
        is_asked = true;
        scene.lease.change(&Change::Renew).unwrap();
    });
    let error = refused.unwrap_err();
    assert!(matches!(error, RemoteError::Held { .. }), "{error}");
    assert!(is_asked);
    assert_eq!(scene.objects(), objects);
    scene.lease.change(&Change::Renew).unwrap();
}

#[test]
fn verify_names_the_chunks_that_changed() {
    let scene = Scene::new().with_images(2);
    let verbs = scene.verbs();
    let report = verbs.verify(Selection::All, &|_, _| {}).unwrap();
    assert!(report.is_whole());
    assert!(report.chunks > 2, "{report:?}");
    let packs = scene.bucket.list("packs", None).unwrap();
    let path = |name: &str| scene.folder.path().join("bucket").join(name);
    let of_second = packs.iter().find(|pack| {
        let needed = image_object::packs_of(&scene.bucket, &scene.lease.state().images[0]);
        !needed.unwrap().contains(&pack.name)
    });
    let name = &of_second.unwrap().name;
    let good = fs::read(path(name)).unwrap();
    let mut bad = good.clone();
    bad[1000] ^= 1;
    fs::write(path(name), &bad).unwrap();
    let report = verbs.verify(Selection::All, &|_, _| {}).unwrap();
    assert!(report.images[0].streams.is_empty());
    let streams = &report.images[1].streams;
    assert_eq!((streams.len(), streams[0].name.as_str()), (1, "new"));
    assert_eq!(streams[0].runs[0].pack, *name);
    assert_eq!(streams[0].runs[0].chunks, 0..1);

    // What a shorter one has left is good.
    fs::write(path(name), &good[..good.len() - 1]).unwrap();
    let report = verbs
        .verify(Selection::These(&[id(2)]), &|_, _| {})
        .unwrap();
    let image = &report.images[0];
    assert_eq!(image.packs.len(), 1, "{image:?}");
    let run = &image.streams[0].runs[0];
    assert!(run.chunks.start > 0 && run.chunks.len() == 1, "{image:?}");
    fs::remove_file(path(name)).unwrap();
    let report = verbs
        .verify(Selection::These(&[id(2)]), &|_, _| {})
        .unwrap();
    assert_eq!(report.images[0].streams[0].runs[0].chunks.start, 0);
}

#[test]
fn a_process_with_an_old_entry_notices_newer_ones() {
    let scene = Scene::new();
    let log = &scene.verbs().log;
    let old = log.newest(None).unwrap().unwrap();
    for _ in 0..66 {
        scene.lease.change(&Change::Renew).unwrap();
    }
    // The entry after the old one was removed, so it can be created again.
    let appended = log.append(Some(&old), old.state.clone()).unwrap();
    assert_eq!(appended, None);
    let newest = log.newest(None).unwrap().unwrap();
    assert_eq!(newest.serial, old.serial + 66);
}

#[test]
fn verbs_create_nothing_where_no_run_is() {
    let folder = tempfile::tempdir().unwrap();
    let error = RemoteImages::open(&url(&folder), None).err().unwrap();
    assert!(matches!(error, RemoteError::Address { .. }), "{error}");
    assert!(!folder.path().join("bucket").exists());
    Bucket::open(&url(&folder), LIMIT).unwrap();
    let error = RemoteImages::open(&url(&folder), None).unwrap().images();
    assert!(matches!(error, Err(RemoteError::NoRun { .. })));
}

#[test]
fn a_run_that_begins_anew_keeps_pinned_images() {
    let scene = Scene::new().with_images(2);
    scene.verbs().pin(id(1), "").unwrap();
    scene.release();
    let terms = Terms {
        holder: Holder {
            store: "other".to_owned(),
            host: "host".to_owned(),
        },
        ttl: LIMIT,
        patience: Patience::UntilExpired { own: String::new() },
        fresh: true,
    };
    let refused = Lease::acquire(&scene.bucket, &terms, |_, _| {}).err();
    assert!(matches!(refused, Some(RemoteError::PinnedBefore { image, .. }) if image == id(1)));
    scene.verbs().unpin(id(1)).unwrap();
    let (lease, before) = Lease::acquire(&scene.bucket, &terms, |_, _| {}).unwrap();
    assert!(lease.state().images.is_empty());
    let give_back = Change::GiveBack(Box::new(before.unwrap()));
    lease.release(&give_back).unwrap();
    assert_eq!(numbers(&scene.verbs().images().unwrap()), [1, 2]);
}

#[test]
fn a_lease_that_is_given_back_keeps_the_changes_of_verbs() {
    let scene = Scene::new().with_images(2);
    scene.release();
    let before = scene.lease.state();
    let lease = acquire(&scene.bucket, "other");
    scene.verbs().pin(id(2), "kept").unwrap();
    scene.verbs().forget(Removal::Named(&[id(1)])).unwrap();
    let give_back = Change::GiveBack(Box::new(before.clone()));
    lease.release(&give_back).unwrap();
    let state = scene.verbs().state().unwrap();
    assert_eq!((state.tenure, state.holder), (before.tenure, before.holder));
    assert_eq!(state.images.len(), 1);
    assert_eq!(state.images[0].pinned.as_deref(), Some("kept"));
}
