//! Tests of a manifest's form on disk.

use super::super::codec::Codec;
use super::super::manifest::tests::example;
use super::super::manifest::{Chunk, Content, Stored};
use super::super::pack::PackName;
use super::*;

fn read(bytes: &[u8]) -> Result<Manifest, ManifestError> {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("manifest");
    std::fs::write(&path, bytes).unwrap();
    read_manifest(&path, example().id, None)
}

/// Changes the header of the example's file and corrects the checksums.
fn reseal(change: impl FnOnce(&mut Vec<u8>)) -> Vec<u8> {
    let mut bytes = encode(&example(), None).unwrap();
    let summary_at = CHECKED_LEN + 2 * SUM_LEN;
    let body_at = summary_at + bytes[24] as usize;
    change(&mut bytes);
    let (head, rest) = bytes.split_at_mut(CHECKED_LEN);
    let (sums, sections) = rest.split_at_mut(2 * SUM_LEN);
    let (summary, body) = sections.split_at(body_at - summary_at);
    sums[..SUM_LEN].copy_from_slice(&checksum(head, &[summary]));
    sums[SUM_LEN..].copy_from_slice(&checksum(head, &[body]));
    bytes
}

/// Writes a manifest whose header declares a body of `body_len` bytes that does not exist.
pub(in crate::store) fn write_without_body(path: &Path, manifest: &Manifest, body_len: u64) {
    let summary = summary_message(manifest).encode_to_vec();
    let header = Header {
        format: manifest.format,
        needs: manifest.format,
        image: manifest.id.number(),
        summary_len: u32::try_from(summary.len()).unwrap(),
        sealing: NOT_SEALED,
        body_len,
        raw_body_len: body_len,
    };
    let head = header.to_bytes();
    let sums = [checksum(&head, &[&summary]), [0; SUM_LEN]].concat();
    std::fs::write(path, [&head[..], &sums, &summary].concat()).unwrap();
    let file = File::options().write(true).open(path).unwrap();
    file.set_len(header.file_len()).unwrap();
}

#[test]
fn manifest_round_trips() {
    let bytes = encode(&example(), None).unwrap();
    assert_eq!(read(&bytes).unwrap(), example());
}

#[test]
fn every_flipped_bit_and_every_missing_byte_is_noticed() {
    let bytes = encode(&example(), None).unwrap();
    for bit in 0..bytes.len() * 8 {
        let mut damaged = bytes.clone();
        damaged[bit / 8] ^= 1 << (bit % 8);
        assert!(read(&damaged).is_err(), "bit {bit}");
    }
    for len in 0..bytes.len() {
        assert!(read(&bytes[..len]).is_err(), "{len} bytes");
    }
}

#[test]
fn compatible_newer_manifest_is_read() {
    let readable = reseal(|bytes| bytes[8] = 9);
    assert_eq!(read(&readable).unwrap().format, 9);
    let unreadable = reseal(|bytes| bytes[12] = 9);
    let error = read(&unreadable).unwrap_err();
    assert!(
        matches!(error, ManifestError::Newer { format: 9 }),
        "{error}"
    );
}

#[test]
fn a_manifest_under_another_name_is_refused() {
    let renamed = reseal(|bytes| bytes[16] = 13);
    assert!(matches!(read(&renamed), Err(ManifestError::Damaged(_))));
}

#[test]
fn impossible_lengths_are_refused_before_anything_is_allocated() {
    for at in [27, 39, 47] {
        let bytes = reseal(|bytes| bytes[at] = 0x7f);
        let error = read(&bytes).unwrap_err().to_string();
        assert!(error.contains("impossible"), "{at}: {error}");
    }
}

#[test]
fn manifest_of_400_000_chunks_takes_less_than_24_mib() {
    let count = 400_000_u32;
    let mut manifest = example();
    let len = 200_000;
    let chunk = |index: u32| {
        let stored = Stored {
            hash: *blake3::hash(&index.to_le_bytes()).as_bytes(),
            pack: index % 100,
            offset: 24 + u64::from(index / 100) * u64::from(len),
            len,
            codec: Codec::Zstd,
            check: Some(u64::from(index) << 32),
        };
        Chunk {
            raw_len: 256 * 1024,
            content: Content::Stored(stored),
        }
    };
    let pack = |number| Pack {
        name: PackName {
            image: manifest.id,
            number,
        },
        len: 1 << 30,
    };
    manifest.packs = (0..100).map(pack).collect();
    manifest.chunks = (0..count).map(chunk).collect();
    manifest.raw_bytes = u64::from(count) * 256 * 1024;
    manifest.streams[0].raw_len = manifest.raw_bytes;
    manifest.streams[0].chunks = (0..count).collect();
    let bytes = encode(&manifest, None).unwrap();
    assert!(bytes.len() < 24 << 20, "{}", bytes.len());
    assert_eq!(read(&bytes).unwrap(), manifest);
}
