//! Tests of files with right checksums that no export wrote.

use xxhash_rust::xxh3::xxh3_64;

use super::super::frame::{FrameWriter, Kind};
use super::super::{FORMAT, FileDamage, HEADER_LEN, ImportError, MAGIC};
use super::{assert_refused, import};
use crate::store::format::store_folder::Store;
use crate::store::tests::support::temporary_store;

/// Builds a file of these frames with correct checksums.
fn forged(frames: &[(Kind, &[u8])]) -> Vec<u8> {
    let mut file = vec![0; HEADER_LEN];
    file[..8].copy_from_slice(&MAGIC);
    file[8..12].copy_from_slice(&FORMAT.to_le_bytes());
    let check = xxh3_64(&file[..80]).to_le_bytes();
    file[80..].copy_from_slice(&check);
    let check = xxh3_64(&file);
    let mut writer = FrameWriter::new(&mut file, check, HEADER_LEN, None);
    for (kind, payload) in frames {
        writer.write(*kind, &[payload]).unwrap();
    }
    file
}

fn image(raw_bytes: u64) -> Vec<u8> {
    [&7_u64.to_le_bytes()[..], &raw_bytes.to_le_bytes(), b"meta"].concat()
}

fn len(bytes: u64) -> [u8; 8] {
    bytes.to_le_bytes()
}

fn word(number: u32) -> [u8; 4] {
    number.to_le_bytes()
}

fn chunk(raw: u32, codec: u8, name: [u8; 32], bytes: &[u8]) -> Vec<u8> {
    [&raw.to_le_bytes()[..], &[codec], &name, bytes].concat()
}

const STREAM: (Kind, &[u8]) = (Kind::Stream, b"a");

fn refused(store: &Store, frames: &[(Kind, &[u8])], what: &str) {
    assert_refused(store, &forged(frames), None, what);
}

/// Builds a file of one stream with one part; its end frames give `total` bytes.
fn of_one_part(part: (Kind, &[u8]), total: u64) -> Vec<u8> {
    let (image, len) = (image(total), len(total));
    forged(&[
        (Kind::Image, &image),
        STREAM,
        part,
        (Kind::StreamEnd, &len),
        (Kind::End, &len),
    ])
}

#[test]
fn parts_where_they_cannot_be_are_refused() {
    let (_folder, store) = temporary_store();
    let (none, five, zero, one) = (image(0), image(5), len(0), len(1));
    let begin = (Kind::Image, &none[..]);
    let end = (Kind::End, &zero[..]);
    let stream_end = (Kind::StreamEnd, &zero[..]);
    refused(&store, &[], "no frame");
    refused(&store, &[end], "no image");
    refused(&store, &[begin], "no end");
    refused(&store, &[begin, begin, end], "two images");
    refused(&store, &[begin, stream_end, end], "no stream to end");
    refused(
        &store,
        &[begin, (Kind::Zeros, &word(1)), end],
        "zeros of no stream",
    );
    refused(&store, &[begin, (Kind::End, &one)], "another total");
    refused(
        &store,
        &[(Kind::Image, &five), end],
        "not what the image said",
    );
    refused(&store, &[begin, STREAM, end], "a stream without its end");
    refused(
        &store,
        &[begin, STREAM, STREAM, stream_end, end],
        "a stream in a stream",
    );
    let twice = [begin, STREAM, stream_end, STREAM, stream_end, end];
    refused(&store, &twice, "two streams of a name");
    for name in [&b"../x"[..], b"/a", b"\xff", b"a b"] {
        let frames = [begin, (Kind::Stream, name), stream_end, end];
        refused(&store, &frames, "an impossible name");
    }
    import(&store, &forged(&[begin, STREAM, stream_end, end])[..], None).unwrap();
}

#[test]
fn chunks_that_are_not_what_they_say_are_refused() {
    let name = *blake3::hash(b"bytes").as_bytes();
    let right = chunk(5, 1, name, b"bytes");
    let (_folder, store) = temporary_store();
    import(&store, &of_one_part((Kind::Chunk, &right), 5)[..], None).unwrap();

    let (_folder, store) = temporary_store();
    let refused = |part: (Kind, &[u8]), total: u64, what: &str| {
        assert_refused(&store, &of_one_part(part, total), None, what);
    };
    refused((Kind::Repeat, &word(0)), 5, "a repeat of nothing");
    refused((Kind::Repeat, &word(u32::MAX)), 5, "a repeat of nothing");
    refused((Kind::Zeros, &word(0)), 0, "no zeros");
    refused(
        (Kind::Zeros, &word(u32::MAX)),
        u32::MAX.into(),
        "too many zeros",
    );
    refused((Kind::Chunk, &right), 4, "a stream of another length");
    for (raw, codec, name, bytes) in [
        (5, 0, name, &b"bytes"[..]),
        (5, 9, name, b"bytes"),
        (4, 1, name, b"bytes"),
        (6, 1, name, b"bytes"),
        (5, 2, name, b"bytes"),
        (6, 2, name, b"bytes"),
        (9, 3, name, b"bytes"),
        (5, 1, [0; 32], b"bytes"),
        (u32::MAX, 2, name, b"bytes"),
        (0, 1, name, b"bytes"),
    ] {
        let part = chunk(raw, codec, name, bytes);
        refused((Kind::Chunk, &part), raw.into(), &format!("{raw} {codec}"));
    }
}

#[test]
fn lengths_that_a_part_cannot_have_are_refused_before_there_is_memory_for_them() {
    let (_folder, store) = temporary_store();
    for kind in 0..=255 {
        let mut file = forged(&[(Kind::Image, &[0; 20])]);
        let at = HEADER_LEN;
        file[at] = kind;
        file[at + 4..at + 8].copy_from_slice(&u32::MAX.to_le_bytes());
        let error = assert_refused(&store, &file, None, &format!("kind {kind}"));
        let is_senseless = matches!(
            error,
            ImportError::Damaged {
                damage: FileDamage::Senseless(_),
                ..
            }
        );
        assert!(is_senseless, "{kind}: {error}");
    }
}

#[test]
fn other_files_and_newer_ones_are_called_what_they_are() {
    let (_folder, store) = temporary_store();
    for other in [&b""[..], b"C", b"\x7fELF", &[0; 500], b"CKPTPACK and more"] {
        let error = assert_refused(&store, other, None, "another file");
        assert!(
            matches!(error, ImportError::NotOurs | ImportError::Damaged { .. }),
            "{error}"
        );
    }
    let mut newer = forged(&[]);
    newer[8] = 2;
    let error = assert_refused(&store, &newer, None, "a newer file");
    assert!(matches!(error, ImportError::Newer { format: 2 }), "{error}");
}
