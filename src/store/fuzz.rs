//! The store's decoders for fuzzing: bytes of files in, and what must hold of whatever is accepted.

use std::fs;

use tempfile::TempDir;
use xxhash_rust::xxh3::xxh3_64;

use super::chunk::{self, CHUNK_BYTES, CHUNK_LEN_MAX};
use super::codec::{Codec, Decoder, Encoder};
use super::files::FileKind;
use super::layout::FORMAT;
use super::manifest::{Chunk, Content, Manifest, Stored, Stream};
use super::pack::{self, HEADER_BYTES, Pack, PackName};
use super::wire;
use super::{ImageEntry, ImageId, Store};

const PACK: PackName = PackName {
    image: ImageId::FIRST,
    number: 0,
};
const STREAM: &str = "pages-1.img";

thread_local! {
    static STORE: (TempDir, Store) = {
        let folder = tempfile::tempdir().unwrap();
        let store = Store::create_or_open(&folder.path().join("store")).unwrap();
        (folder, store)
    };
}

fn with_store<T>(action: impl FnOnce(&Store) -> T) -> T {
    STORE.with(|(_folder, store)| action(store))
}

/// A manifest's file as it is. Gives what a list of the store's images says of it, too.
pub(crate) fn manifest(file: &[u8]) -> (bool, Vec<ImageEntry>) {
    let id = wire::fuzz::image_of(file).unwrap_or(ImageId::FIRST);
    with_store(|store| {
        let path = store.manifest_file(id);
        fs::write(&path, file).unwrap();
        let entries = store.images().unwrap();
        let found = store.manifest(id);
        fs::remove_file(&path).unwrap();
        if let Ok(manifest) = &found {
            check(manifest);
        }
        (found.is_ok(), entries)
    })
}

/// A manifest's file whose checksum is made right first.
pub(crate) fn resealed_manifest(file: &[u8]) -> bool {
    let mut file = file.to_vec();
    wire::fuzz::reseal(&mut file);
    manifest(&file).0
}

/// The two messages of a manifest: the length of the first as `u16`, the first, the second.
pub(crate) fn manifest_messages(input: &[u8]) -> bool {
    let Some((len, rest)) = input.split_first_chunk() else {
        return false;
    };
    let len = usize::from(u16::from_le_bytes(*len));
    let (summary, body) = rest.split_at_checked(len).unwrap_or((rest, &[]));
    // The number that the fixtures' first image has: their pack tables fit.
    let file = wire::fuzz::seal(ImageId::FIRST, summary, body);
    manifest(&file).0
}

/// Readers index without asking once a manifest exists; and it is written as it was read.
fn check(manifest: &Manifest) {
    for stream in &manifest.streams {
        let lens = stream
            .chunks
            .iter()
            .map(|index| u64::from(manifest.chunks[*index as usize].raw_len));
        assert_eq!(lens.sum::<u64>(), stream.raw_len);
        if let Some(first) = stream.chunks.first() {
            assert!(manifest.first_use(*first).is_some());
        }
    }
    for chunk in &manifest.chunks {
        assert!((1..=CHUNK_LEN_MAX).contains(&chunk.raw_len));
        if let Content::Stored(stored) = chunk.content {
            let pack = manifest.packs[stored.pack as usize];
            assert!(stored.offset >= HEADER_BYTES);
            assert!(stored.offset + u64::from(stored.len) <= pack.len);
            assert!(stored.len as usize <= CHUNK_BYTES);
        }
    }
    if manifest.format == FORMAT {
        let again = wire::encode(manifest).unwrap();
        let path = with_store(|store| store.path().join("again"));
        fs::write(&path, again).unwrap();
        let again = wire::read_manifest(&path, manifest.id);
        assert_eq!(&again.unwrap(), manifest);
    }
}

/// A pack's file: its header, and any place in it.
pub(crate) fn pack_file(file: &[u8]) -> bool {
    let pack = Pack {
        name: PACK,
        len: file.len() as u64,
    };
    with_store(|store| {
        fs::write(store.pack_file(PACK), file).unwrap();
        let opened = pack::open(store, pack);
        assert!(opened.is_err() || file.len() as u64 >= HEADER_BYTES);
        opened.is_ok()
    })
}

/// A chunk in an image of its own: codec, raw length (3 bytes), stored bytes.
pub(crate) fn chunk(input: &[u8]) -> bool {
    let Some(([codec, len @ ..], stored)) = input.split_first_chunk::<4>() else {
        return false;
    };
    let raw_len = u32::from_le_bytes([len[0], len[1], len[2], 0]) % (CHUNK_LEN_MAX + 1);
    let Some(codec) = Codec::from_disk(*codec) else {
        return false;
    };
    let mut raw = vec![0; raw_len as usize];
    let decoded = decode(codec, stored, &mut raw);
    let manifest = image_of_one(codec, raw_len, &raw, stored);
    if manifest.validate().is_err() {
        return false;
    }
    let read = read_back(&manifest, stored);
    match read {
        Some(read) => assert!(decoded && read == raw),
        None => assert!(!decoded),
    }
    decoded
}

fn decode(codec: Codec, stored: &[u8], raw: &mut [u8]) -> bool {
    match codec {
        Codec::Raw if stored.len() != raw.len() => false,
        Codec::Raw => {
            raw.copy_from_slice(stored);
            true
        }
        Codec::Zstd => Decoder::new().unwrap().decompress(stored, raw).is_ok(),
    }
}

fn image_of_one(codec: Codec, raw_len: u32, raw: &[u8], stored: &[u8]) -> Manifest {
    let len = u32::try_from(stored.len()).unwrap_or(u32::MAX);
    let stored = Stored {
        // As in format 2, and as in format 1.
        check: raw_len.is_multiple_of(2).then(|| xxh3_64(stored)),
        hash: chunk::hash(raw),
        pack: 0,
        offset: HEADER_BYTES,
        len,
        codec,
    };
    Manifest {
        format: FORMAT,
        id: ImageId::FIRST,
        created_unix_ms: 0,
        streams: vec![Stream {
            name: STREAM.to_owned(),
            raw_len: u64::from(raw_len),
            chunks: vec![0],
        }],
        chunks: vec![Chunk {
            raw_len,
            content: Content::Stored(stored),
        }],
        packs: vec![Pack {
            name: PACK,
            len: HEADER_BYTES + u64::from(len),
        }],
        raw_bytes: u64::from(raw_len),
        stored_bytes: u64::from(len),
        meta: Vec::new(),
    }
}

/// What reading the image gives; `None` when it is refused.
fn read_back(manifest: &Manifest, stored: &[u8]) -> Option<Vec<u8>> {
    with_store(|store| {
        let mut file = PACK.header().to_vec();
        file.extend_from_slice(stored);
        fs::write(store.pack_file(PACK), file).unwrap();
        let path = store.manifest_file(manifest.id);
        fs::write(&path, wire::encode(manifest).unwrap()).unwrap();
        let reader = store.read(manifest.id).unwrap();
        fs::remove_file(&path).unwrap();
        reader.read_to_vec(STREAM, u64::from(CHUNK_LEN_MAX)).ok()
    })
}

/// A level, a length (3 bytes) and bytes that repeat up to it: what is encoded comes back.
pub(crate) fn round_trip(input: &[u8]) -> bool {
    let Some(([level, len @ ..], pattern)) = input.split_first_chunk::<4>() else {
        return false;
    };
    let len = u32::from_le_bytes([len[0], len[1], len[2], 0]) % (CHUNK_LEN_MAX + 1);
    let raw: Vec<u8> = pattern.iter().copied().cycle().take(len as usize).collect();
    if raw.is_empty() {
        return false;
    }
    // Levels above 3 take megabytes of memory each and run the same decoder.
    let mut encoder = Encoder::new(i32::from(level.cast_signed() % 4)).unwrap();
    let (codec, stored) = encoder.encode(&raw).unwrap();
    assert!(stored.len() <= raw.len());
    let mut again = vec![0; raw.len()];
    assert!(decode(codec, stored, &mut again) && again == raw);
    true
}

/// The name of a file in a store.
pub(crate) fn file_name(name: &str) -> bool {
    let again = match FileKind::of(name) {
        FileKind::Manifest(id) => format!("{id}.manifest"),
        FileKind::Damaged(id) => format!("{id}.damaged"),
        FileKind::Pack(pack) => pack.to_string(),
        FileKind::Temporary | FileKind::Foreign => return false,
    };
    assert_eq!(again, name);
    true
}

/// The file that says which format a store has.
pub(crate) fn format_file(text: &[u8]) -> bool {
    with_store(|store| {
        let path = store.path().join("format");
        let right = fs::read(&path).unwrap();
        fs::write(&path, text).unwrap();
        let opened = Store::open(store.path());
        fs::write(&path, right).unwrap();
        opened.is_ok()
    })
}

/// Why an image was set aside: what is shown has no control characters but line ends.
pub(crate) fn reason(text: &[u8]) -> bool {
    with_store(|store| {
        fs::write(store.damaged_file(ImageId::FIRST), text).unwrap();
        let reason = store.damage_mark(ImageId::FIRST);
        fs::remove_file(store.damaged_file(ImageId::FIRST)).unwrap();
        reason.is_some_and(|reason| {
            assert!(!reason.chars().any(|c| c.is_control() && c != '\n'));
            !reason.is_empty()
        })
    })
}

/// Seeds from a store's folder: the target's letter, a name, and the input behind the letter.
#[cfg(test)]
pub(crate) fn seeds(folder: &std::path::Path) -> Vec<(char, String, Vec<u8>)> {
    use super::columns::{body_message, summary_message};
    use prost::Message;
    /// Longer ones only make the fuzzer slower.
    const STORED_BYTES_MAX: u32 = 4096;

    let mut seeds = Vec::new();
    for (path, kind) in super::files::list(&folder.join("images")).unwrap() {
        let FileKind::Manifest(id) = kind else {
            continue;
        };
        let file = fs::read(&path).unwrap();
        let manifest = wire::read_manifest(&path, id).unwrap();
        seeds.push(('f', format!("valid-file-{id}"), file.clone()));
        seeds.push(('s', format!("valid-sealed-{id}"), file));
        if id == ImageId::FIRST {
            let summary = summary_message(&manifest).encode_to_vec();
            let body = body_message(&manifest).unwrap().encode_to_vec();
            let len = u16::try_from(summary.len()).unwrap().to_le_bytes();
            let messages = [&len[..], &summary, &body].concat();
            seeds.push(('m', format!("valid-messages-{id}"), messages));
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
