//! Checks that a store keeps after a crash what it promised before.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use super::super::support::never;
use super::ledger::{Ledger, Presence, Streams, Texts, key, texts};
use crate::store::format::store_key::KEY_FILE;
use crate::store::{ImageId, Marks, OpenError, RepairPlan, Store, StoreLock, Swept};

/// Facts that must be true of a store.
#[derive(Default)]
pub(super) struct Promises {
    /// Number of notes from which they follow.
    pub(super) notes: usize,
    pub(super) created: bool,
    pub(super) images: BTreeMap<ImageId, Presence>,
    pub(super) contents: BTreeMap<ImageId, Streams>,
    pub(super) marks: BTreeMap<ImageId, Texts>,
    pub(super) pins: BTreeMap<ImageId, Texts>,
    pub(super) broken: BTreeSet<ImageId>,
    pub(super) is_encrypted: bool,
}

macro_rules! ensure {
    ($condition:expr, $($text:tt)+) => {
        if !$condition {
            return Err(format!($($text)+));
        }
    };
}

impl Promises {
    /// Opens the state that a crash left with the real code. Returns an error that describes a broken promise.
    pub(super) fn check(&self, path: &Path) -> Result<(), String> {
        let store = self.open(path)?;
        let lock = store.lock().map_err(|error| format!("lock: {error}"))?;
        if !self.broken.is_empty() {
            self.check_entries(&store, &self.broken)?;
            let repaired = store.plan_repair(&lock, Marks::Keep, &never);
            let repaired = repaired.and_then(RepairPlan::apply);
            repaired.map_err(|error| format!("repair: {error}"))?;
        }
        let swept = store.sweep(&lock);
        let swept = swept.map_err(|error| format!("sweep: {error}"))?;
        ensure!(swept.unreadable.is_empty(), "unreadable: {swept:?}");
        let prune = || {
            let pruned = store.prune(&lock);
            pruned.map_err(|error| format!("prune: {error}"))
        };
        prune()?;
        let visible = self.check_images(&store)?;
        check_leftovers(&store, &visible)?;
        let again = prune()?;
        ensure!(
            again == Swept::default(),
            "sweep and prune left something: {again:?}"
        );
        self.check_continues(&store, &lock, &visible)
    }

    fn open(&self, path: &Path) -> Result<Store, String> {
        let key = self.is_encrypted.then(key);
        let opened = if self.created {
            Store::open_with(path, key.as_ref())
        } else {
            Store::create_or_open_with(path, key.as_ref())
        };
        if self.created && self.is_encrypted {
            let without = Store::open(path);
            let is_refused = matches!(without, Err(OpenError::KeyMissing { .. }));
            ensure!(is_refused, "without the key: {without:?}");
        }
        opened.map_err(|error| format!("opening: {error}"))
    }

    fn check_images(&self, store: &Store) -> Result<Vec<ImageId>, String> {
        let visible = self.check_entries(store, &BTreeSet::new())?;
        for (id, presence) in &self.images {
            let is_visible = visible.contains(id);
            ensure!(
                is_visible || *presence != Presence::Yes,
                "image {id} is gone"
            );
            ensure!(
                !is_visible || *presence != Presence::No,
                "image {id} is there"
            );
        }
        Ok(visible)
    }

    /// Returns the existing images after checking that all of them are whole, except for the broken ones.
    fn check_entries(
        &self,
        store: &Store,
        broken: &BTreeSet<ImageId>,
    ) -> Result<Vec<ImageId>, String> {
        let entries = store.images().map_err(|error| format!("images: {error}"))?;
        for entry in &entries {
            let id = entry.id;
            ensure!(
                self.images.contains_key(&id),
                "image {id} comes from nowhere"
            );
            for (kind, promised, found) in [
                ("mark", &self.marks, &entry.damaged),
                ("pin", &self.pins, &entry.pinned),
            ] {
                let is_allowed = texts(promised, id).contains(&found.as_deref());
                ensure!(is_allowed, "image {id} has the {kind} {found:?}");
            }
            if !broken.contains(&id) {
                self.check_content(store, id)?;
            }
        }
        Ok(entries.iter().map(|entry| entry.id).collect())
    }

    fn check_content(&self, store: &Store, id: ImageId) -> Result<(), String> {
        let reader = store.read(id).map_err(|error| format!("{error:?}"))?;
        for (name, bytes) in &self.contents[&id] {
            let read = reader.read_to_vec(name, u64::MAX);
            let read = read.map_err(|error| format!("{error:?}"))?;
            ensure!(read == *bytes, "image {id} differs in {name}");
        }
        Ok(())
    }

    /// Writes a new image that has much in common with the others, and checks that its number comes after theirs.
    fn check_continues(
        &self,
        store: &Store,
        lock: &StoreLock,
        visible: &[ImageId],
    ) -> Result<(), String> {
        let mut streams: Streams = vec![("new", b"after the crash".to_vec())];
        if let Some(newest) = visible.last() {
            streams.extend(self.contents[newest].clone());
        }
        let ledger = Ledger::default();
        let written = ledger.write(store, lock, &streams);
        let id = written.map_err(|error| format!("a new image: {error}"))?;
        ensure!(
            visible.iter().all(|other| *other < id),
            "the number {id} again"
        );
        ledger.promises().check_content(store, id)
    }
}

/// Checks that a sweep leaves nothing but the data that the images need.
fn check_leftovers(store: &Store, visible: &[ImageId]) -> Result<(), String> {
    let mut wanted: Vec<PathBuf> = Vec::new();
    for id in visible {
        wanted.extend([
            store.manifest_file(*id),
            store.damaged_file(*id),
            store.pinned_file(*id),
        ]);
        let manifest = store.manifest(*id).map_err(|error| format!("{error}"))?;
        let packs = manifest.packs.iter();
        wanted.extend(packs.map(|pack| store.pack_file(pack.name)));
    }
    let outside =
        [".gitignore", "format", "lock", "images", "packs"].map(|name| store.path().join(name));
    wanted.extend(outside);
    if store.is_encrypted() {
        wanted.push(store.path().join(KEY_FILE));
    }
    for folder in [
        store.path().to_owned(),
        store.images_folder(),
        store.packs_folder(),
    ] {
        for found in fs::read_dir(folder).unwrap() {
            let path = found.unwrap().path();
            ensure!(wanted.contains(&path), "{} is left", path.display());
        }
    }
    Ok(())
}
