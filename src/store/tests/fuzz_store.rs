//! Seams for fuzzing: the store's decoders, and the checks on every accepted input.

use std::fs;

use tempfile::TempDir;
use xxhash_rust::xxh3::xxh3_64;

#[cfg(test)]
use crate::store::Form;
use crate::store::format::FORMAT;
use crate::store::format::chunk::{CHUNK_BYTES, CHUNK_LEN_MAX};
use crate::store::format::cipher::OVERHEAD_BYTES;
#[cfg(test)]
use crate::store::format::cipher::OVERHEAD_LEN;
use crate::store::format::codec::{Codec, Decoder, Encoder};
use crate::store::format::file_names::FileKind;
use crate::store::format::manifest::{Chunk, Content, Manifest, Stored, Stream};
use crate::store::format::manifest_file;
use crate::store::format::pack::{self, HEADER_BYTES, Pack, PackName};
use crate::store::format::store_key::{KEY_FILE, Key};
use crate::store::portable;
use crate::store::{ImageEntry, ImageId, OpenError, Store};

const PACK: PackName = PackName {
    image: ImageId::FIRST,
    number: 0,
};
const STREAM: &str = "pages-1.img";

/// Size of a chunk's length.
const LEN_BYTES: usize = 3;

/// Kind of a store: with or without a key.
#[derive(Clone, Copy)]
pub(crate) enum Kind {
    Plain,
    Encrypted,
}

thread_local! {
    static PLAIN: (TempDir, Store) = new_store(None);
    static PORTABLE: (TempDir, Store) = new_store(None);
    static ENCRYPTED: (TempDir, Store) = new_store(Some(&Key::from_bytes(&[7; 32])));
}

fn new_store(key: Option<&Key>) -> (TempDir, Store) {
    let folder = tempfile::tempdir().unwrap();
    let store = Store::create_or_open_with(&folder.path().join("store"), key).unwrap();
    (folder, store)
}

fn with_store<T>(kind: Kind, action: impl FnOnce(&Store) -> T) -> T {
    let store = match kind {
        Kind::Plain => &PLAIN,
        Kind::Encrypted => &ENCRYPTED,
    };
    store.with(|(_folder, store)| action(store))
}

/// Reads a manifest's file unchanged. Also returns the entries in the list of the store's images.
pub(crate) fn manifest(kind: Kind, file: &[u8]) -> (bool, Vec<ImageEntry>) {
    let id = manifest_file::fuzz_manifest::image_of(file).unwrap_or(ImageId::FIRST);
    with_store(kind, |store| {
        let path = store.manifest_file(id);
        fs::write(&path, file).unwrap();
        let entries = store.images().unwrap();
        let found = store.manifest(id);
        fs::remove_file(&path).unwrap();
        if let Ok(manifest) = &found {
            check(store, manifest);
        }
        (found.is_ok(), entries)
    })
}

/// Reads a manifest's file after correcting its checksums. Without the key, no input can produce a manifest that an
/// encrypted store accepts.
pub(crate) fn resealed_manifest(file: &[u8]) -> bool {
    let mut file = file.to_vec();
    manifest_file::fuzz_manifest::reseal(&mut file);
    assert!(!manifest(Kind::Encrypted, &file).0, "a forged manifest");
    manifest(Kind::Plain, &file).0
}

/// Reads the two messages of a manifest; the input is the length of the first as `u16`, the first, the second.
pub(crate) fn manifest_messages(kind: Kind, input: &[u8]) -> bool {
    let Some((len, rest)) = input.split_first_chunk() else {
        return false;
    };
    let len = usize::from(u16::from_le_bytes(*len));
    let (summary, body) = rest.split_at_checked(len).unwrap_or((rest, &[]));
    let seal = |store: &Store| {
        manifest_file::fuzz_manifest::seal(ImageId::FIRST, summary, body, store.secrets())
    };
    let file = with_store(kind, seal);
    manifest(kind, &file).0
}

/// Checks a manifest that was read: readers index without further checks, and it must be written as it was read.
fn check(store: &Store, manifest: &Manifest) {
    for stream in &manifest.streams {
        let lens = stream
            .chunks
            .iter()
            .map(|index| u64::from(manifest.chunks[*index as usize].raw_len));
        assert_eq!(lens.sum::<u64>(), stream.raw_len);
    }
    for chunk in &manifest.chunks {
        assert!((1..=CHUNK_LEN_MAX).contains(&chunk.raw_len));
        if let Content::Stored(stored) = chunk.content {
            let pack = manifest.packs[stored.pack as usize];
            assert!(stored.offset >= HEADER_BYTES);
            assert!(stored.offset + u64::from(stored.len) <= pack.len);
            assert!(stored.len as usize <= CHUNK_BYTES + OVERHEAD_BYTES);
        }
    }
    if manifest.format == FORMAT {
        let again = manifest_file::encode(manifest, store.secrets()).unwrap();
        let path = store.path().join("again");
        fs::write(&path, again).unwrap();
        let again = manifest_file::read_manifest(&path, manifest.id, store.secrets());
        assert_eq!(&again.unwrap(), manifest);
    }
}

/// Reads a pack's file: its header, and any place in it.
pub(crate) fn pack_file(file: &[u8]) -> bool {
    let pack = Pack {
        name: PACK,
        len: file.len() as u64,
    };
    with_store(Kind::Plain, |store| {
        fs::write(store.pack_file(PACK), file).unwrap();
        let problem = pack::inspect(store, pack);
        assert!(problem.is_some() || file.len() as u64 >= HEADER_BYTES);
        problem.is_none()
    })
}

/// Imports a portable file unchanged.
pub(crate) fn portable(file: &[u8]) -> bool {
    PORTABLE.with(|(_folder, store)| portable::fuzz_portable::import(store, file))
}

/// Imports a portable file as [`portable`] does, after correcting its checksums.
pub(crate) fn resealed_portable(file: &[u8]) -> bool {
    let mut file = file.to_vec();
    portable::fuzz_portable::reseal(&mut file);
    portable(&file)
}

/// Makes a portable file with every kind of chunk.
#[cfg(test)]
pub(crate) fn portable_seed() -> Vec<u8> {
    let (_folder, store) = new_store(None);
    let lock = store.lock().unwrap();
    let text = "so that zstd has something to do. "
        .repeat(200)
        .into_bytes();
    let streams = [
        ("a", &text[..]),
        ("b", b"twice"),
        ("c", b"twice"),
        ("z", &[0; 8192]),
    ];
    let image = super::support::write_image(&store, &lock, &streams);
    let mut file = Vec::new();
    let exported = store.export_image(image.id, Form::Plain, &[], &mut file, &|_, _| {});
    exported.unwrap();
    file
}

/// Reads a chunk in a separate image; the input is codec, raw length (3 bytes), stored bytes.
pub(crate) fn chunk(kind: Kind, input: &[u8]) -> bool {
    let Some((codec, rest)) = input.split_first() else {
        return false;
    };
    let (Some(codec), Some((raw_len, stored))) = (Codec::from_disk(*codec), length(rest)) else {
        return false;
    };
    let mut raw = vec![0; raw_len as usize];
    let decoded = Decoder::new().unwrap().decode(codec, stored, &mut raw);
    with_store(kind, |store| {
        let stored = match store.secrets() {
            Some(secrets) => {
                let mut sealed = vec![0; stored.len() + OVERHEAD_BYTES];
                let name = store.name_of(&raw);
                secrets.chunks.seal(&name, stored, &mut sealed).unwrap();
                sealed
            }
            None => stored.to_vec(),
        };
        let manifest = image_of_one(store, codec, &raw, &stored);
        if manifest.validate().is_err() {
            return false;
        }
        match read_back(store, &manifest, &stored) {
            Some(read) => assert!(decoded.is_ok() && read == raw),
            None => assert!(decoded.is_err()),
        }
        decoded.is_ok()
    })
}

/// Splits off a length, at most that of a chunk.
fn length(input: &[u8]) -> Option<(u32, &[u8])> {
    let ([one, two, three], rest) = input.split_first_chunk::<LEN_BYTES>()?;
    let len = u32::from_le_bytes([*one, *two, *three, 0]);
    Some((len % (CHUNK_LEN_MAX + 1), rest))
}

fn image_of_one(store: &Store, codec: Codec, raw: &[u8], stored: &[u8]) -> Manifest {
    let (raw_len, len) = (raw.len() as u64, stored.len() as u64);
    let chunk = Stored {
        hash: store.name_of(raw),
        check: Some(xxh3_64(stored)),
        pack: 0,
        offset: PACK.header().len() as u64,
        len: u32::try_from(len).unwrap(),
        codec,
    };
    Manifest {
        format: FORMAT,
        id: ImageId::FIRST,
        created_unix_ms: 0,
        streams: vec![Stream {
            name: STREAM.to_owned(),
            raw_len,
            chunks: vec![0],
        }],
        chunks: vec![Chunk {
            raw_len: u32::try_from(raw_len).unwrap(),
            content: Content::Stored(chunk),
        }],
        packs: vec![Pack {
            name: PACK,
            len: chunk.offset + len,
        }],
        raw_bytes: raw_len,
        encrypted: store.is_encrypted(),
        stored_bytes: len,
        meta: Vec::new(),
    }
}

/// Returns the result of reading the image; `None` if it is refused.
fn read_back(store: &Store, manifest: &Manifest, stored: &[u8]) -> Option<Vec<u8>> {
    let pack = [&PACK.header()[..], stored].concat();
    fs::write(store.pack_file(PACK), pack).unwrap();
    let path = store.manifest_file(manifest.id);
    fs::write(
        &path,
        manifest_file::encode(manifest, store.secrets()).unwrap(),
    )
    .unwrap();
    let reader = store.read(manifest.id).unwrap();
    fs::remove_file(&path).unwrap();
    reader.read_to_vec(STREAM, u64::from(CHUNK_LEN_MAX)).ok()
}

/// Encodes and decodes bytes, which must be unchanged; the input is a level, a length (3 bytes) and bytes that are
/// repeated up to that length.
pub(crate) fn round_trip(input: &[u8]) -> bool {
    let Some((level, rest)) = input.split_first() else {
        return false;
    };
    let Some((len, pattern)) = length(rest) else {
        return false;
    };
    let raw: Vec<u8> = pattern.iter().copied().cycle().take(len as usize).collect();
    if raw.is_empty() {
        return false;
    }
    // Levels above 3 take megabytes of memory each and use the same decoder.
    let mut encoder = Encoder::new(i32::from(level.cast_signed() % 4)).unwrap();
    let (codec, stored) = encoder.encode(&raw).unwrap();
    assert!(codec.fits(u32::try_from(stored.len()).unwrap(), len));
    let mut again = vec![0; raw.len()];
    Decoder::new()
        .unwrap()
        .decode(codec, stored, &mut again)
        .unwrap();
    assert_eq!(again, raw);
    true
}

/// Parses the name of a file in a store.
pub(crate) fn file_name(name: &str) -> bool {
    let again = match FileKind::of(name) {
        FileKind::Manifest(id) => format!("{id}.manifest"),
        FileKind::Damaged(id) => format!("{id}.damaged"),
        FileKind::Pinned(id) => format!("{id}.pinned"),
        FileKind::Pack(pack) => pack.to_string(),
        FileKind::Temporary | FileKind::Foreign => return false,
    };
    assert_eq!(again, name);
    true
}

/// Reads the file with the format number of a store.
pub(crate) fn format_file(text: &[u8]) -> bool {
    instead_of(Kind::Plain, "format", text).is_ok()
}

/// Reads the file that identifies a store's key: only the right content is accepted.
pub(crate) fn key_check_file(text: &[u8]) -> bool {
    match instead_of(Kind::Encrypted, KEY_FILE, text) {
        Ok(_) => panic!("a forged key check"),
        Err(OpenError::KeyWrong { .. }) => true,
        Err(_) => false,
    }
}

/// Opens a store in which the file of this name is replaced.
fn instead_of(kind: Kind, name: &str, text: &[u8]) -> Result<Store, OpenError> {
    with_store(kind, |store| {
        let path = store.path().join(name);
        let right = fs::read(&path).unwrap();
        fs::write(&path, text).unwrap();
        let key = store.is_encrypted().then(|| Key::from_bytes(&[7; 32]));
        let opened = Store::open_with(store.path(), key.as_ref());
        fs::write(&path, right).unwrap();
        opened
    })
}

/// Parses the file of a key.
pub(crate) fn key(text: &[u8]) -> bool {
    let Ok(key) = Key::parse(text) else {
        return false;
    };
    let again = Key::parse(key.to_text().as_bytes()).unwrap();
    assert_eq!(again.to_text(), key.to_text());
    true
}

/// Reads the reason of a mark and the note of a pin: the shown text has no control characters except line ends.
pub(crate) fn reason(text: &[u8]) -> bool {
    with_store(Kind::Plain, |store| {
        let id = ImageId::FIRST;
        let marks = [store.damaged_file(id), store.pinned_file(id)];
        for path in &marks {
            fs::write(path, text).unwrap();
        }
        let shown = [store.damage_mark(id), store.pin_note(id)];
        for path in &marks {
            fs::remove_file(path).unwrap();
        }
        let is_plain = |text: &str| !text.chars().any(|c| c.is_control() && c != '\n');
        assert!(shown.iter().flatten().all(|text| is_plain(text)));
        shown.iter().all(Option::is_some)
    })
}

/// Makes seeds from a store's folder: the target's letter, a name, and the input for that target.
#[cfg(test)]
pub(crate) fn seeds(folder: &std::path::Path) -> Vec<(char, String, Vec<u8>)> {
    use crate::store::format::manifest_file::manifest_columns::{body_message, summary_message};
    use prost::Message;
    /// Maximum stored length of a seed: longer ones only make the fuzzer slower.
    const STORED_BYTES_MAX: u32 = 4096;

    let mut seeds = Vec::new();
    for (path, kind) in crate::store::format::file_names::list(&folder.join("images")).unwrap() {
        let FileKind::Manifest(id) = kind else {
            continue;
        };
        let file = fs::read(&path).unwrap();
        let manifest = manifest_file::read_manifest(&path, id, None).unwrap();
        seeds.push(('f', format!("valid-file-{id}"), file.clone()));
        seeds.push(('s', format!("valid-resealed-{id}"), file));
        if id == ImageId::FIRST {
            for (letter, overhead) in [('m', 0), ('k', OVERHEAD_LEN)] {
                let manifest = of_today(manifest.clone(), overhead);
                let summary = summary_message(&manifest).encode_to_vec();
                let body = body_message(&manifest).unwrap().encode_to_vec();
                let len = u16::try_from(summary.len()).unwrap().to_le_bytes();
                let messages = [&len[..], &summary, &body].concat();
                seeds.push((letter, format!("valid-messages-{letter}-{id}"), messages));
            }
        }
        for (number, chunk) in manifest.chunks.iter().enumerate() {
            let Content::Stored(stored) = chunk.content else {
                continue;
            };
            if stored.len <= STORED_BYTES_MAX {
                let name = manifest.packs[stored.pack as usize].name.to_string();
                let pack = fs::read(folder.join("packs").join(name)).unwrap();
                let start = usize::try_from(stored.offset).unwrap();
                let len = chunk.raw_len.to_le_bytes();
                let head = [stored.codec as u8, len[0], len[1], len[2]];
                let bytes = &pack[start..start + stored.len as usize];
                let input = [&head, bytes].concat();
                seeds.push(('c', format!("valid-chunk-{id}-{number}"), input));
            }
        }
    }
    seeds
}

/// Returns the manifest as this version would write it, with `overhead` more bytes per chunk.
#[cfg(test)]
fn of_today(mut manifest: Manifest, overhead: u32) -> Manifest {
    manifest.format = FORMAT;
    for chunk in &mut manifest.chunks {
        if let Content::Stored(stored) = &mut chunk.content {
            stored.check.get_or_insert(1);
            stored.len += overhead;
        }
    }
    for pack in &mut manifest.packs {
        pack.len += u64::from(overhead);
    }
    manifest
}
