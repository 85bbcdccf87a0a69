//! Tests of an encrypted store as a whole: contents, leaks, refusals.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use super::support::{
    OPTIONS, any, flip, names, never, packs, place_of, read_stream, temporary_store, write_image,
};
use crate::store::format::codec::tests::noise;
use crate::store::*;

/// Text that can be found in every file that contains it unencrypted.
const SECRET: &str = "the password is swordfish; ";

fn key(byte: u8) -> Key {
    Key::from_bytes(&[byte; 32])
}

fn encrypted_store() -> (tempfile::TempDir, Store) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("store");
    let store = Store::create_or_open_with(&path, Some(&key(1))).unwrap();
    (folder, store)
}

/// Streams of every codec, of zeros, and of chunks that occur twice.
fn contents() -> Vec<(&'static str, Vec<u8>)> {
    let text = SECRET.repeat(40_000).into_bytes();
    let random = noise(1, 3 * CHUNK_BYTES + 5);
    vec![
        ("pages-1.img", [&random[..], &text, &random].concat()),
        ("core-1.img", text),
        ("zeros", vec![0; 2 * CHUNK_BYTES]),
        ("short", b"x".to_vec()),
        ("empty", Vec::new()),
    ]
}

fn repair(store: &Store, lock: &StoreLock) -> Repaired {
    let plan = store.plan_repair(lock, Marks::Clear, &never).unwrap();
    plan.apply().unwrap()
}

fn write(store: &Store, lock: &StoreLock) -> Manifest {
    let contents = contents();
    let streams: Vec<(&str, &[u8])> = contents.iter().map(|(n, b)| (*n, &b[..])).collect();
    write_image(store, lock, &streams)
}

/// Returns every file of a store with its content.
fn files(folder: &Path) -> Vec<(String, Vec<u8>)> {
    let mut found = Vec::new();
    for name in names(folder) {
        let path = folder.join(&name);
        if path.is_dir() {
            found.extend(files(&path));
        } else {
            found.push((path.display().to_string(), fs::read(&path).unwrap()));
        }
    }
    found
}

#[test]
fn encrypted_store_round_trips() {
    let (_folder, store) = encrypted_store();
    let lock = store.lock().unwrap();
    let first = write(&store, &lock);
    let second = write(&store, &lock);
    assert!(first.encrypted && store.is_encrypted());
    assert_eq!(second.stored_bytes, 0, "chunks are found again");
    drop(lock);
    let again = Store::open_with(store.path(), Some(&key(1))).unwrap();
    let images = again.images().unwrap();
    assert_eq!(images.len(), 2);
    assert!(
        images
            .iter()
            .all(|image| image.damaged.is_none() && image.meta == b"meta")
    );
    for image in [first.id, second.id] {
        again.verify(image, &never).unwrap();
        for (name, bytes) in contents() {
            assert!(read_stream(&again, image, name) == bytes, "{name}");
        }
    }
    let lock = again.lock().unwrap();
    assert_eq!(again.rotate(&lock, 1).unwrap(), [first.id]);
    again.verify(second.id, &never).unwrap();
}

#[test]
fn no_file_shows_content_names_or_meta_data() {
    let (_folder, plain) = temporary_store();
    let (_other, store) = encrypted_store();
    write(&plain, &plain.lock().unwrap());
    let manifest = write(&store, &store.lock().unwrap());
    let stored = manifest
        .chunks
        .iter()
        .filter_map(|chunk| match chunk.content {
            Content::Stored(stored) => Some(stored),
            Content::Zero => None,
        });
    let mut needles: Vec<Vec<u8>> = stored.map(|stored| stored.hash.to_vec()).collect();
    needles.extend(["pages-1.img", "meta", "swordfish"].map(|text| text.as_bytes().to_vec()));
    needles.push(noise(1, 64));
    assert_eq!(shown(&store, &needles), BTreeSet::new());
    // The same search finds uncompressed data in a plain store.
    let found = shown(&plain, &needles);
    assert!(found.len() >= 3, "{found:?}");
}

/// Returns the needles that occur in the store's files; one pass looks for all.
fn shown(store: &Store, needles: &[Vec<u8>]) -> BTreeSet<usize> {
    let mut beginning_with = vec![vec![]; 1 << 8];
    for (at, needle) in needles.iter().enumerate() {
        beginning_with[usize::from(needle[0])].push(at);
    }
    let mut found = BTreeSet::new();
    for (_, bytes) in files(store.path()) {
        for place in 0..bytes.len() {
            for at in &beginning_with[usize::from(bytes[place])] {
                if bytes[place..].starts_with(&needles[*at]) {
                    found.insert(*at);
                }
            }
        }
    }
    found
}

#[test]
fn same_image_in_two_stores_of_one_key_shares_no_bytes() {
    let (_folder, one) = encrypted_store();
    let (_other, other) = encrypted_store();
    let pack = |store: &Store| {
        write(store, &store.lock().unwrap());
        fs::read(store.path().join("packs").join(&packs(store)[0])).unwrap()
    };
    let (one, other) = (pack(&one), pack(&other));
    let (one, other) = (&one[64..], &other[64..]);
    let equal = one.iter().zip(other).filter(|(a, b)| a == b).count();
    // One byte in 256 is equal by chance.
    assert!(equal < one.len() / 200, "{equal} of {}", one.len());
}

type Open = fn(&Path, Option<&Key>) -> Result<Store, OpenError>;

#[test]
fn a_store_opens_with_its_key_only_and_is_not_touched() {
    let (_folder, plain) = temporary_store();
    let (_other, store) = encrypted_store();
    write(&store, &store.lock().unwrap());
    let before = files(store.path());
    for open in [Store::open_with as Open, Store::create_or_open_with] {
        let text =
            |store: &Store, key: Option<&Key>| open(store.path(), key).unwrap_err().to_string();
        assert!(text(&store, None).contains("encrypted and no key is given: set"));
        assert!(text(&store, Some(&key(2))).contains("wrong key for the store"));
        assert!(text(&plain, Some(&key(1))).contains("is not encrypted, but a key is given"));
    }
    assert_eq!(files(store.path()), before);
}

#[test]
fn every_flipped_byte_is_noticed() {
    let (_folder, store) = encrypted_store();
    let lock = store.lock().unwrap();
    let image = write_image(
        &store,
        &lock,
        &[("a", SECRET.as_bytes()), ("b", &noise(1, 300))],
    )
    .id;
    for (path, good) in files(store.path()) {
        let is_open_text = ["/lock", "/format", "/.gitignore"];
        if is_open_text.iter().any(|name| path.ends_with(name)) {
            continue;
        }
        for at in 0..good.len() {
            let mut bad = good.clone();
            bad[at] ^= 0x20;
            fs::write(&path, bad).unwrap();
            let verified = Store::open_with(store.path(), Some(&key(1)))
                .map_err(|error| error.to_string())
                .and_then(|store| {
                    store
                        .verify(image, &never)
                        .map_err(|error| error.to_string())
                });
            // Hexadecimal digits are read in upper and lower case.
            let is_letter = path.ends_with("/key-check") && good[at].is_ascii_lowercase();
            assert!(verified.is_err() || is_letter, "{path}: {at}");
        }
        fs::write(&path, good).unwrap();
    }
    store.verify(image, &never).unwrap();
}

#[test]
fn a_manifest_of_a_plain_store_is_not_taken_for_ours() {
    let (_folder, plain) = temporary_store();
    let (_other, store) = encrypted_store();
    let image = write(&plain, &plain.lock().unwrap()).id;
    write(&store, &store.lock().unwrap());
    let mine = fs::read(store.manifest_file(image)).unwrap();
    fs::copy(plain.manifest_file(image), store.manifest_file(image)).unwrap();
    let error = store.manifest(image).unwrap_err();
    assert!(error.to_string().contains("cannot use image"), "{error}");
    assert!(!error.is_damage(), "it may be good elsewhere");
    fs::write(plain.manifest_file(image), mine).unwrap();
    assert!(!plain.manifest(image).unwrap_err().is_damage());
}

#[test]
fn a_store_that_lost_its_key_check_loses_no_image() {
    let (_folder, store) = encrypted_store();
    write(&store, &store.lock().unwrap());
    let check = store.path().join("key-check");
    let content = fs::read(&check).unwrap();
    fs::remove_file(&check).unwrap();
    let keyless = Store::open(store.path()).unwrap();
    let lock = keyless.lock().unwrap();
    keyless.sweep(&lock).unwrap();
    keyless.prune(&lock).unwrap();
    keyless.rotate(&lock, 1).unwrap();
    repair(&keyless, &lock);
    let listed = keyless.images().unwrap();
    assert!(listed[0].damaged.as_ref().unwrap().contains("is encrypted"));
    drop(lock);
    fs::write(&check, content).unwrap();
    let store = Store::open_with(store.path(), Some(&key(1))).unwrap();
    store.verify(ImageId::FIRST, &never).unwrap();
}

#[test]
fn an_image_of_another_key_is_no_image_and_is_not_repaired_away() {
    let (_folder, store) = encrypted_store();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("store");
    let other = Store::create_or_open_with(&path, Some(&key(2))).unwrap();
    write(&store, &store.lock().unwrap());
    let image = write(&other, &other.lock().unwrap()).id;
    let theirs = fs::read(other.manifest_file(image)).unwrap();
    fs::write(store.manifest_file(image), &theirs).unwrap();
    let error = store.manifest(image).unwrap_err();
    assert!(error.is_damage(), "{error}");
    repair(&store, &store.lock().unwrap());
    assert_eq!(fs::read(store.manifest_file(image)).unwrap(), theirs);
}

#[test]
fn an_image_that_cannot_be_read_for_now_goes_by_name_only() {
    let (_folder, plain) = temporary_store();
    let (_other, store) = encrypted_store();
    let lock = plain.lock().unwrap();
    for _ in 0..4 {
        write(&plain, &lock);
    }
    let [first, second, third] = [1, 2, 3].map(|number| ImageId::new(number).unwrap());
    let theirs = write(&store, &store.lock().unwrap()).id;
    fs::copy(store.manifest_file(theirs), plain.manifest_file(first)).unwrap();
    // The mark cannot be read, so it is only assumed that the image was set aside.
    std::os::unix::fs::symlink("000002.damaged", plain.damaged_file(second)).unwrap();
    assert_eq!(plain.rotate(&lock, 1).unwrap(), [third]);
    let plan = plain.plan_named(&[first, second], &any).unwrap();
    let forgotten = plain.forget(&lock, &plan, Effort::Quick, &any).unwrap();
    assert_eq!(forgotten.images, [first, second]);
}

#[test]
fn repair_of_an_encrypted_store_heals_and_drops_images() {
    let (_folder, store) = encrypted_store();
    let lock = store.lock().unwrap();
    let first = place_of(&write(&store, &lock), "short");
    // An image that was set aside shares no chunk with the next.
    store.set_aside(&lock, ImageId::FIRST, "a test").unwrap();
    let second = write(&store, &lock);
    let (pack, at) = place_of(&second, "short");
    flip(&store, pack, at);
    let second = second.id;
    assert!(store.verify(second, &never).is_err());
    let repaired = repair(&store, &lock);
    let fates: Vec<Remedy> = repaired.images.iter().map(|image| image.remedy).collect();
    assert!(
        matches!(fates[..], [Remedy::Whole, Remedy::Healed { chunks: 1 }]),
        "{fates:?}"
    );
    store.verify(second, &never).unwrap();
    flip(&store, first.0, first.1);
    repair(&store, &lock);
    assert_eq!(store.images().unwrap().len(), 0);
}

#[test]
fn copies_between_plain_and_encrypted_stores_are_equal() {
    let (_folder, plain) = temporary_store();
    let (_other, store) = encrypted_store();
    let image = write(&plain, &plain.lock().unwrap()).id;
    let lock = store.lock().unwrap();
    let options = OPTIONS;
    let copy = plain
        .copy_image(image, &[], &store, &lock, options, &never)
        .unwrap();
    assert!(copy.encrypted);
    let (_third, back) = temporary_store();
    let back_lock = back.lock().unwrap();
    let copy = store
        .copy_image(copy.id, &[], &back, &back_lock, options, &never)
        .unwrap();
    assert!(!copy.encrypted);
    for (name, bytes) in contents() {
        assert!(read_stream(&back, copy.id, name) == bytes, "{name}");
    }
}

#[test]
fn interrupted_creation_is_completed_with_the_present_key() {
    for today in [None, Some(key(2))] {
        let folder = tempfile::tempdir().unwrap();
        fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o700)).unwrap();
        let store = Store::create_or_open_with(folder.path(), Some(&key(1))).unwrap();
        fs::remove_file(store.path().join("format")).unwrap();
        let store = Store::create_or_open_with(folder.path(), today.as_ref()).unwrap();
        assert_eq!(store.is_encrypted(), today.is_some());
        let lock = store.lock().unwrap();
        let image = write(&store, &lock).id;
        store.verify(image, &never).unwrap();
    }
}

#[test]
fn damaged_key_check_is_reported() {
    let (_folder, store) = encrypted_store();
    fs::write(store.path().join("key-check"), "").unwrap();
    for key in [None, Some(key(1))] {
        let error = Store::open_with(store.path(), key.as_ref()).unwrap_err();
        assert!(matches!(error, OpenError::KeyCheck { .. }), "{error}");
    }
}
