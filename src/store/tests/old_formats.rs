//! Stores written by earlier versions, kept in `tests/fixtures`: each must stay readable.
//!
//! A version that changes the format adds a folder with `cargo test --lib write_fixture -- --ignored` before the
//! change, and never changes the older ones.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use super::support::{never, read_stream, write_image};
use crate::store::format::FORMAT;
use crate::store::format::codec::tests::noise;
use crate::store::*;

/// Fixtures: the folder's name, and true if its store is encrypted.
const STORES: [(&str, bool); 3] = [("1", false), ("2", false), ("2-encrypted", true)];

/// Returns the key of the encrypted stores. It protects nothing.
fn key(encrypted: bool) -> Option<Key> {
    encrypted.then(|| Key::from_bytes(&[7; 32]))
}

pub(crate) fn folder(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("tests/fixtures/store-{name}"))
}

/// Returns the contents of the images 1 to 3: every codec, zeros, chunks that images share.
fn contents() -> [Vec<(&'static str, Vec<u8>)>; 3] {
    let words: Vec<u8> = b"epoch 1 loss 0.25, ".repeat(20_000);
    let floats: Vec<u8> = (0..16_384_u32)
        .flat_map(|n| {
            (f32::from_bits(n.wrapping_mul(2_654_435_761)).to_bits() >> 2 | 0x3c00_0000)
                .to_le_bytes()
        })
        .collect();
    let first = [noise(1, 100_000), vec![0; 2 * CHUNK_BYTES], words, floats].concat();
    let mut second = first.clone();
    second[5] ^= 1;
    [
        vec![("pages-1.img", first), ("core-1.img", b"core".to_vec())],
        vec![("pages-1.img", second.clone()), ("empty", Vec::new())],
        vec![("pages-1.img", second)],
    ]
}

pub(crate) fn copy(from: &Path, to: &Path) {
    fs::create_dir(to).unwrap();
    fs::set_permissions(to, fs::Permissions::from_mode(0o700)).unwrap();
    for entry in fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let to = to.join(entry.file_name());
        if entry.file_type().unwrap().is_dir() {
            copy(&entry.path(), &to);
        } else {
            fs::copy(entry.path(), to).unwrap();
        }
    }
}

#[test]
fn stores_of_every_format_are_read_and_go_on() {
    for (format, encrypted) in STORES {
        let temporary = tempfile::tempdir().unwrap();
        let path = temporary.path().join("store");
        copy(&folder(format), &path);
        let store = Store::open_with(&path, key(encrypted).as_ref()).unwrap();
        let images = store.images().unwrap();
        let numbers: Vec<u64> = images.iter().map(|image| image.id.number()).collect();
        assert_eq!(numbers, [1, 2, 3], "format {format}");
        assert_eq!(images[2].damaged.as_deref(), Some("a reason"));
        for (image, streams) in images.iter().zip(contents()) {
            assert_eq!(
                (&image.meta[..], image.created_unix_ms > 0),
                (&b"meta"[..], true)
            );
            store.verify(image.id, &never).unwrap();
            for (name, bytes) in streams {
                assert!(
                    read_stream(&store, image.id, name) == bytes,
                    "{format} {name}"
                );
            }
        }
        let lock = store.lock().unwrap();
        let [_, streams, _] = contents();
        let named: Vec<(&str, &[u8])> = streams.iter().map(|(n, b)| (*n, &b[..])).collect();
        let next = write_image(&store, &lock, &named);
        assert_eq!(next.id.number(), 4);
        store.rotate(&lock, 1).unwrap();
        store.verify(next.id, &never).unwrap();
    }
}

#[test]
#[ignore = "writes into the source tree, once a format"]
fn write_fixture() {
    for (suffix, encrypted) in [("", false), ("-encrypted", true)] {
        let path = folder(&format!("{FORMAT}{suffix}"));
        let store = Store::create_or_open_with(&path, key(encrypted).as_ref()).unwrap();
        let lock = store.lock().unwrap();
        for streams in contents() {
            let named: Vec<(&str, &[u8])> = streams.iter().map(|(n, b)| (*n, &b[..])).collect();
            write_image(&store, &lock, &named);
        }
        store
            .set_aside(&lock, ImageId::new(3).unwrap(), "a reason")
            .unwrap();
        fs::remove_file(path.join("lock")).unwrap();
    }
}
