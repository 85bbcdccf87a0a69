//! Property tests of the whole store with any content and any damage.

use std::fs;
use std::path::PathBuf;

use proptest::prelude::*;
use proptest::sample::Index;

use super::damage::{files_of, reads_back, small_store};
use super::support::{never, packs, read_stream, temporary_store, write_image};
use crate::store::format::codec::tests::noise;
use crate::store::*;

/// Strategy for a stream as a list of pieces, each with a kind and a length.
fn stream_bytes() -> impl Strategy<Value = Vec<u8>> {
    let piece = (0..4_u8, 0..4_u64, 0..2 * CHUNK_BYTES);
    let pieces = prop::collection::vec(piece, 0..4);
    pieces.prop_map(|pieces| {
        let bytes = pieces.into_iter().map(|(kind, seed, len)| match kind {
            0 => vec![0; len],
            1 => noise(seed, len),
            2 => vec![b'a'; len % 50],
            _ => noise(seed, 64).into_iter().cycle().take(len).collect(),
        });
        bytes.flatten().collect()
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    #[test]
    fn random_images_round_trip(images in prop::collection::vec(prop::collection::vec(stream_bytes(), 0..5), 1..4)) {
        let (_folder, store) = temporary_store();
        let lock = store.lock().unwrap();
        let mut written = Vec::new();
        for streams in &images {
            let names: Vec<String> = (0..streams.len()).map(|number| format!("s/{number}")).collect();
            let named: Vec<(&str, &[u8])> =
                names.iter().zip(streams).map(|(name, bytes)| (&name[..], &bytes[..])).collect();
            written.push(write_image(&store, &lock, &named).id);
        }
        for (id, streams) in written.iter().zip(&images) {
            store.verify(*id, &never).unwrap();
            for (number, bytes) in streams.iter().enumerate() {
                let read = read_stream(&store, *id, &format!("s/{number}"));
                prop_assert!(&read == bytes);
            }
        }
        let removed = store.rotate(&lock, 1).unwrap();
        prop_assert_eq!(&removed[..], &written[..written.len() - 1]);
        let manifest = store.manifest(written[removed.len()]).unwrap();
        let mut named: Vec<String> = manifest.packs.iter().map(|pack| pack.name.to_string()).collect();
        named.sort();
        prop_assert_eq!(packs(&store), named);
        store.verify(manifest.id, &never).unwrap();
    }

    #[test]
    fn a_single_damage_is_found_and_never_handed_out(
        streams in prop::collection::vec(stream_bytes(), 1..4),
        damage in damage_of_one_file(),
    ) {
        let (_folder, store) = temporary_store();
        let lock = store.lock().unwrap();
        let names = ["a", "b", "c"];
        let named: Vec<(&str, &[u8])> =
            names.into_iter().zip(streams.iter().map(|bytes| &bytes[..])).collect();
        let id = write_image(&store, &lock, &named).id;
        damage.apply(&files_of(&store));
        prop_assert!(store.verify(id, &never).is_err());
        let streams: Vec<(&str, Vec<u8>)> = names.into_iter().zip(streams).collect();
        prop_assert!(!reads_back(&store, id, &streams));
    }

    #[test]
    fn damage_is_found_never_handed_out_and_repaired(damages in prop::collection::vec(damage(), 1..5)) {
        let (_folder, store, contents) = small_store();
        let files = files_of(&store);
        for damage in &damages {
            damage.apply(&files);
        }
        let report = store.verify_all(Selection::All, &never).unwrap();
        let mut readable = Vec::new();
        for (id, streams) in &contents {
            let is_readable = reads_back(&store, *id, streams);
            readable.extend(is_readable.then_some(*id));
            let image = report.images.iter().find(|image| image.id == *id);
            let is_whole = image.is_some_and(|image| image.verdict() == Verdict::Whole);
            prop_assert_eq!(is_whole, is_readable);
        }
        let lock = store.lock().unwrap();
        let repaired = repair(&store, &lock);
        let unknown = !repaired.unknown.is_empty();
        // All images that were whole still exist, and all existing images are whole.
        let report = store.verify_all(Selection::All, &never).unwrap();
        prop_assert!(readable.iter().all(|id| report.images.iter().any(|image| image.id == *id)));
        for image in &report.images {
            let whole = reads_back(&store, image.id, &contents[&image.id]);
            prop_assert_eq!(image.verdict() == Verdict::Whole, whole);
            prop_assert!(whole || unknown, "{:?}", image);
        }
        let again = repair(&store, &lock);
        prop_assert!(again.is_nothing(), "{:?}", again);
        let next = write_image(&store, &lock, &[("pages", b"next")]);
        store.verify(next.id, &never).unwrap();
    }
}

/// Damage to the files of a store.
#[derive(Clone, Debug)]
enum Damage {
    Flip(Index, Index, u8),
    Cut(Index, Index),
    Grow(Index, Vec<u8>),
    Remove(Index),
    Swap(Index, Index),
}

fn damage_of_one_file() -> impl Strategy<Value = Damage> {
    let file = any::<Index>;
    prop_oneof![
        4 => (file(), any::<Index>(), 0..8_u8).prop_map(|(f, at, bit)| Damage::Flip(f, at, bit)),
        1 => (file(), any::<Index>()).prop_map(|(file, at)| Damage::Cut(file, at)),
        1 => (file(), prop::collection::vec(any::<u8>(), 1..9)).prop_map(|(f, b)| Damage::Grow(f, b)),
        1 => file().prop_map(Damage::Remove),
    ]
}

fn damage() -> impl Strategy<Value = Damage> {
    let swap = (any::<Index>(), any::<Index>()).prop_map(|(one, other)| Damage::Swap(one, other));
    prop_oneof![7 => damage_of_one_file(), 1 => swap]
}

impl Damage {
    /// Damages the files; does nothing to a file that was removed before.
    fn apply(&self, files: &[PathBuf]) {
        match self {
            Self::Flip(file, at, bit) => {
                change(file.get(files), |bytes| {
                    let at = at.index(bytes.len().max(1));
                    if let Some(byte) = bytes.get_mut(at) {
                        *byte ^= 1 << bit;
                    }
                });
            }
            Self::Cut(file, at) => change(file.get(files), |bytes| {
                bytes.truncate(at.index(bytes.len().max(1)));
            }),
            Self::Grow(file, more) => change(file.get(files), |bytes| bytes.extend(more)),
            Self::Remove(file) => {
                let _ = fs::remove_file(file.get::<PathBuf>(files));
            }
            Self::Swap(one, other) => {
                let (one, other): (&PathBuf, &PathBuf) = (one.get(files), other.get(files));
                if let (Ok(first), Ok(second)) = (fs::read(one), fs::read(other)) {
                    fs::write(one, second).unwrap();
                    fs::write(other, first).unwrap();
                }
            }
        }
    }
}

fn change(path: &PathBuf, change: impl FnOnce(&mut Vec<u8>)) {
    if let Ok(mut bytes) = fs::read(path) {
        change(&mut bytes);
        fs::write(path, bytes).unwrap();
    }
}

fn repair(store: &Store, lock: &StoreLock) -> Repaired {
    let plan = store.plan_repair(lock, Marks::Keep, &never).unwrap();
    plan.apply().unwrap()
}
