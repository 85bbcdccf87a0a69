//! Tests of hole punching: space is freed, used data is never touched, and the cost is bounded.

use proptest::prelude::*;

use super::*;
use crate::store::CHUNK_BYTES;
use crate::store::format::codec::tests::noise;
use crate::store::tests::support::{
    OPTIONS, never, packs, read_stream, temporary_store, write_image,
};
use crate::store::{StoreLock, Swept, WriteOptions};

/// Disk space of all packs.
fn on_disk(store: &Store) -> u64 {
    let files = packs(store).into_iter();
    let files = files.map(|name| fs::metadata(store.packs_folder().join(name)).unwrap());
    files.map(|found| allocated_bytes(&found)).sum()
}

/// Reports whether the file system of temporary folders can punch holes; prints a line if it cannot.
fn can_punch(folder: &Path) -> bool {
    let path = folder.join("probe");
    fs::write(&path, vec![7; 64 << 10]).unwrap();
    let can = punch(&path, std::slice::from_ref(&(0..32 << 10))).is_ok();
    if !can {
        eprintln!("SKIPPED: the file system of temporary folders cannot punch holes");
    }
    can
}

/// Size of each image's own data, in two parts around the data that all share.
const OWN_BYTES: usize = 6 * CHUNK_BYTES;
/// Own data without the pages shared with the neighbouring data.
const DEAD_BYTES: u64 = OWN_BYTES as u64 - 4 * PAGE_BYTES;

fn streams(seed: u64) -> [Vec<u8>; 3] {
    let mut own = noise(seed, OWN_BYTES);
    let rest = own.split_off(OWN_BYTES / 2);
    [own, noise(100, CHUNK_BYTES), rest]
}

/// Writes an image into one pack; all but its middle is its own data.
fn write_mixed(store: &Store, lock: &StoreLock, seed: u64) -> ImageId {
    let options = WriteOptions {
        workers: 1,
        ..OPTIONS
    };
    let writer = store.begin(lock, options).unwrap();
    for (name, bytes) in ["a", "b", "c"].into_iter().zip(streams(seed)) {
        let mut stream = writer.stream(name).unwrap();
        stream.copy_from(&mut &bytes[..]).unwrap();
        stream.finish().unwrap();
    }
    writer.commit(b"meta").unwrap().id
}

#[test]
fn dead_space_inside_remaining_packs_is_freed() {
    let (folder, store) = temporary_store();
    if !can_punch(folder.path()) {
        return;
    }
    let lock = store.lock().unwrap();
    write_mixed(&store, &lock, 1);
    let second = write_mixed(&store, &lock, 2);
    let before = (packs(&store), on_disk(&store));
    assert_eq!(store.rotate(&lock, 1).unwrap().len(), 1);
    assert_eq!(packs(&store), before.0, "all packs are used");
    assert!(on_disk(&store) <= before.1 - DEAD_BYTES);
    store.verify(second, &never).unwrap();
    let [own, shared, _] = streams(2);
    assert!(read_stream(&store, second, "a") == own);
    assert!(read_stream(&store, second, "b") == shared);
    // No more space can be freed.
    assert_eq!(store.prune(&lock).unwrap(), Swept::default());
    // The chunks between the holes serve new images.
    let third = write_image(&store, &lock, &[("b", &shared)]);
    assert_eq!(third.stored_bytes, 0);
    store.verify(third.id, &never).unwrap();
}

#[test]
fn prune_announces_exactly_what_it_frees() {
    let (folder, store) = temporary_store();
    if !can_punch(folder.path()) {
        return;
    }
    let lock = store.lock().unwrap();
    let first = write_mixed(&store, &lock, 1);
    let second = write_mixed(&store, &lock, 2);
    // The state after `forget` was killed before it removed packs.
    fs::remove_file(store.manifest_file(first)).unwrap();
    assert_eq!(
        store.sweep(&lock).unwrap().hole_bytes,
        0,
        "a sweep is quick"
    );
    let planned = store.prunable(&lock).unwrap();
    let before = on_disk(&store);
    assert!(planned.hole_bytes >= DEAD_BYTES);
    let swept = store.prune(&lock).unwrap();
    assert_eq!(swept, planned);
    assert_eq!(before - on_disk(&store), swept.hole_bytes);
    store.verify(second, &never).unwrap();
}

#[test]
fn no_hole_is_punched_while_a_manifest_cannot_be_read() {
    let (_folder, store) = temporary_store();
    let lock = store.lock().unwrap();
    let first = write_mixed(&store, &lock, 1);
    let second = write_mixed(&store, &lock, 2);
    fs::remove_file(store.manifest_file(first)).unwrap();
    let good = fs::read(store.manifest_file(second)).unwrap();
    let before = on_disk(&store);
    // Damage in the header, in the summary, in the body: each of them prevents holes.
    for at in [20, 90, good.len() - 1] {
        let mut damaged = good.clone();
        damaged[at] ^= 1;
        fs::write(store.manifest_file(second), damaged).unwrap();
        let swept = store.prune(&lock).unwrap();
        assert_eq!((swept.hole_bytes, swept.packs), (0, 0), "{at}");
        assert_eq!(swept.unreadable, [second], "{at}");
    }
    assert_eq!(on_disk(&store), before);
}

#[test]
fn a_rotation_reads_only_so_many_manifests() {
    let id = |number| ImageId::new(number).unwrap();
    let name = |image| PackName {
        image: id(image),
        number: 0,
    };
    let pack = |image, images: Vec<ImageId>| {
        let pack = Pack {
            name: name(image),
            len: 100,
        };
        (name(image), (pack, images))
    };
    let few = MANIFESTS_MAX as u64;
    let users: Users = [
        pack(1, (1..few).map(id).collect()),
        pack(2, (10..=few + 2).map(id).collect()),
        pack(3, vec![id(2), id(few)]),
        pack(4, vec![id(1)]),
    ]
    .into();
    let of = |images: &[u64]| Scope::Quick(images.iter().map(|image| name(*image)).collect());
    let chosen = choose(&users, &of(&[1, 2, 3]));
    assert_eq!(chosen, [name(1), name(3)]);
    assert_eq!(images_of(&users, &chosen).len(), MANIFESTS_MAX);
    assert_eq!(choose(&users, &of(&[9])), []);
    assert_eq!(choose(&users, &Scope::Everything).len(), 4);
    let these = Scope::These([name(1), name(2)].into());
    assert_eq!(choose(&users, &these), [name(1), name(2)]);
    assert_eq!(choose(&users, &Scope::Nothing), []);
}

#[test]
fn a_rotation_punches_the_largest_holes_only() {
    let pack = |lengths: &[u64]| Holes {
        path: PathBuf::new(),
        ranges: lengths.iter().map(|length| 4096..4096 + length).collect(),
        bytes: lengths.iter().sum(),
    };
    let mut holes = vec![pack(&[10, 70, 30]), pack(&[20]), pack(&[50, 30])];
    keep_largest(&mut holes, 6);
    assert_eq!(holes.len(), 3);
    keep_largest(&mut holes, 3);
    let left: Vec<u64> = holes
        .iter()
        .flat_map(|pack| &pack.ranges)
        .map(length)
        .collect();
    assert_eq!(left, [70, 30, 50]);
    assert_eq!(holes.iter().map(|pack| pack.bytes).sum::<u64>(), 150);
    keep_largest(&mut holes, 0);
    assert!(holes.is_empty());
}

proptest! {
    #[test]
    fn dead_pages_are_those_that_nothing_touches(
        len in HEADER_BYTES..40 * PAGE_BYTES,
        places in prop::collection::vec((0.0..1.0, 1..3 * PAGE_BYTES), 0..12),
    ) {
        #[expect(clippy::cast_possible_truncation, clippy::cast_precision_loss, clippy::cast_sign_loss)]
        let chunk = |(at, bytes): &(f64, u64)| {
            let start = (HEADER_BYTES + (at * (len - HEADER_BYTES) as f64) as u64).min(len - 1);
            start..(start + bytes).min(len)
        };
        let live: Vec<Range<u64>> = places.iter().filter(|_| len > HEADER_BYTES).map(chunk).collect();
        let dead = dead(len, &live);
        for page in 0..len.div_ceil(PAGE_BYTES) {
            let (start, end) = (page * PAGE_BYTES, (page + 1) * PAGE_BYTES);
            let touched = page == 0 || live.iter().any(|range| range.start < end && range.end > start);
            let is_dead = dead.iter().any(|range| range.start <= start && end <= range.end);
            prop_assert_eq!(is_dead, !touched, "page {}", page);
        }
        prop_assert!(dead.is_sorted_by(|one, next| one.end < next.start));
        let last = dead.last().map_or(0, |range| range.end);
        prop_assert!(last <= len.next_multiple_of(PAGE_BYTES));
    }
}
