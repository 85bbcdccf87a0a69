//! Ledger of a store's promises at each point of a change.

use std::collections::BTreeMap;
use std::error::Error;
use std::path::Path;
use std::sync::{Mutex, OnceLock};

use super::super::support::{OPTIONS, any, never};
use super::disk_log::Log;
use super::promises::Promises;
use crate::store::error::WriteError;
use crate::store::fs::durable;
use crate::store::{
    CopyError, Effort, ImageId, Key, Marks, OpenError, PinError, Store, StoreLock, Swept,
    WriteOptions,
};
use crate::sync::locked;

/// Reason for setting images aside.
pub(super) const REASON: &str = "a reason";

/// The streams of an image: their names and bytes.
pub(in crate::store) type Streams = Vec<(&'static str, Vec<u8>)>;

/// Promises that an operation records while it changes the store. Its methods make the changes that promise something.
#[derive(Default)]
pub(in crate::store) struct Ledger {
    log: OnceLock<Log>,
    /// Notes, each with the number of preceding events.
    notes: Mutex<Vec<(usize, Note)>>,
}

#[derive(Clone)]
enum Note {
    Created,
    Image(ImageId, Presence),
    Content(ImageId, Streams),
    /// The reason why the image is set aside.
    Mark(ImageId, Texts),
    /// The note of its pin.
    Pin(ImageId, Texts),
    /// The image cannot be read until the store is repaired.
    Broken(ImageId),
    Mended(ImageId),
    /// The store has a key from its creation on.
    Encrypted,
}

/// The possible values of a text.
pub(super) type Texts = Vec<Option<&'static str>>;

/// Presence of a thing after a crash.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Presence {
    Maybe,
    Yes,
    No,
}

/// Options with one worker, whose events have the same order each time.
const ONE_WORKER: WriteOptions = WriteOptions {
    workers: 1,
    ..OPTIONS
};

pub(super) fn key() -> Key {
    Key::from_bytes(&[1; 32])
}

impl Ledger {
    /// Attributes all further notes to the events of this log.
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

    /// Opens the store at `path`, and creates it if it does not exist.
    pub(in crate::store) fn open(&self, path: &Path) -> Result<Store, OpenError> {
        let store = Store::create_or_open(path)?;
        self.note(Note::Created);
        Ok(store)
    }

    /// Opens a store as [`Ledger::open`] does, with a key.
    pub(super) fn open_encrypted(&self, path: &Path) -> Result<Store, OpenError> {
        self.note(Note::Encrypted);
        let store = Store::create_or_open_with(path, Some(&key()))?;
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
        let writer = store.begin(lock, ONE_WORKER)?;
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

    /// Begins an image and abandons it after some of it is stored.
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

    /// Rotates the images; `going` lists the images to be removed.
    pub(in crate::store) fn rotate(
        &self,
        store: &Store,
        lock: &StoreLock,
        keep_last: u32,
        going: &[ImageId],
    ) -> Result<(), WriteError> {
        self.note_all(going, Presence::Maybe);
        assert_eq!(store.rotate(lock, keep_last)?, going);
        self.note_all(going, Presence::No);
        Ok(())
    }

    /// Removes images by their numbers.
    pub(super) fn forget(
        &self,
        store: &Store,
        lock: &StoreLock,
        going: &[ImageId],
    ) -> Result<Swept, Box<dyn Error>> {
        let plan = store.plan_named(going, &any)?;
        self.note_all(going, Presence::Maybe);
        let forgotten = store.forget(lock, &plan, Effort::Thorough, &any)?;
        assert_eq!(forgotten.images, going);
        self.note_all(going, Presence::No);
        Ok(forgotten.swept)
    }

    /// Prunes after another pruner was killed that had removed the manifests of images.
    pub(super) fn prune(
        &self,
        store: &Store,
        lock: &StoreLock,
        going: &[ImageId],
    ) -> Result<Swept, WriteError> {
        self.note_all(going, Presence::Maybe);
        for id in going {
            durable::remove(&store.manifest_file(*id))?;
        }
        let swept = store.prune(lock)?;
        self.note_all(going, Presence::No);
        Ok(swept)
    }

    /// Copies an image of these streams; the copy gets the number `id`.
    pub(super) fn copy(
        &self,
        (source, image): (&Store, ImageId),
        (to, lock): (&Store, &StoreLock),
        id: ImageId,
        streams: &Streams,
    ) -> Result<(), CopyError> {
        self.note(Note::Content(id, streams.clone()));
        self.note(Note::Image(id, Presence::Maybe));
        match source.copy_image(image, &[], to, lock, ONE_WORKER, &never) {
            Ok(copy) => {
                assert_eq!(copy.id, id);
                self.note(Note::Image(id, Presence::Yes));
                Ok(())
            }
            Err(error) => {
                self.note(Note::Image(id, Presence::No));
                Err(error)
            }
        }
    }

    /// Notes that these images cannot be read until the store is repaired, and the lost ones never.
    pub(super) fn harmed(&self, broken: &[ImageId], lost: &[ImageId]) {
        for id in broken.iter().chain(lost) {
            self.note(Note::Broken(*id));
        }
        self.note_all(lost, Presence::Maybe);
    }

    /// Repairs the store; the broken images are healed or removed.
    pub(super) fn repair(
        &self,
        store: &Store,
        lock: &StoreLock,
        going: &[ImageId],
        unmarked: &[ImageId],
    ) -> Result<(), WriteError> {
        let marks = if unmarked.is_empty() {
            Marks::Keep
        } else {
            Marks::Clear
        };
        let plan = store.plan_repair(lock, marks, &never)?;
        for id in unmarked {
            self.note(Note::Mark(*id, vec![None, Some(REASON)]));
        }
        plan.apply()?;
        self.note_all(going, Presence::No);
        for id in unmarked {
            self.note(Note::Mark(*id, vec![None]));
        }
        for id in self.promises().broken {
            self.note(Note::Mended(id));
        }
        Ok(())
    }

    /// Pins an image.
    pub(super) fn pin(
        &self,
        store: &Store,
        id: ImageId,
        text: &'static str,
    ) -> Result<(), PinError> {
        self.change_pin(id, Some(text), || store.pin(id, text))
    }

    /// Removes the pin of an image.
    pub(super) fn unpin(&self, store: &Store, id: ImageId) -> Result<(), PinError> {
        self.change_pin(id, None, || store.unpin(id).map(drop))
    }

    fn change_pin(
        &self,
        id: ImageId,
        to: Option<&'static str>,
        change: impl FnOnce() -> Result<(), PinError>,
    ) -> Result<(), PinError> {
        let mut texts = texts(&self.promises().pins, id);
        texts.push(to);
        self.note(Note::Pin(id, texts));
        change()?;
        self.note(Note::Pin(id, vec![to]));
        Ok(())
    }

    fn note_all(&self, ids: &[ImageId], presence: Presence) {
        for id in ids {
            self.note(Note::Image(*id, presence));
        }
    }

    /// Returns the present promises.
    pub(super) fn promises(&self) -> Promises {
        Notes(locked(&self.notes).clone()).promises(usize::MAX)
    }

    /// Marks an image as damaged.
    pub(in crate::store) fn set_aside(
        &self,
        store: &Store,
        lock: &StoreLock,
        id: ImageId,
    ) -> Result<(), WriteError> {
        self.note(Note::Mark(id, vec![None, Some(REASON)]));
        store.set_aside(lock, id, REASON)?;
        self.note(Note::Mark(id, vec![Some(REASON)]));
        Ok(())
    }
}

/// Notes of an operation.
pub(super) struct Notes(Vec<(usize, Note)>);

impl Notes {
    /// Returns the promises after that many events.
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
                Note::Mark(id, texts) => {
                    promises.marks.insert(id, texts);
                }
                Note::Pin(id, texts) => {
                    promises.pins.insert(id, texts);
                }
                Note::Broken(id) => {
                    promises.broken.insert(id);
                }
                Note::Mended(id) => {
                    promises.broken.remove(&id);
                }
                Note::Encrypted => promises.is_encrypted = true,
            }
        }
        promises
    }
}

/// Returns the promise for an image: none, if it has no note.
pub(super) fn texts(promised: &BTreeMap<ImageId, Texts>, id: ImageId) -> Texts {
    promised.get(&id).cloned().unwrap_or_else(|| vec![None])
}
