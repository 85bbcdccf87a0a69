//! Tests of export and import: images survive the way through files, and no other file becomes an image.

mod forged;

use std::fs;
use std::io::{self, Read, Write};
use std::os::unix::fs::PermissionsExt;

use super::super::format::codec::tests::noise;
use super::super::tests::support::{
    flip, image_files, names, never, packs, place_of, read_stream, temporary_store, write_image,
};
use super::super::{CHUNK_BYTES, ImageId, Key, Manifest, ReadError, Store};
use super::*;

fn key(byte: u8) -> Key {
    Key::from_bytes(&[byte; 32])
}

fn encrypted_store(key: &Key) -> (tempfile::TempDir, Store) {
    let folder = tempfile::tempdir().unwrap();
    let store = Store::create_or_open_with(&folder.path().join("store"), Some(key)).unwrap();
    (folder, store)
}

fn export(store: &Store, id: ImageId, form: Form) -> Vec<u8> {
    let mut file = Vec::new();
    let exported = store
        .export_image(id, form, &[], &mut file, &never)
        .unwrap();
    assert_eq!(exported.file_bytes, file.len() as u64);
    file
}

fn import(store: &Store, file: impl Read, key: Option<&Key>) -> Result<Manifest, ImportError> {
    let lock = store.lock().unwrap();
    PortableReader::open(file, key)?.import_into(store, &lock, &never)
}

/// A source that returns at most three bytes at a time, like a slow pipe.
struct Drip<'a>(&'a [u8]);

impl Read for Drip<'_> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        let len = bytes.len().min(3).min(self.0.len());
        let (now, rest) = self.0.split_at(len);
        bytes[..len].copy_from_slice(now);
        self.0 = rest;
        Ok(len)
    }
}

/// Streams with every kind of chunk: noise, text, numbers, zeros, and repeated data.
fn streams() -> Vec<(&'static str, Vec<u8>)> {
    let random = noise(1, 3 * CHUNK_BYTES + 5);
    let text = "all work and no play ".repeat(40_000).into_bytes();
    let numbers: Vec<u8> = (0..100_000_u32)
        .flat_map(|i| (1.0 + f64::from(i % 977) * 1e-6).to_le_bytes())
        .collect();
    let mixed = [&text[..], &vec![0; 2 * CHUNK_BYTES], &random].concat();
    vec![
        ("pages", random),
        ("mixed", mixed),
        ("numbers", numbers),
        ("zeros", vec![0; 3 * CHUNK_BYTES + 1]),
        ("empty", Vec::new()),
    ]
}

fn write(store: &Store) -> Manifest {
    let lock = store.lock().unwrap();
    let streams = streams();
    let named: Vec<(&str, &[u8])> = streams.iter().map(|(name, b)| (*name, &b[..])).collect();
    write_image(store, &lock, &named)
}

fn assert_same(store: &Store, image: ImageId) {
    store.verify(image, &never).unwrap();
    for (name, bytes) in streams() {
        assert!(read_stream(store, image, name) == bytes, "{name}");
    }
}

#[test]
fn export_and_import_keep_bytes_meta_data_and_time() {
    let (_folder, store) = temporary_store();
    let (_other_folder, other) = temporary_store();
    let source = write(&store);
    let file = export(&store, source.id, Form::AsStored);
    assert!(
        file.len() as u64 <= source.stored_bytes + (16 << 10),
        "each chunk once, as stored"
    );
    let copy = import(&other, &file[..], None).unwrap();
    assert_eq!((copy.id.number(), &copy.meta[..]), (1, &b"meta"[..]));
    assert_eq!(copy.created_unix_ms, source.created_unix_ms);
    assert_eq!(copy.stored_bytes, source.stored_bytes, "nothing twice");
    assert_same(&other, copy.id);
    let again = import(&other, Drip(&file), None).unwrap();
    assert_eq!(
        (again.id.number(), again.stored_bytes),
        (2, 0),
        "all of it is there"
    );
    assert_same(&other, again.id);
}

#[test]
fn encrypted_images_stay_encrypted_in_an_export() {
    let (_folder, store) = encrypted_store(&key(1));
    let source = write(&store);
    let file = export(&store, source.id, Form::AsStored);
    let shows = |file: &[u8]| {
        let shown = |word: &[u8]| file.windows(word.len()).any(|bytes| bytes == word);
        shown(b"all work") || shown(b"meta") || shown(b"numbers")
    };
    assert!(!shows(&file));
    let (_other_folder, other) = encrypted_store(&key(1));
    assert!(matches!(
        import(&other, &file[..], None),
        Err(ImportError::KeyMissing)
    ));
    let wrong = import(&other, &file[..], Some(&key(2)));
    assert!(matches!(wrong, Err(ImportError::KeyWrong)));
    assert!(image_files(&other).is_empty() && packs(&other).is_empty());
    assert_same(&other, import(&other, &file[..], Some(&key(1))).unwrap().id);
    // The key of the file opens it, regardless of the store's own key.
    let (_third_folder, third) = encrypted_store(&key(3));
    assert_same(&third, import(&third, &file[..], Some(&key(1))).unwrap().id);
    assert_ne!(
        export(&store, source.id, Form::AsStored),
        file,
        "no nonce or salt twice"
    );
}

#[test]
fn a_plain_file_is_sealed_by_a_store_with_a_key() {
    let (_folder, store) = encrypted_store(&key(1));
    let source = write(&store);
    let file = export(&store, source.id, Form::Plain);
    let (_plain_folder, plain) = temporary_store();
    assert_same(&plain, import(&plain, &file[..], None).unwrap().id);
    let (_other_folder, other) = encrypted_store(&key(2));
    let copy = import(&other, &file[..], Some(&key(2))).unwrap();
    assert!(copy.encrypted);
    assert_same(&other, copy.id);
    let repeated = export(&plain, ImageId::FIRST, Form::Plain);
    assert_eq!(repeated.len(), file.len());
}

/// A small image, so that each of its bytes can be tested.
fn small(store: &Store) -> ImageId {
    let lock = store.lock().unwrap();
    let text = "so that zstd has something to do. "
        .repeat(200)
        .into_bytes();
    let zeros = vec![0; 8192];
    let twice = b"twice".as_slice();
    let streams = [("a", &text[..]), ("b", twice), ("c", twice), ("z", &zeros)];
    write_image(store, &lock, &streams).id
}

/// Asserts that no part of `file` becomes an image.
fn assert_refused(store: &Store, file: &[u8], key: Option<&Key>, what: &str) -> ImportError {
    let error = import(store, file, key).expect_err(what);
    assert!(image_files(store).is_empty(), "{what}");
    assert!(packs(store).is_empty(), "{what}");
    error
}

fn every_damage_is_found(store: &Store, other: &Store, key: Option<&Key>) {
    let file = export(store, small(store), Form::AsStored);
    // Most bytes of headers and paddings are zeros; one of sixteen is enough.
    let places = || (0..file.len()).filter(|at| file[*at] != 0 || at % 16 == at / 512 % 16);
    for len in places() {
        let error = assert_refused(other, &file[..len], key, &format!("{len} bytes"));
        let is_short = matches!(
            error,
            ImportError::NotOurs
                | ImportError::Damaged {
                    damage: FileDamage::Short,
                    ..
                }
        );
        assert!(is_short, "{len} bytes: {error}");
    }
    for at in places() {
        let bit = at % 8;
        let mut bad = file.clone();
        bad[at] ^= 1 << bit;
        assert_refused(other, &bad, key, &format!("bit {bit} of byte {at}"));
    }
    for more in [&b"\0"[..], &file] {
        let longer = [&file[..], more].concat();
        let error = assert_refused(other, &longer, key, "more");
        let is_long = matches!(
            error,
            ImportError::Damaged {
                damage: FileDamage::Long,
                ..
            }
        );
        assert!(is_long, "{error}");
    }
    import(other, &file[..], key).unwrap();
}

#[test]
fn every_truncation_and_every_flip_is_found() {
    let (_folder, store) = temporary_store();
    let (_other_folder, other) = temporary_store();
    every_damage_is_found(&store, &other, None);
}

#[test]
fn every_truncation_and_every_flip_of_a_sealed_file_is_found() {
    let key = key(1);
    let (_folder, store) = encrypted_store(&key);
    let (_other_folder, other) = encrypted_store(&key);
    every_damage_is_found(&store, &other, Some(&key));
}

#[test]
fn an_extracted_file_is_a_store() {
    for secret in [None, Some(key(1))] {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("store");
        let store = Store::create_or_open_with(&path, secret.as_ref()).unwrap();
        write(&store);
        write(&store);
        let file = export(&store, ImageId::FIRST.next().unwrap(), Form::AsStored);
        let extracted = folder.path().join("extracted");
        tar::Archive::new(&file[..]).unpack(&extracted).unwrap();
        fs::set_permissions(&extracted, PermissionsExt::from_mode(0o700)).unwrap();
        let store = Store::open_with(&extracted, secret.as_ref()).unwrap();
        assert_same(&store, ImageId::FIRST);
    }
}

#[test]
fn a_damaged_image_is_not_exported() {
    let (_folder, store) = temporary_store();
    let source = write(&store);
    let (pack, at) = place_of(&source, "mixed");
    flip(&store, pack, at);
    let export = || store.export_image(source.id, Form::AsStored, &[], &mut Vec::new(), &never);
    let error = export().unwrap_err();
    assert!(
        matches!(error, ExportError::Read(ReadError::Corrupt { .. })),
        "{error}"
    );
    let lock = store.lock().unwrap();
    store
        .set_aside(&lock, source.id, "its hash is wrong")
        .unwrap();
    let error = export().unwrap_err();
    assert!(matches!(error, ExportError::SetAside { .. }), "{error}");
}

#[test]
fn image_removed_meanwhile_is_reported() {
    let (_folder, store) = temporary_store();
    let missing = store.export_image(ImageId::FIRST, Form::AsStored, &[], &mut Vec::new(), &never);
    assert!(
        matches!(missing, Err(ExportError::Read(ReadError::Missing { .. }))),
        "{missing:?}"
    );
}

/// A sink that accepts this many bytes and is full then.
struct Full(usize);

impl Write for Full {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.0 == 0 {
            return Err(io::ErrorKind::StorageFull.into());
        }
        let len = bytes.len().min(self.0);
        self.0 -= len;
        Ok(len)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[test]
fn a_sink_that_fails_ends_the_export() {
    let (_folder, store) = temporary_store();
    let id = small(&store);
    let len = export(&store, id, Form::AsStored).len();
    for room in [0, 50, 88, 100, len - 1] {
        let failed = store.export_image(id, Form::AsStored, &[], &mut Full(room), &never);
        assert!(matches!(failed, Err(ExportError::Write(_))), "{room}");
    }
    assert!(
        store
            .export_image(id, Form::AsStored, &[], &mut Full(len), &never)
            .is_ok()
    );
}

#[test]
fn images_that_are_there_survive_an_import_that_fails() {
    let (_folder, store) = temporary_store();
    let source = write(&store);
    let file = export(&store, source.id, Form::AsStored);
    let before = names(&store.path().join("packs"));
    import(&store, &file[..file.len() - 1], None).unwrap_err();
    assert_eq!(names(&store.path().join("packs")), before);
    assert_same(&store, source.id);
}

#[test]
fn a_file_is_made_whole_or_not_at_all_and_never_over_another() {
    let (folder, store) = temporary_store();
    let id = small(&store);
    let here = folder.path().join("image");
    let exported = store
        .export_to_file(id, Form::AsStored, &[], &here, &never)
        .unwrap();
    let bytes = fs::read(&here).unwrap();
    assert_eq!(bytes.len() as u64, exported.file_bytes);
    assert_eq!(
        fs::metadata(&here).unwrap().permissions().mode() & 0o777,
        0o600
    );
    let over = store.export_to_file(id, Form::AsStored, &[], &here, &never);
    assert!(matches!(over, Err(ExportError::Durable(_))), "{over:?}");
    assert!(fs::read(&here).unwrap() == bytes, "as it was");
    let nowhere = store.export_to_file(
        ImageId::FIRST.next().unwrap(),
        Form::AsStored,
        &[],
        &folder.path().join("no"),
        &never,
    );
    assert!(nowhere.is_err());
    assert_eq!(names(folder.path()), ["image", "store"]);
    let (_other_folder, other) = temporary_store();
    import(&other, fs::File::open(&here).unwrap(), None).unwrap();
}

#[test]
fn companions_become_streams_and_none_goes_twice() {
    for secret in [None, Some(key(1))] {
        let folder = tempfile::tempdir().unwrap();
        let create = |name: &str| {
            Store::create_or_open_with(&folder.path().join(name), secret.as_ref()).unwrap()
        };
        let (store, other) = (create("store"), create("other"));
        let path = folder.path().join("part");
        let content = [noise(9, CHUNK_BYTES + 7), vec![0; CHUNK_BYTES]].concat();
        fs::write(&path, &content).unwrap();
        let stream = "program/part".to_owned();
        let opened = None;
        let companions = [Companion {
            stream,
            path,
            opened,
        }];
        let export = |store: &Store, id| {
            let mut file = Vec::new();
            let form = Form::AsStored;
            store
                .export_image(id, form, &companions, &mut file, &never)
                .unwrap();
            file
        };
        let source = small(&store);
        let file = export(&store, source);
        let image = import(&other, &file[..], secret.as_ref()).unwrap();
        other.verify(image.id, &never).unwrap();
        assert!(read_stream(&other, image.id, "program/part") == content);
        let again = import(&other, &export(&other, image.id)[..], secret.as_ref()).unwrap();
        assert_eq!(
            (again.streams.len(), again.stored_bytes),
            (image.streams.len(), 0)
        );
        fs::remove_file(&companions[0].path).unwrap();
        let missing =
            store.export_image(source, Form::AsStored, &companions, &mut Vec::new(), &never);
        assert!(
            matches!(missing, Err(ExportError::Companion(_))),
            "{missing:?}"
        );
    }
}
