//! Seams for fuzzing: portable files, and the checks on every accepted one.

use std::fs;

use xxhash_rust::xxh3::{Xxh3, xxh3_64};

use super::super::format::store_folder::Store;
use super::{Form, HEADER_LEN, PortableReader};

/// Imports a file. An accepted image must be whole, and its export must be valid again.
pub(in crate::store) fn import(store: &Store, file: &[u8]) -> bool {
    let Ok(reader) = PortableReader::open(file, None) else {
        return false;
    };
    let lock = store.lock().unwrap();
    let Ok(image) = reader.import_into(store, &lock, &|_, _| {}) else {
        return false;
    };
    store.verify(image.id, &|_, _| {}).unwrap();
    let mut again = Vec::new();
    let exported = store.export_image(image.id, Form::Plain, &[], &mut again, &|_, _| {});
    assert_eq!(exported.unwrap().raw_bytes, image.raw_bytes);
    assert!(PortableReader::open(&again[..], None).is_ok());
    fs::remove_file(store.manifest_file(image.id)).unwrap();
    for pack in image.packs {
        fs::remove_file(store.pack_file(pack.name)).unwrap();
    }
    true
}

/// Corrects the checksums, as far as the frames can be delimited.
pub(in crate::store) fn reseal(file: &mut [u8]) {
    if file.len() < HEADER_LEN {
        return;
    }
    let check = xxh3_64(&file[..80]).to_le_bytes();
    file[80..HEADER_LEN].copy_from_slice(&check);
    let mut check = xxh3_64(&file[..HEADER_LEN]);
    let mut rest = &mut file[HEADER_LEN..];
    while rest.len() >= 16 {
        let mut len = [0; 4];
        len.copy_from_slice(&rest[4..8]);
        let end = (16 + u32::from_le_bytes(len) as usize).min(rest.len());
        let mut hasher = Xxh3::with_seed(check);
        hasher.update(&rest[..8]);
        hasher.update(&rest[16..end]);
        check = hasher.digest();
        rest[8..16].copy_from_slice(&check.to_le_bytes());
        rest = &mut rest[end..];
    }
}
