//! Seams for fuzzing: portable files, and the checks on every accepted one.

use std::fs;

use tar::Header;

use super::super::format::manifest_file;
use super::super::format::store_folder::Store;
use super::archive::BLOCK;
use super::{Form, PortableReader};

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

/// Corrects the checksums of the manifest, if it lies where an export without a key writes it.
pub(in crate::store) fn reseal(file: &mut [u8]) {
    const HEADER: usize = 2 * BLOCK;
    let Some(header) = file.get(HEADER..HEADER + BLOCK) else {
        return;
    };
    let len = Header::from_byte_slice(header).entry_size().unwrap_or(0);
    let end = HEADER + BLOCK + usize::try_from(len).unwrap_or(0).min(file.len());
    if let Some(manifest) = file.get_mut(HEADER + BLOCK..end) {
        manifest_file::fuzz_manifest::reseal(manifest);
    }
}
