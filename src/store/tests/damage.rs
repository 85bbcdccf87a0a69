//! Every kind of damage to a small store, bit by bit: verification must find it, and reading must not return a wrong
//! byte.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use super::support::{never, temporary_store, write_image};
use crate::store::format::codec::tests::noise;
use crate::store::format::file_names::{self, FileKind};
use crate::store::format::manifest_file;
use crate::store::*;

type Contents = BTreeMap<ImageId, Vec<(&'static str, Vec<u8>)>>;

/// A store of a few KiB: two images that share a chunk, compressed and plain chunks, zeros.
pub(crate) fn small_store() -> (tempfile::TempDir, Store, Contents) {
    let (folder, store) = temporary_store();
    let lock = store.lock().unwrap();
    let words = b"epoch 1 loss 0.25, ".repeat(20);
    let first = vec![("pages", words), ("core", noise(1, 70))];
    let second = vec![
        ("pages", first[0].1.clone()),
        ("core", noise(2, 90)),
        ("zero", vec![0; 50]),
    ];
    let mut contents = Contents::new();
    for streams in [first, second] {
        let named: Vec<(&str, &[u8])> = streams.iter().map(|(n, b)| (*n, &b[..])).collect();
        contents.insert(write_image(&store, &lock, &named).id, streams);
    }
    (folder, store, contents)
}

/// Returns the files of images and packs except for the marks, of which only the name has a meaning.
pub(crate) fn files_of(store: &Store) -> Vec<PathBuf> {
    let folders = [store.images_folder(), store.packs_folder()];
    let mut paths: Vec<PathBuf> = folders
        .iter()
        .flat_map(|folder| file_names::list(folder).unwrap())
        .filter(|(_, kind)| matches!(kind, FileKind::Manifest(_) | FileKind::Pack(_)))
        .map(|(path, _)| path)
        .collect();
    paths.sort();
    paths
}

/// Returns true if all bytes of an image can be read. Panics if a byte is wrong.
pub(crate) fn reads_back(store: &Store, id: ImageId, streams: &[(&str, Vec<u8>)]) -> bool {
    let Ok(reader) = store.read(id) else {
        return false;
    };
    let mut whole = true;
    for (name, bytes) in streams {
        let mut sink = Vec::new();
        let result = reader.copy_to(name, &mut sink);
        assert!(
            bytes.starts_with(&sink),
            "image {id} gave wrong bytes of {name}"
        );
        whole &= result.is_ok_and(|len| len == bytes.len() as u64);
    }
    whole
}

/// Checks that verification and reading agree about each image. Returns the images that are not whole.
fn not_whole(store: &Store, contents: &Contents) -> Vec<ImageId> {
    let report = store.verify_all(Selection::All, &never).unwrap();
    let verdict = |id: &ImageId| {
        let image = report.images.iter().find(|image| image.id == *id);
        image.map(ImageReport::verdict)
    };
    for (id, streams) in contents {
        let is_whole = verdict(id) == Some(Verdict::Whole);
        assert_eq!(is_whole, reads_back(store, *id, streams), "image {id}");
    }
    let bad = report.images.iter();
    bad.filter(|image| image.verdict() != Verdict::Whole)
        .map(|image| image.id)
        .collect()
}

fn id(number: u64) -> ImageId {
    ImageId::new(number).unwrap()
}

/// Describes all faults of an image.
fn said(store: &Store, id: ImageId) -> String {
    let report = store.verify_all(Selection::These(&[id]), &never).unwrap();
    let image = &report.images[0];
    let manifest = image.manifest.iter().map(|error| format!("{error:?}"));
    let packs = image.packs.iter().map(ToString::to_string);
    let runs = image.streams.iter().flat_map(|stream| {
        let name = &stream.name;
        stream.runs.iter().map(move |run| format!("{name}: {run}"))
    });
    let lines: Vec<String> = manifest.chain(packs).chain(runs).collect();
    lines.join("\n")
}

#[test]
fn every_flipped_bit_is_found() {
    let (_folder, store, contents) = small_store();
    assert_eq!(not_whole(&store, &contents), []);
    for path in files_of(&store) {
        let file = File::options().read(true).write(true).open(&path).unwrap();
        let bytes = fs::read(&path).unwrap();
        for bit in 0..bytes.len() * 8 {
            let (at, byte) = (bit / 8, bytes[bit / 8]);
            file.write_all_at(&[byte ^ 1 << (bit % 8)], at as u64)
                .unwrap();
            let bad = not_whole(&store, &contents);
            assert!(!bad.is_empty(), "bit {bit} of {path:?}");
            file.write_all_at(&[byte], at as u64).unwrap();
        }
    }
    assert_eq!(not_whole(&store, &contents), []);
}

#[test]
fn flipped_bits_elsewhere_in_the_store_change_no_image() {
    let (_folder, store, contents) = small_store();
    store
        .set_aside(&store.lock().unwrap(), id(2), "torn")
        .unwrap();
    for name in ["format", "lock", "images/000002.damaged"] {
        let path = store.path().join(name);
        let bytes = fs::read(&path).unwrap();
        for bit in 0..bytes.len() * 8 {
            let mut damaged = bytes.clone();
            damaged[bit / 8] ^= 1 << (bit % 8);
            fs::write(&path, &damaged).unwrap();
            match Store::open(store.path()) {
                Ok(opened) => assert_eq!(not_whole(&opened, &contents), [], "bit {bit} of {name}"),
                Err(error) => assert!(matches!(error, OpenError::Format { .. }), "{error}"),
            }
        }
        fs::write(&path, &bytes).unwrap();
    }
}

#[test]
fn every_length_of_a_file_but_its_own_is_found() {
    let (_folder, store, contents) = small_store();
    for path in files_of(&store) {
        let bytes = fs::read(&path).unwrap();
        for len in 0..bytes.len() {
            fs::write(&path, &bytes[..len]).unwrap();
            assert!(
                !not_whole(&store, &contents).is_empty(),
                "{len} of {path:?}"
            );
        }
        for more in [&[0][..], &bytes] {
            fs::write(&path, [&bytes, more].concat()).unwrap();
            assert!(!not_whole(&store, &contents).is_empty(), "{path:?} grew");
        }
        fs::write(&path, &bytes).unwrap();
    }
}

#[test]
fn every_pair_of_swapped_files_is_found() {
    let (_folder, store, contents) = small_store();
    let files = files_of(&store);
    let swap = |one: &Path, other: &Path| {
        let spare = store.path().join("spare");
        fs::rename(one, &spare).unwrap();
        fs::rename(other, one).unwrap();
        fs::rename(&spare, other).unwrap();
    };
    for (position, one) in files.iter().enumerate() {
        for other in &files[position + 1..] {
            swap(one, other);
            assert!(
                !not_whole(&store, &contents).is_empty(),
                "{one:?} {other:?}"
            );
            swap(one, other);
        }
    }
    assert_eq!(not_whole(&store, &contents), []);
}

#[test]
fn a_missing_pack_is_named_with_the_streams_that_lack_it() {
    let (_folder, store, contents) = small_store();
    let shared = store.manifest(id(1)).unwrap().packs;
    for pack in &shared {
        fs::remove_file(store.pack_file(pack.name)).unwrap();
    }
    assert_eq!(not_whole(&store, &contents), [id(1), id(2)]);
    for image in [id(1), id(2)] {
        let said = said(&store, image);
        assert!(said.contains("cannot read"), "{said}");
        assert!(
            said.contains("pages: chunk 0 (bytes 0 to 379) in 000001-0"),
            "{said}"
        );
        assert!(said.contains("it is lost"), "{said}");
    }
    assert!(
        !said(&store, id(2)).contains("core"),
        "{}",
        said(&store, id(2))
    );
}

#[test]
fn everything_that_is_bad_is_named_and_not_only_the_first() {
    let (_folder, store) = temporary_store();
    let lock = store.lock().unwrap();
    let twice = noise(1, 6 * CHUNK_BYTES);
    let streams: [(&str, &[u8]); 3] = [("a", &twice), ("b", &twice), ("c", b"other")];
    let image = write_image(&store, &lock, &streams);
    let manifest = store.manifest(image.id).unwrap();
    for position in [1, 2, 4] {
        let chunk = manifest.chunks[manifest.streams[0].chunks[position] as usize];
        let Content::Stored(stored) = chunk.content else {
            panic!("noise is stored");
        };
        let pack = manifest.packs[stored.pack as usize].name;
        let file = File::options()
            .read(true)
            .write(true)
            .open(store.pack_file(pack))
            .unwrap();
        let mut byte = [0];
        file.read_exact_at(&mut byte, stored.offset + 9).unwrap();
        file.write_all_at(&[!byte[0]], stored.offset + 9).unwrap();
    }
    let report = store.verify_all(Selection::All, &never).unwrap();
    let streams = &report.images[0].streams;
    let bad = |stream: usize| -> Vec<usize> {
        let runs = streams[stream].runs.iter();
        runs.flat_map(|run| run.chunks.clone()).collect()
    };
    let names: Vec<&str> = streams.iter().map(|stream| &stream.name[..]).collect();
    assert_eq!(names, ["a", "b"], "c is whole");
    assert_eq!((bad(0), bad(1)), (vec![1, 2, 4], vec![1, 2, 4]));
    let first = manifest.chunks[manifest.streams[0].chunks[0] as usize];
    let start = streams[0].runs[0].bytes.start;
    assert_eq!(start, u64::from(first.raw_len));
}

#[test]
fn forged_manifests_are_named() {
    type Change = fn(&mut Manifest);
    type Move = fn(&mut Stored);
    let stored = |change: Move| {
        move |manifest: &mut Manifest| {
            for chunk in &mut manifest.chunks {
                if let Content::Stored(stored) = &mut chunk.content {
                    change(stored);
                }
            }
        }
    };
    let places: [(&str, Move); 7] = [
        ("no such pack", |stored| stored.pack = 1000),
        ("far behind the end", |stored| stored.offset = u64::MAX),
        ("a little behind the end", |stored| stored.offset += 1),
        ("in the header", |stored| stored.offset = 0),
        ("no bytes", |stored| stored.len = 0),
        ("too many bytes", |stored| stored.len = u32::MAX),
        ("another hash", |stored| stored.hash[31] ^= 1),
    ];
    let others: [(&str, Change); 9] = [
        ("a path", |m| {
            m.streams[0].name = "../../etc/passwd".to_owned();
        }),
        ("a root", |m| m.streams[0].name = "/etc/passwd".to_owned()),
        ("two of a name", |m| m.streams[0].name = "core".to_owned()),
        ("no such chunk", |m| m.streams[0].chunks[0] = u32::MAX),
        ("a longer stream", |m| m.streams[0].raw_len += 1),
        ("a longer image", |m| m.raw_bytes = u64::MAX),
        ("a longer pack", |m| m.packs[0].len += 1),
        ("another pack", |m| m.packs[0].name.number = u32::MAX),
        ("a pack of an image to come", |m| {
            m.packs[0].name.image = id(999_999_999_999);
        }),
    ];
    let check = |what: &str, change: &dyn Fn(&mut Manifest)| {
        let (_folder, store, contents) = small_store();
        let mut manifest = store.manifest(id(1)).unwrap();
        change(&mut manifest);
        fs::write(
            store.manifest_file(id(1)),
            manifest_file::encode(&manifest, store.secrets()).unwrap(),
        )
        .unwrap();
        assert_eq!(not_whole(&store, &contents), [id(1)], "{what}");
        assert_ne!(said(&store, id(1)), "", "{what}");
    };
    for (what, change) in places {
        check(what, &stored(change));
    }
    for (what, change) in others {
        check(what, &change);
    }
}

#[test]
fn a_manifest_under_the_name_of_another_image_is_named() {
    let (_folder, store, contents) = small_store();
    fs::copy(store.manifest_file(id(1)), store.manifest_file(id(2))).unwrap();
    assert_eq!(not_whole(&store, &contents), [id(2)]);
    assert!(said(&store, id(2)).contains("it belongs to another image"));
}

#[test]
fn a_pack_that_cannot_be_read_for_now_is_no_damage() {
    let (_folder, store, contents) = small_store();
    let pack = store.pack_file(store.manifest(id(2)).unwrap().packs[0].name);
    fs::rename(&pack, store.path().join("spare")).unwrap();
    std::os::unix::fs::symlink(&pack, &pack).unwrap();
    let report = store.verify_all(Selection::All, &never).unwrap();
    let verdicts: Vec<Verdict> = report.images.iter().map(ImageReport::verdict).collect();
    assert!(verdicts.contains(&Verdict::Unknown) && !verdicts.contains(&Verdict::Damaged));
    fs::remove_file(&pack).unwrap();
    fs::rename(store.path().join("spare"), &pack).unwrap();
    assert_eq!(not_whole(&store, &contents), []);
}

#[test]
fn chunks_that_images_share_are_read_once() {
    let (_folder, store) = temporary_store();
    let lock = store.lock().unwrap();
    let data = noise(1, 3 * CHUNK_BYTES);
    for _ in 0..2 {
        write_image(&store, &lock, &[("a", &data)]);
    }
    let chunks = write_image(&store, &lock, &[("a", &data)]).chunks.len();
    let report = store.verify_all(Selection::All, &never).unwrap();
    assert_eq!((report.images.len(), report.chunks), (3, chunks as u64));
    assert_eq!(report.chunk_bytes, data.len() as u64);
    let named = [id(2), id(2)];
    let report = store.verify_all(Selection::These(&named), &never).unwrap();
    assert_eq!(report.images.len(), 1);
}

#[test]
fn an_image_that_is_not_there_is_an_error_and_no_damage() {
    let (_folder, store, _) = small_store();
    let error = store
        .verify_all(Selection::These(&[id(7)]), &never)
        .unwrap_err();
    assert!(matches!(error, ReadError::Missing { .. }), "{error}");
}
