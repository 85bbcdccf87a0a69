//! Simulated crashes: after each step of a change, and for many of the states that a disk may then have, the store must
//! keep its promises.
//!
//! ```text
//! operation ─▶ log of steps ─▶ each beginning of it ─▶ states a crash may leave
//!     └─▶ ledger of promises ─────────────────────────────▶ opened, swept, read, written
//! ```
//! [`check`] does this for an operation; [`fail_each_step`] makes each of its steps fail instead. The simulation itself
//! is tested, too: each sync is left out in turn, and the missing sync must be noticed.

pub(in crate::store) mod disk_log;
mod ledger;
mod promises;
mod removals;
mod repairs;
mod replay;

use std::collections::{BTreeSet, HashSet};
use std::error::Error;
use std::fs;
use std::path::Path;

use crate::store::format::codec::tests::noise;
use crate::store::{ImageId, Store};
use disk_log::{DataChange, Entry, Event, Log, Tree};
use ledger::{Notes, Streams};
use replay::{Crash, workplace};

pub(in crate::store) use ledger::Ledger;

/// Number of states tried for each beginning of the log that allows more than one.
const SEEDS: u64 = 16;
/// Number of states tried to notice a missing sync: the extremes, and some more.
const SEEDS_OF_MUTANTS: u64 = 12;

/// Result of an operation.
pub(crate) type Outcome = Result<(), Box<dyn Error>>;

/// An operation on the store at a path, which records its promises in the ledger.
pub(crate) type Operation = fn(&Path, &Ledger) -> Outcome;

/// Simulates crashes at all steps of `operation`, starting from the state made by `setup`.
pub(crate) fn check(setup: Operation, operation: Operation) {
    let recorded = Recorded::new(setup, operation);
    if let Err(fault) = recorded.check(0, None, SEEDS) {
        panic!("{fault}");
    }
}

/// Makes each step of `operation` fail, one at a time; the store must remain usable. Returns the steps whose failure
/// the operation tolerated.
pub(crate) fn fail_each_step(setup: Operation, operation: Operation) -> BTreeSet<String> {
    let mut passed_over = BTreeSet::new();
    for step in 0.. {
        let place = workplace();
        let path = place.path().join("store");
        let ledger = Ledger::default();
        setup(&path, &ledger).unwrap();
        ledger.attach(Log::attach(place.path()));
        ledger.log().fail_after(step);
        let outcome = operation(&path, &ledger);
        let Some(failed) = ledger.log().failed() else {
            outcome.unwrap();
            assert!(step > 3, "no steps");
            break;
        };
        let (_, notes) = ledger.into_log();
        let kept = notes.promises(usize::MAX).check(&path);
        kept.unwrap_or_else(|fault| panic!("{failed} failed at step {step}: {fault}"));
        if outcome.is_ok() {
            passed_over.insert(failed);
        }
    }
    passed_over
}

/// The record of an operation that was performed once.
struct Recorded {
    base: Tree,
    events: Vec<Event>,
    notes: Notes,
}

impl Recorded {
    fn new(setup: Operation, operation: Operation) -> Self {
        let place = workplace();
        let path = place.path().join("store");
        let ledger = Ledger::default();
        setup(&path, &ledger).unwrap();
        ledger.attach(Log::attach(place.path()));
        operation(&path, &ledger).unwrap();
        let (log, notes) = ledger.into_log();
        let (base, events) = log.take();
        Self {
            base,
            events,
            notes,
        }
    }

    /// Simulates a crash after `first` events and after each later event, as if event `left_out` had not happened.
    fn check(&self, first: usize, left_out: Option<usize>, seeds: u64) -> Result<(), String> {
        let mut seen = HashSet::new();
        for beginning in first..=self.events.len() {
            let happened = self.events[..beginning].iter().enumerate();
            let happened = happened.filter(|(position, _)| Some(*position) != left_out);
            let crash = Crash::after(&self.base, happened.map(|(_, event)| event));
            let promises = self.notes.promises(beginning);
            let seeds = if crash.is_certain() { 1 } else { seeds };
            for seed in 0..seeds {
                let state = crash.state(seed);
                if !seen.insert((state.hash(), promises.notes)) {
                    continue;
                }
                let place = workplace();
                state.materialise(place.path());
                let kept = promises.check(&place.path().join("store"));
                kept.map_err(|fault| self.describe(&fault, beginning, seed, &state))?;
            }
        }
        Ok(())
    }

    fn describe(&self, fault: &str, beginning: usize, seed: u64, state: &Tree) -> String {
        let events = self.events[..beginning].iter();
        let events: String = events.map(|event| format!("  {event}\n")).collect();
        let state = state.describe();
        format!("{fault}\nafter\n{events}a crash left, with seed {seed}, {state}")
    }

    /// Returns true if anything changed in the folder or below it.
    fn touches(&self, folder: &Path) -> bool {
        let inside = self.base.folders.iter();
        let inside = inside.filter(|(path, _)| path.starts_with(folder));
        let entries: Vec<Entry> = inside
            .flat_map(|(_, names)| names.values().copied())
            .collect();
        assert!(!entries.is_empty(), "no such folder");
        self.events.iter().any(|event| match event {
            Event::Name(path, _) | Event::SyncFolder(path) => path.starts_with(folder),
            Event::Data(file, _) | Event::Sync(file) => entries.contains(&Entry::File(*file)),
        })
    }

    /// Returns the syncs whose omission no simulated crash reveals.
    fn needless_syncs(&self) -> Vec<String> {
        let syncs = self.events.iter().enumerate();
        let syncs = syncs.filter(|(_, event)| match event {
            Event::Sync(_) | Event::SyncFolder(_) => true,
            Event::Name(..) | Event::Data(..) => false,
        });
        let needless = syncs.filter(|(sync, _)| {
            let checked = self.check(sync + 1, Some(*sync), SEEDS_OF_MUTANTS);
            checked.is_ok()
        });
        needless
            .map(|(sync, event)| format!("{sync}: {event}"))
            .collect()
    }
}

/// Asserts which syncs of these changes may be left out.
fn expect_needless(changes: &[(Operation, Operation, &[&str])]) {
    let found = changes.iter();
    let found = found.map(|(setup, change, _)| Recorded::new(*setup, *change).needless_syncs());
    let expected: Vec<&[&str]> = changes.iter().map(|(_, _, needless)| *needless).collect();
    assert_eq!(found.collect::<Vec<_>>(), expected);
}

#[expect(clippy::unnecessary_wraps, reason = "an operation")]
fn nothing(_: &Path, _: &Ledger) -> Outcome {
    Ok(())
}

fn create(path: &Path, ledger: &Ledger) -> Outcome {
    ledger.open(path)?.lock()?;
    Ok(())
}

/// Returns the streams of image `n`: some data in common with the other images, and enough separate data to be worth a
/// hole.
fn streams(n: u64) -> Streams {
    vec![
        ("shared", noise(0, 20_000)),
        ("pages", noise(n, 80_777)),
        ("core", noise(100 + n, 1000)),
        ("empty", Vec::new()),
    ]
}

fn id(number: u64) -> ImageId {
    ImageId::new(number).unwrap()
}

fn write(path: &Path, ledger: &Ledger, numbers: std::ops::RangeInclusive<u64>) -> Outcome {
    let store = ledger.open(path)?;
    let lock = store.lock()?;
    for number in numbers {
        ledger.write(&store, &lock, &streams(number))?;
    }
    Ok(())
}

fn one_image(path: &Path, ledger: &Ledger) -> Outcome {
    write(path, ledger, 1..=1)
}

fn two_images(path: &Path, ledger: &Ledger) -> Outcome {
    write(path, ledger, 1..=2)
}

fn three_images(path: &Path, ledger: &Ledger) -> Outcome {
    write(path, ledger, 1..=3)
}

fn large_image(path: &Path, ledger: &Ledger) -> Outcome {
    let store = Store::open(path)?;
    let large = vec![("pages", noise(1, 5 << 19))];
    ledger.write(&store, &store.lock()?, &large)?;
    Ok(())
}

fn rotate(path: &Path, ledger: &Ledger) -> Outcome {
    let store = Store::open(path)?;
    ledger.rotate(&store, &store.lock()?, 1, &[id(1), id(2)])?;
    Ok(())
}

fn leftovers(path: &Path, ledger: &Ledger) -> Outcome {
    one_image(path, ledger)?;
    for name in [
        ".tmp-a",
        "images/.tmp-b",
        "images/000002.damaged",
        "packs/.tmp-c",
        "packs/000002-00.pack",
        "packs/000003-00.pack",
    ] {
        fs::write(path.join(name), noise(1, 700))?;
    }
    Ok(())
}

fn sweep(path: &Path, _: &Ledger) -> Outcome {
    let store = Store::open(path)?;
    let swept = store.sweep(&store.lock()?)?;
    assert_eq!((swept.packs, swept.temporary_files), (2, 3));
    Ok(())
}

fn set_aside(path: &Path, ledger: &Ledger) -> Outcome {
    let store = Store::open(path)?;
    ledger.set_aside(&store, &store.lock()?, id(2))?;
    Ok(())
}

fn give_up_and_write(path: &Path, ledger: &Ledger) -> Outcome {
    let store = Store::open(path)?;
    let lock = store.lock()?;
    ledger.give_up(&store, &lock, &streams(7))?;
    // The new image has the same number.
    ledger.write(&store, &lock, &streams(2))?;
    Ok(())
}

/// Fails a commit so that it is unknown whether the manifest has its name.
fn fail_to_commit(path: &Path, ledger: &Ledger) -> Outcome {
    let store = Store::open(path)?;
    let lock = store.lock()?;
    ledger.log().fail_next("SyncFolder of images");
    let written = ledger.write(&store, &lock, &streams(2));
    assert!(written.is_err(), "the sync failed");
    Ok(())
}

fn usual_changes(path: &Path, ledger: &Ledger) -> Outcome {
    let store = Store::open(path)?;
    let lock = store.lock()?;
    ledger.write(&store, &lock, &streams(2))?;
    ledger.set_aside(&store, &lock, id(2))?;
    ledger.write(&store, &lock, &streams(3))?;
    ledger.rotate(&store, &lock, 1, &[id(1), id(2)])?;
    ledger.write(&store, &lock, &streams(4))?;
    Ok(())
}

#[test]
fn a_crash_while_a_store_is_created() {
    check(nothing, create);
}

#[test]
fn a_crash_while_images_are_written() {
    check(create, two_images);
}

#[test]
fn a_crash_while_an_image_of_several_packs_is_written() {
    check(create, large_image);
}

#[test]
fn a_crash_while_images_rotate() {
    check(three_images, rotate);
}

#[test]
fn a_crash_while_leftovers_are_swept() {
    check(leftovers, sweep);
}

#[test]
fn a_crash_while_an_image_is_set_aside() {
    check(two_images, set_aside);
}

#[test]
fn crash_after_an_image_was_abandoned() {
    check(one_image, give_up_and_write);
}

#[test]
fn a_crash_after_a_commit_failed() {
    check(one_image, fail_to_commit);
}

#[test]
fn crash_during_usual_changes() {
    check(one_image, usual_changes);
}

/// Returns true for steps that may fail: the lock works without its holder's name, and `Extend` only preallocates
/// space.
fn is_dispensable(step: &str) -> bool {
    [
        "SetLen of lock",
        "Write of lock",
        "Extend of 000001-00.pack",
    ]
    .contains(&step)
}

#[test]
fn a_failing_step_fails_the_change_and_not_the_store() {
    let changes: [(Operation, Operation); 6] = [
        (nothing, create),
        (create, two_images),
        (create, large_image),
        (three_images, rotate),
        (leftovers, sweep),
        (two_images, set_aside),
    ];
    for (setup, change) in changes {
        let passed_over = fail_each_step(setup, change);
        let all = passed_over.iter().all(|step| is_dispensable(step));
        assert!(all, "{passed_over:?}");
    }
}

#[test]
fn leftovers_of_an_abandoned_image_are_swept() {
    let passed_over = fail_each_step(one_image, give_up_and_write);
    let failed = ["Remove of 000002-00.pack", "SyncFolder of images"];
    for failed in failed {
        assert!(passed_over.contains(failed), "{passed_over:?}");
    }
}

/// Leaves out each sync in turn. Some need not be noticed: the sync of a folder that the next sync covers, of one that
/// is synced in case its creator was killed, of removals of manifests where none exist, and of garbage that a sweep
/// removes again.
#[test]
fn each_omitted_sync_is_noticed() {
    let changes: [(Operation, Operation, &[&str]); 6] = [
        (nothing, create, &["5: store: sync"]),
        (create, one_image, &["0: : sync"]),
        (create, large_image, &[]),
        (three_images, rotate, &["6: store/packs: sync"]),
        (
            leftovers,
            sweep,
            &[
                "5: store/images: sync",
                "8: store/packs: sync",
                "10: store/images: sync",
            ],
        ),
        (two_images, set_aside, &[]),
    ];
    expect_needless(&changes);
}
