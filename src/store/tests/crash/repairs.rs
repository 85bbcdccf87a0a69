//! Crash tests of repairs, of copies into another store, and of stores with a key.

use std::path::PathBuf;

use super::*;
use crate::store::{Key, PackName};

/// Less than the shortest chunk that is cut: one chunk, in one pack.
fn one_chunk(n: u64) -> Streams {
    vec![("a", noise(n, 10_000))]
}

/// Damages a store: image 1 can be healed from image 2, image 3 is lost, the pack of image 4 needs a header.
fn harmed(path: &Path, ledger: &Ledger) -> Outcome {
    let store = ledger.open(path)?;
    let lock = store.lock()?;
    for (number, content) in [(1, 1), (2, 1), (3, 3), (4, 4)] {
        let written = ledger.write(&store, &lock, &one_chunk(content))?;
        assert_eq!(written, id(number));
        if number % 2 == 1 {
            ledger.set_aside(&store, &lock, written)?;
        }
    }
    for (number, at) in [(1, 1000), (3, 1000), (4, 0)] {
        let name = store.manifest(id(number))?.packs[0].name;
        flip(&store, name, at)?;
    }
    ledger.harmed(&[id(1), id(4)], &[id(3)]);
    Ok(())
}

fn flip(store: &Store, pack: PackName, at: usize) -> Outcome {
    let path = store.pack_file(pack);
    let mut bytes = fs::read(&path)?;
    bytes[at] ^= 1;
    Ok(fs::write(path, bytes)?)
}

fn repair(path: &Path, ledger: &Ledger) -> Outcome {
    let store = Store::open(path)?;
    Ok(ledger.repair(&store, &store.lock()?, &[id(3)], &[])?)
}

fn repair_and_clear_marks(path: &Path, ledger: &Ledger) -> Outcome {
    let store = Store::open(path)?;
    Ok(ledger.repair(&store, &store.lock()?, &[id(3)], &[id(1)])?)
}

fn source_of(path: &Path) -> PathBuf {
    path.with_file_name("source")
}

fn two_stores(path: &Path, ledger: &Ledger) -> Outcome {
    let source = Store::create_or_open(&source_of(path))?;
    let lock = source.lock()?;
    for number in 1..=2 {
        Ledger::default().write(&source, &lock, &streams(number))?;
    }
    let store = ledger.open(path)?;
    ledger.write(&store, &store.lock()?, &streams(1))?;
    Ok(())
}

fn copy(path: &Path, ledger: &Ledger) -> Outcome {
    let (source, store) = (Store::open(&source_of(path))?, Store::open(path)?);
    let lock = store.lock()?;
    ledger.copy((&source, id(2)), (&store, &lock), id(2), &streams(2))?;
    Ok(())
}

fn create_encrypted(path: &Path, ledger: &Ledger) -> Outcome {
    ledger.open_encrypted(path)?.lock()?;
    Ok(())
}

fn write_encrypted(path: &Path, ledger: &Ledger) -> Outcome {
    let store = ledger.open_encrypted(path)?;
    ledger.write(&store, &store.lock()?, &streams(1))?;
    Ok(())
}

/// Leaves the state of a process that was killed while it created a store with a key.
fn unfinished_with_a_key(path: &Path, _: &Ledger) -> Outcome {
    Store::create_or_open_with(path, Some(&Key::from_bytes(&[9; 32])))?;
    Ok(fs::remove_file(path.join("format"))?)
}

#[test]
fn a_crash_while_a_store_is_repaired() {
    check(harmed, repair);
}

#[test]
fn a_crash_while_a_store_is_repaired_and_its_marks_are_cleared() {
    check(harmed, repair_and_clear_marks);
}

#[test]
fn a_crash_while_an_image_is_copied_into_another_store() {
    check(two_stores, copy);
}

#[test]
fn a_copy_changes_nothing_where_it_comes_from() {
    assert!(!Recorded::new(two_stores, copy).touches(Path::new("source")));
}

#[test]
fn a_crash_while_an_encrypted_store_is_created() {
    check(nothing, create_encrypted);
}

#[test]
fn a_crash_while_an_image_is_written_into_an_encrypted_store() {
    check(create_encrypted, write_encrypted);
}

#[test]
fn crash_during_creation_over_an_unfinished_store() {
    check(unfinished_with_a_key, create);
    check(unfinished_with_a_key, create_encrypted);
}

#[test]
fn failing_steps_of_repairs_and_copies_harm_nothing() {
    let changes: [(Operation, Operation); 5] = [
        (harmed, repair_and_clear_marks),
        (two_stores, copy),
        (nothing, create_encrypted),
        (unfinished_with_a_key, create),
        (create_encrypted, write_encrypted),
    ];
    for (setup, change) in changes {
        let passed_over = fail_each_step(setup, change);
        let all = passed_over.iter().all(|step| is_dispensable(step));
        assert!(all, "{passed_over:?}");
    }
}

/// Leaves out each sync in turn. Some need not be noticed: in a repair, the syncs after each healed manifest, which the
/// next sync of the folder covers before anything is removed, and the sync of packs, which are removed again; in a
/// creation, the syncs of folders that the next sync covers, or that existed before.
#[test]
fn each_omitted_sync_of_repairs_and_copies_is_noticed() {
    let changes: [(Operation, Operation, &[&str]); 5] = [
        (
            harmed,
            repair_and_clear_marks,
            &[
                "8: store/images: sync",
                "13: store/images: sync",
                "21: store/packs: sync",
            ],
        ),
        (two_stores, copy, &[]),
        (
            nothing,
            create_encrypted,
            &["5: store: sync", "7: store: sync"],
        ),
        (
            unfinished_with_a_key,
            create,
            &["0: : sync", "2: store: sync", "3: store: sync"],
        ),
        (create_encrypted, write_encrypted, &["0: : sync"]),
    ];
    expect_needless(&changes);
}
