//! Removed images, refused removals, and the state after an interrupted removal.

use std::fs;
use std::time::Duration;

use super::*;
use crate::clock;
use crate::store::CHUNK_BYTES;
use crate::store::format::codec::tests::noise;
use crate::store::tests::support::{any, image_files, never, packs, temporary_store, write_image};

const LAST: Policy = Policy {
    keep_last: 1,
    keep_within: Duration::ZERO,
    keep_hourly: 0,
    keep_daily: 0,
};

fn id(number: u64) -> ImageId {
    ImageId::new(number).unwrap()
}

/// Images 1 to `count`, which share no chunk.
fn store_with(count: u64) -> (tempfile::TempDir, Store, StoreLock) {
    let (folder, store) = temporary_store();
    let lock = store.lock().unwrap();
    for seed in 0..count {
        write_image(&store, &lock, &[("a", &noise(seed, CHUNK_BYTES))]);
    }
    (folder, store, lock)
}

fn removed(plan: &[Planned]) -> Vec<ImageId> {
    let removed = plan.iter().filter(|planned| planned.fate.is_removed());
    removed.map(|planned| planned.id).collect()
}

#[test]
fn forget_removes_named_images_and_reports_their_space() {
    let (_folder, store, lock) = store_with(3);
    let plan = store.plan_named(&[id(2), id(1), id(2)], &any).unwrap();
    assert_eq!(removed(&plan), [id(1), id(2)]);
    let gains = store.gains(&[id(1), id(2)]).unwrap();
    let forgotten = store.forget(&lock, &plan, Effort::Thorough, &any).unwrap();
    assert_eq!(
        (forgotten.images, forgotten.spared),
        (vec![id(1), id(2)], vec![])
    );
    assert!(forgotten.swept.packs >= 2);
    assert!(forgotten.swept.bytes >= 2 * CHUNK_BYTES as u64);
    assert!(gains[1] >= 2 * CHUNK_BYTES as u64 && gains[1] <= forgotten.swept.bytes);
    assert_eq!(image_files(&store), ["000003.manifest"]);
}

#[test]
fn forget_refuses_missing_pinned_and_needed_images_by_name() {
    let (_folder, store, lock) = store_with(4);
    store.pin(id(1), "").unwrap();
    let text = |ids: &[u64]| {
        let ids: Vec<ImageId> = ids.iter().copied().map(id).collect();
        store.plan_named(&ids, &any).unwrap_err().to_string()
    };
    assert_eq!(text(&[9, 2, 7]), "there is no image 000007, 000009");
    assert!(text(&[2, 1]).contains("pinned images: 000001"));
    assert!(text(&[2, 4]).contains("000004: it is the newest good image"));
    store.set_aside(&lock, id(4), "torn").unwrap();
    assert!(text(&[3]).contains("000003: it is the newest good image"));
    assert_eq!(removed(&store.plan_named(&[id(4)], &any).unwrap()), [id(4)]);
}

#[test]
fn old_plan_removes_neither_newest_good_nor_pinned_image() {
    let (_folder, store, lock) = store_with(3);
    let plan = store.plan(&LAST, &clock::local(), &any).unwrap();
    assert_eq!(removed(&plan), [id(1), id(2)]);
    store.set_aside(&lock, id(3), "torn").unwrap();
    store.pin(id(1), "").unwrap();
    let forgotten = store.forget(&lock, &plan, Effort::Thorough, &any).unwrap();
    assert_eq!(
        (forgotten.images, forgotten.spared),
        (vec![], vec![id(1), id(2)])
    );
    store.verify(id(2), &never).unwrap();
}

#[test]
fn plan_ahead_lists_replaced_images_but_never_the_newest() {
    let (_folder, store, lock) = store_with(3);
    let ahead = |keep_last| {
        let policy = Policy { keep_last, ..LAST };
        removed(&store.plan_ahead(&policy, &clock::local(), &any).unwrap())
    };
    assert_eq!(ahead(3), [id(1)]);
    assert_eq!(ahead(1), [id(1), id(2)]);
    assert_eq!(ahead(4), []);
    store.set_aside(&lock, id(3), "torn").unwrap();
    assert_eq!(ahead(1), [id(1), id(3)]);
}

#[test]
fn newest_good_image_of_the_run_stays_despite_newer_ones() {
    let (_folder, store, lock) = store_with(4);
    // Rolled back to image 2.
    let continues_from: GoesOn<'_> = &|image, meta| image <= id(2) && meta == b"meta";
    let plan = store.plan(&LAST, &clock::local(), continues_from).unwrap();
    assert_eq!(removed(&plan), [id(1), id(3)]);
    let ahead = store
        .plan_ahead(&LAST, &clock::local(), continues_from)
        .unwrap();
    assert_eq!(removed(&ahead), [id(1), id(3)]);
    let refused = store
        .plan_named(&[id(2)], continues_from)
        .unwrap_err()
        .to_string();
    assert!(
        refused.contains("000002: it is the newest good image that the run continues from"),
        "{refused}"
    );
    // An older plan.
    let plan = store.plan(&LAST, &clock::local(), &any).unwrap();
    let forgotten = store
        .forget(&lock, &plan, Effort::Quick, continues_from)
        .unwrap();
    assert_eq!(
        (forgotten.images, forgotten.spared),
        (vec![id(1), id(3)], vec![id(2)])
    );
}

#[test]
fn freed_dead_space_is_reported_exactly() {
    let (_folder, store) = temporary_store();
    let lock = store.lock().unwrap();
    let shared = noise(1, CHUNK_BYTES);
    for seed in 10..13 {
        let own = noise(seed, 16 * CHUNK_BYTES);
        write_image(&store, &lock, &[("a", &own), ("b", &shared)]);
    }
    let gains = store.gains(&[id(1), id(2)]).unwrap();
    // All of it, except perhaps the rest of a pack if that is shorter than the minimum for a hole.
    assert!(gains[0] >= 12 * CHUNK_BYTES as u64, "{gains:?}");
    assert!(gains[1] >= gains[0] + 12 * CHUNK_BYTES as u64, "{gains:?}");
    for (count, gain) in (1..).zip(gains) {
        let ids: Vec<ImageId> = (1..=count).map(id).collect();
        let (_copy, twin) = twin_of(&store);
        let twin_lock = twin.lock().unwrap();
        let plan = twin.plan_named(&ids, &any).unwrap();
        let swept = twin
            .forget(&twin_lock, &plan, Effort::Thorough, &any)
            .unwrap()
            .swept;
        assert!(
            swept.bytes >= gain && swept.bytes <= gain + (64 << 10),
            "{swept:?} {gain}"
        );
        twin.verify(id(3), &never).unwrap();
    }
}

#[test]
fn removing_the_last_unreadable_image_frees_its_packs() {
    let (_folder, store, _lock) = store_with(5);
    for number in [2, 3] {
        fs::write(store.manifest_file(id(number)), "torn").unwrap();
    }
    let gains = store.gains(&[id(1), id(2), id(3), id(4)]).unwrap();
    assert_eq!(gains[..2], [0, 0]);
    assert!(gains[2] >= 3 * CHUNK_BYTES as u64, "{gains:?}");
    assert!(gains[3] >= gains[2] + CHUNK_BYTES as u64, "{gains:?}");
    assert_eq!(store.gains(&[id(1), id(2)]).unwrap(), [0, 0]);
    for (count, gain) in (1..).zip(gains) {
        let ids: Vec<ImageId> = (1..=count).map(id).collect();
        let (_copy, twin) = twin_of(&store);
        let plan = twin.plan_named(&ids, &any).unwrap();
        let lock = twin.lock().unwrap();
        let forgotten = twin.forget(&lock, &plan, Effort::Thorough, &any).unwrap();
        let bytes = forgotten.swept.bytes;
        assert!(
            bytes >= gain && bytes <= gain + (64 << 10),
            "{bytes} {gain}"
        );
    }
}

#[test]
fn without_known_holes_only_whole_packs_are_freed() {
    let (_folder, store, _lock) = store_with(3);
    let file = store.manifest_file(id(1));
    let mut bytes = fs::read(&file).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    fs::write(&file, bytes).unwrap();
    assert!(store.manifest(id(1)).is_err() && store.images().unwrap()[0].damaged.is_none());
    let gains = store.gains(&[id(2), id(1)]).unwrap();
    assert!(
        gains[0] >= CHUNK_BYTES as u64 && gains[1] >= 2 * CHUNK_BYTES as u64,
        "{gains:?}"
    );
}

/// A copy of the store in a separate folder.
fn twin_of(store: &Store) -> (tempfile::TempDir, Store) {
    let (folder, twin) = temporary_store();
    for part in ["images", "packs"] {
        for entry in fs::read_dir(store.path().join(part)).unwrap().flatten() {
            fs::copy(entry.path(), twin.path().join(part).join(entry.file_name())).unwrap();
        }
    }
    (folder, twin)
}

#[test]
fn a_shared_pack_is_gained_with_the_last_image_that_needs_it() {
    let (_folder, store) = temporary_store();
    let lock = store.lock().unwrap();
    let data = noise(1, 4 * CHUNK_BYTES);
    write_image(&store, &lock, &[("a", &data)]);
    write_image(&store, &lock, &[("a", &data)]);
    write_image(&store, &lock, &[("a", &noise(2, CHUNK_BYTES))]);
    let gains = |ids: &[u64]| {
        let ids: Vec<ImageId> = ids.iter().copied().map(id).collect();
        store.gains(&ids).unwrap()
    };
    assert_eq!(gains(&[1])[..], [0]);
    let both = gains(&[1, 2]);
    assert!(both[0] == 0 && both[1] >= data.len() as u64, "{both:?}");
    fs::write(store.manifest_file(id(3)), "torn").unwrap();
    assert_eq!(gains(&[1, 2]), [0, 0]);
}

#[test]
fn a_removal_cut_short_is_finished_by_the_next_sweep() {
    let (_folder, store, lock) = store_with(3);
    store.set_aside(&lock, id(1), "torn").unwrap();
    store.pin(id(2), "").unwrap();
    // Killed after the manifests were removed.
    for number in [1, 2] {
        fs::remove_file(store.manifest_file(id(number))).unwrap();
    }
    let before = packs(&store).len();
    let swept = store.sweep(&lock).unwrap();
    assert!(swept.packs >= 2 && packs(&store).len() == before - swept.packs);
    assert_eq!(image_files(&store), ["000003.manifest"]);
    store.verify(id(3), &never).unwrap();
}
