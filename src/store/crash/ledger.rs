//! What a store promised at each point of a change, and whether it is kept afterwards.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, OnceLock};

use super::super::error::WriteError;
use super::super::sync::locked;
use super::super::testing::OPTIONS;
use super::super::{ImageId, OpenError, Store, StoreLock, Swept, WriteOptions};
use super::log::Log;

/// Why images are set aside.
const REASON: &str = "a reason";

/// The streams of an image: their names and bytes.
pub(in crate::store) type Streams = Vec<(&'static str, Vec<u8>)>;

/// What an operation says of itself while it changes the store. Its methods make the
/// changes that promise something.
#[derive(Default)]
pub(in crate::store) struct Ledger {
    log: OnceLock<Log>,
    /// With the number of events that came before.
    notes: Mutex<Vec<(usize, Note)>>,
}

#[derive(Clone)]
enum Note {
    Created,
    Image(ImageId, Presence),
    Content(ImageId, Streams),
    Mark(ImageId, Presence),
}

/// Whether a thing is there after a crash.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Presence {
    Maybe,
    Yes,
    No,
}

/// What must be true of a store.
#[derive(Default)]
pub(super) struct Promises {
    /// How many notes they follow from.
    pub(super) notes: usize,
    created: bool,
    images: BTreeMap<ImageId, Presence>,
    contents: BTreeMap<ImageId, Streams>,
    marks: BTreeMap<ImageId, Presence>,
}

impl Ledger {
    /// Notes from now on belong to the events of this log.
    pub(super) fn attach(&self, log: Log) {
        assert!(self.log.set(log).is_ok(), "one log");
    }

    pub(super) fn log(&self) -> &Log {
        self.log.get().unwrap()
    }

    pub(super) fn into_log(self) -> (Log, Notes) {
        (
            self.log.into_inner().unwrap(),
            Notes(self.notes.into_inner().unwrap()),
        )
    }

    fn note(&self, note: Note) {
        let position = self.log.get().map_or(0, Log::len);
        locked(&self.notes).push((position, note));
    }

    /// The store at `path`, which is created where there is none.
    pub(in crate::store) fn open(&self, path: &Path) -> Result<Store, OpenError> {
        let store = Store::create_or_open(path)?;
        self.note(Note::Created);
        Ok(store)
    }

    /// Writes an image.
    pub(in crate::store) fn write(
        &self,
        store: &Store,
        lock: &StoreLock,
        streams: &Streams,
    ) -> Result<ImageId, WriteError> {
        // One worker, so that the events come in the same order each time.
        let options = WriteOptions {
            workers: 1,
            ..OPTIONS
        };
        let writer = store.begin(lock, options)?;
        let id = writer.id();
        self.note(Note::Content(id, streams.clone()));
        self.note(Note::Image(id, Presence::Maybe));
        for (name, bytes) in streams {
            let mut stream = writer.stream(name)?;
            stream.copy_from(&mut &bytes[..])?;
            stream.finish()?;
        }
        if let Err(error) = writer.commit(b"meta") {
            self.note(Note::Image(id, Presence::No));
            return Err(error);
        }
        self.note(Note::Image(id, Presence::Yes));
        Ok(id)
    }

    /// Begins an image and gives it up when some of it is stored.
    pub(in crate::store) fn give_up(
        &self,
        store: &Store,
        lock: &StoreLock,
        streams: &Streams,
    ) -> Result<(), WriteError> {
        let mut writer = store.begin(lock, OPTIONS)?;
        self.note(Note::Image(writer.id(), Presence::No));
        for (name, bytes) in streams {
            let mut stream = writer.stream(name)?;
            stream.copy_from(&mut &bytes[..])?;
            stream.finish()?;
        }
        writer.settle()
    }

    /// Rotates the images; these are the ones to go.
    pub(in crate::store) fn rotate(
        &self,
        store: &Store,
        lock: &StoreLock,
        keep_last: u32,
        going: &[ImageId],
    ) -> Result<(), WriteError> {
        for id in going {
            self.note(Note::Image(*id, Presence::Maybe));
        }
        assert_eq!(store.rotate(lock, keep_last)?, going);
        for id in going {
            self.note(Note::Image(*id, Presence::No));
        }
        Ok(())
    }

    /// Marks an image as damaged.
    pub(in crate::store) fn set_aside(
        &self,
        store: &Store,
        lock: &StoreLock,
        id: ImageId,
    ) -> Result<(), WriteError> {
        self.note(Note::Mark(id, Presence::Maybe));
        store.set_aside(lock, id, REASON)?;
        self.note(Note::Mark(id, Presence::Yes));
        Ok(())
    }
}

/// All notes of an operation.
pub(super) struct Notes(Vec<(usize, Note)>);

impl Notes {
    /// What was promised when that many events had happened.
    pub(super) fn promises(&self, events: usize) -> Promises {
        let mut promises = Promises::default();
        let so_far = self.0.iter().filter(|(position, _)| *position <= events);
        for (_, note) in so_far {
            promises.notes += 1;
            match note.clone() {
                Note::Created => promises.created = true,
                Note::Image(id, presence) => {
                    promises.images.insert(id, presence);
                }
                Note::Content(id, streams) => {
                    promises.contents.insert(id, streams);
                }
                Note::Mark(id, presence) => {
                    promises.marks.insert(id, presence);
                }
            }
        }
        promises
    }
}

macro_rules! ensure {
    ($condition:expr, $($text:tt)+) => {
        if !$condition {
            return Err(format!($($text)+));
        }
    };
}

impl Promises {
    /// Opens what a crash left with the real code, and says what is wrong with it.
    pub(super) fn check(&self, path: &Path) -> Result<(), String> {
        let opened = if self.created {
            Store::open(path)
        } else {
            Store::create_or_open(path)
        };
        let store = opened.map_err(|error| format!("opening: {error}"))?;
        let lock = store.lock().map_err(|error| format!("lock: {error}"))?;
        let swept = store.sweep(&lock);
        let swept = swept.map_err(|error| format!("sweep: {error}"))?;
        ensure!(swept.unreadable.is_empty(), "unreadable: {swept:?}");
        let visible = self.check_images(&store)?;
        check_leftovers(&store, &visible)?;
        let again = store
            .sweep(&lock)
            .map_err(|error| format!("sweep: {error}"))?;
        ensure!(
            again == Swept::default(),
            "the sweep left something: {again:?}"
        );
        self.check_goes_on(&store, &lock, &visible)
    }

    fn check_images(&self, store: &Store) -> Result<Vec<ImageId>, String> {
        let entries = store.images().map_err(|error| format!("images: {error}"))?;
        let visible: Vec<ImageId> = entries.iter().map(|entry| entry.id).collect();
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
        for entry in &entries {
            let id = entry.id;
            ensure!(
                self.images.contains_key(&id),
                "image {id} comes from nowhere"
            );
            let marked = self.marks.get(&id).copied().unwrap_or(Presence::No);
            let allowed = match marked {
                Presence::No => [None, None],
                Presence::Maybe => [None, Some(REASON)],
                Presence::Yes => [Some(REASON), Some(REASON)],
            };
            let damaged = entry.damaged.as_deref();
            ensure!(
                allowed.contains(&damaged),
                "image {id} is marked as {damaged:?}"
            );
            self.check_content(store, id)?;
        }
        Ok(visible)
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

    /// A new image that has much in common with the others, and those after it.
    fn check_goes_on(
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
        let notes = Notes(ledger.notes.into_inner().unwrap());
        notes.promises(0).check_content(store, id)
    }
}

/// After a sweep there is nothing but what the images need.
fn check_leftovers(store: &Store, visible: &[ImageId]) -> Result<(), String> {
    let mut wanted: Vec<PathBuf> = Vec::new();
    for id in visible {
        wanted.extend([store.manifest_file(*id), store.damaged_file(*id)]);
        let manifest = store.manifest(*id).map_err(|error| format!("{error}"))?;
        let packs = manifest.packs.iter();
        wanted.extend(packs.map(|pack| store.pack_file(pack.name)));
    }
    let outside = ["format", "lock", "images", "packs"].map(|name| store.path().join(name));
    wanted.extend(outside);
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
