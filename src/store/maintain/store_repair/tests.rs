use std::fs;

use super::*;
use crate::store::format::FORMAT;
use crate::store::format::codec::tests::noise;
use crate::store::tests::damage::{files_of, reads_back, small_store};
use crate::store::tests::old_formats;
use crate::store::tests::support::{
    OPTIONS, flip, image_files, never, packs, place_of, read_stream, temporary_store, write_image,
};

/// Length of a stream that fits one chunk in one pack: less than the minimum length of a chunk.
const BYTES: usize = 10_000;

fn plan(store: &Store, lock: &StoreLock) -> RepairPlan {
    store.plan_repair(lock, Marks::Keep, &never).unwrap()
}

fn remedies(repaired: &Repaired) -> Vec<Remedy> {
    repaired.images.iter().map(|image| image.remedy).collect()
}

fn id(number: u64) -> ImageId {
    ImageId::new(number).unwrap()
}

/// Writes two images of the same bytes that share nothing, and returns the only pack of each.
fn twice(store: &Store, lock: &StoreLock, bytes: &[u8]) -> [PackName; 2] {
    let first = write_image(store, lock, &[("a", bytes)]);
    store.set_aside(lock, first.id, "torn").unwrap();
    let second = write_image(store, lock, &[("a", bytes)]);
    [first.packs[0].name, second.packs[0].name]
}

#[test]
fn a_whole_store_is_left_alone() {
    let (_folder, store, _) = small_store();
    let lock = store.lock().unwrap();
    let before = (packs(&store), image_files(&store));
    let plan = plan(&store, &lock);
    assert!(plan.outcome().is_nothing());
    let repaired = plan.apply().unwrap();
    assert_eq!(remedies(&repaired), [Remedy::Whole, Remedy::Whole]);
    assert_eq!((packs(&store), image_files(&store)), before);
}

#[test]
fn a_chunk_that_is_whole_elsewhere_heals_the_image() {
    for damaged in [0, 1] {
        let (_folder, store) = temporary_store();
        let lock = store.lock().unwrap();
        let bytes = noise(1, BYTES);
        let pack = twice(&store, &lock, &bytes)[damaged];
        flip(&store, pack, 1000);
        let repaired = plan(&store, &lock).apply().unwrap();
        let mut expected = [Remedy::Whole; 2];
        expected[damaged] = Remedy::Healed { chunks: 1 };
        assert_eq!(remedies(&repaired), expected);
        assert_eq!(repaired.removed_packs, [pack], "nobody needs it");
        for image in [id(1), id(2)] {
            assert!(read_stream(&store, image, "a") == bytes);
        }
        let meta = &store.images().unwrap()[damaged].meta;
        assert_eq!(meta, b"meta", "all else is kept");
    }
}

#[test]
fn an_image_that_lacks_a_byte_is_dropped_and_the_others_stay() {
    let (_folder, store) = temporary_store();
    let lock = store.lock().unwrap();
    let (old, new) = (noise(1, BYTES), noise(2, BYTES));
    let first = write_image(&store, &lock, &[("a", &old)]);
    let second = write_image(&store, &lock, &[("a", &old), ("b", &new)]);
    store.set_aside(&lock, second.id, "torn").unwrap();
    let own = second.packs.iter().map(|pack| pack.name);
    let own: Vec<PackName> = own.filter(|name| name.image == second.id).collect();
    flip(&store, own[0], 1000);
    let repaired = plan(&store, &lock).apply().unwrap();
    assert_eq!(remedies(&repaired), [Remedy::Whole, Remedy::Dropped]);
    assert_eq!((&repaired.removed_packs, packs(&store).len()), (&own, 1));
    assert!(repaired.freed_bytes > BYTES as u64);
    assert_eq!(image_files(&store), ["000001.manifest"], "nor its mark");
    assert!(read_stream(&store, first.id, "a") == old);
}

#[test]
fn a_manifest_that_cannot_be_read_goes_with_its_packs() {
    let (_folder, store, contents) = small_store();
    let lock = store.lock().unwrap();
    fs::write(store.manifest_file(id(2)), "nonsense").unwrap();
    let repaired = plan(&store, &lock).apply().unwrap();
    assert_eq!(remedies(&repaired), [Remedy::Whole, Remedy::Dropped]);
    assert!(!repaired.removed_packs.is_empty());
    assert!(
        repaired
            .removed_packs
            .iter()
            .all(|pack| pack.image == id(2))
    );
    assert!(reads_back(&store, id(1), &contents[&id(1)]));
}

#[test]
fn an_image_of_a_newer_version_and_all_packs_stay() {
    let (_folder, store, _) = small_store();
    let lock = store.lock().unwrap();
    let path = store.manifest_file(id(2));
    let mut bytes = fs::read(&path).unwrap();
    bytes[12] = 9;
    fs::write(&path, &bytes).unwrap();
    fs::write(store.manifest_file(id(1)), "nonsense").unwrap();
    let before = packs(&store);
    let repaired = plan(&store, &lock).apply().unwrap();
    assert_eq!(remedies(&repaired), [Remedy::Dropped, Remedy::Left]);
    assert_eq!(repaired.unknown, [id(2)]);
    assert_eq!((packs(&store), fs::read(&path).unwrap()), (before, bytes));
}

#[test]
fn temporarily_unreadable_images_are_not_dropped() {
    let (_folder, store) = temporary_store();
    let lock = store.lock().unwrap();
    let [first, second] = twice(&store, &lock, &noise(1, BYTES));
    flip(&store, first, 1000);
    let pack = store.pack_file(second);
    let spare = store.path().join("spare");
    fs::rename(&pack, &spare).unwrap();
    std::os::unix::fs::symlink(&pack, &pack).unwrap();
    let repaired = plan(&store, &lock).apply().unwrap();
    assert_eq!(remedies(&repaired), [Remedy::Left, Remedy::Left]);
    fs::rename(&spare, &pack).unwrap();
    let repaired = plan(&store, &lock).apply().unwrap();
    assert_eq!(
        remedies(&repaired),
        [Remedy::Healed { chunks: 1 }, Remedy::Whole]
    );
}

#[test]
fn packs_whose_chunks_are_whole_serve_on() {
    let harms: [fn(&mut Vec<u8>); 3] = [
        |bytes| bytes.push(0),
        |bytes| bytes[0] ^= 1,
        |bytes| {
            bytes[20] ^= 1;
            bytes.extend(b"more");
        },
    ];
    for harm in harms {
        let (_folder, store, contents) = small_store();
        let lock = store.lock().unwrap();
        for path in files_of(&store) {
            if path.starts_with(store.packs_folder()) {
                let mut bytes = fs::read(&path).unwrap();
                harm(&mut bytes);
                fs::write(&path, bytes).unwrap();
            }
        }
        assert!(!reads_back(&store, id(1), &contents[&id(1)]));
        let repaired = plan(&store, &lock).apply().unwrap();
        assert_eq!(remedies(&repaired), [Remedy::Healed { chunks: 0 }; 2]);
        for (image, streams) in &contents {
            assert!(reads_back(&store, *image, streams));
        }
        let next = write_image(&store, &lock, &[("pages", &contents[&id(1)][0].1)]);
        assert_eq!(next.stored_bytes, 0, "new images rely on it again");
    }
}

#[test]
fn an_image_of_format_1_is_healed_into_one_of_today() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("store");
    old_formats::copy(&old_formats::folder("1"), &path);
    let store = Store::open(&path).unwrap();
    let lock = store.lock().unwrap();
    let before = read_stream(&store, id(2), "pages-1.img");
    for pack in packs(&store) {
        let path = store.packs_folder().join(pack);
        let bytes = fs::read(&path).unwrap();
        fs::write(&path, [&bytes[..], b"x"].concat()).unwrap();
    }
    let repaired = plan(&store, &lock).apply().unwrap();
    assert_eq!(remedies(&repaired), [Remedy::Healed { chunks: 0 }; 3]);
    assert_eq!(Store::open(&path).unwrap().format(), FORMAT);
    assert!(store.verify_all(Selection::All, &never).unwrap().is_whole());
    let next = write_image(&store, &lock, &[("pages-1.img", &before)]);
    store.verify(next.id, &never).unwrap();
}

#[test]
fn lost_pinned_image_stays() {
    let (_folder, store, contents) = small_store();
    let lock = store.lock().unwrap();
    let first = store.manifest(id(1)).unwrap();
    let (pack, offset) = place_of(&first, "core");
    flip(&store, pack, offset);
    store.pin(id(1), "the paper").unwrap();
    let before = (packs(&store), image_files(&store));
    let repaired = plan(&store, &lock).apply().unwrap();
    assert_eq!(repaired.images[0].remedy, Remedy::Spared);
    assert!(repaired.is_nothing());
    assert_eq!((packs(&store), image_files(&store)), before);
    // An image that is pinned between the plan and its execution stays, too.
    store.unpin(id(1)).unwrap();
    let plan = plan(&store, &lock);
    assert_eq!(plan.outcome().images[0].remedy, Remedy::Dropped);
    store.pin(id(1), "").unwrap();
    let repaired = plan.apply().unwrap();
    assert_eq!(repaired.images[0].remedy, Remedy::Spared);
    assert_eq!(packs(&store), before.0);
    assert!(reads_back(&store, id(2), &contents[&id(2)]));
}

#[test]
fn a_plan_changes_nothing_and_keeps_others_from_it() {
    let (_folder, store, _) = small_store();
    let lock = store.lock().unwrap();
    fs::write(store.manifest_file(id(2)), "nonsense").unwrap();
    let before = (packs(&store), image_files(&store));
    let plan = plan(&store, &lock);
    assert_eq!(remedies(plan.outcome()), [Remedy::Whole, Remedy::Dropped]);
    assert!(matches!(store.begin(&lock, OPTIONS), Err(WriteError::Busy)));
    drop(plan);
    assert_eq!((packs(&store), image_files(&store)), before);
    let writer = store.begin(&lock, OPTIONS).unwrap();
    let busy = store.plan_repair(&lock, Marks::Keep, &never);
    assert!(matches!(busy, Err(WriteError::Busy)));
    drop(writer);
}

#[test]
fn marks_stay_unless_they_are_to_be_cleared() {
    let (_folder, store, _) = small_store();
    let lock = store.lock().unwrap();
    store.set_aside(&lock, id(1), "criu failed").unwrap();
    let kept = plan(&store, &lock).apply().unwrap();
    assert!(kept.is_nothing() && store.damage_mark(id(1)).is_some());
    let plan = store.plan_repair(&lock, Marks::Clear, &never).unwrap();
    let cleared = plan.apply().unwrap();
    let unmarked: Vec<bool> = cleared.images.iter().map(|image| image.unmarked).collect();
    assert_eq!(unmarked, [true, false]);
    assert_eq!(store.damage_mark(id(1)), None);
}
