use proptest::prelude::*;

use super::byte_planes::{Plan, Width};
use super::*;

/// Generates bytes that do not compress, determined by the seed.
pub(crate) fn noise(seed: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    let mut hasher = blake3::Hasher::new();
    hasher.update(&seed.to_le_bytes());
    hasher.finalize_xof().fill(&mut bytes);
    bytes
}

pub(super) fn text(len: usize) -> Vec<u8> {
    (0_u32..)
        .flat_map(|line| format!("line {line} of what repeats itself.\n").into_bytes())
        .take(len)
        .collect()
}

/// Generates numbers distributed like the weights of a model: the sum of twelve uniform ones is nearly normal.
fn normal(seed: u64, count: usize) -> impl Iterator<Item = f64> {
    let noise = noise(seed, count * 48);
    (0..count).map(move |at| {
        let parts = noise[at * 48..][..48].as_chunks::<4>().0;
        let sum: f64 = parts
            .iter()
            .map(|part| f64::from(u32::from_le_bytes(*part)) / 4_294_967_296.0)
            .sum();
        (sum - 6.0) * 0.02
    })
}

#[expect(clippy::cast_possible_truncation, reason = "that is the type")]
pub(super) fn float32(len: usize) -> Vec<u8> {
    normal(3, len / 4)
        .flat_map(|x| (x as f32).to_le_bytes())
        .collect()
}

pub(super) fn bfloat16(len: usize) -> Vec<u8> {
    let wide = float32(len * 2);
    let (wide, _) = wide.as_chunks::<4>();
    wide.iter().flat_map(|x| [x[2], x[3]]).collect()
}

pub(super) fn float64(len: usize) -> Vec<u8> {
    normal(3, len / 8).flat_map(f64::to_le_bytes).collect()
}

/// Encodes, decodes and compares; returns the encoding and the stored length.
fn stored(raw: &[u8]) -> (Codec, usize) {
    let mut encoder = Encoder::new(1).unwrap();
    let (codec, stored) = encoder.encode(raw).unwrap();
    let mut back = vec![1; raw.len()];
    Decoder::new()
        .unwrap()
        .decode(codec, stored, &mut back)
        .unwrap();
    assert!(back == raw, "{codec:?} gives other bytes back");
    (codec, stored.len())
}

/// Numbers of four bytes below 256: their zeros are matches for zstd.
fn small_numbers(len: usize) -> Vec<u8> {
    let numbers = noise(3, len / 4).into_iter().map(u32::from);
    numbers.flat_map(u32::to_le_bytes).collect()
}

#[test]
fn each_kind_of_bytes_gets_the_form_that_suits_it() {
    for len in [16 * 1024, 100 * 1024, CHUNK_BYTES] {
        assert_eq!(stored(&noise(1, len)), (Codec::Raw, len));
        for (raw, codec, percent) in [
            (text(len), Codec::Zstd, 25),
            (float32(len), Codec::Planes, 86),
            (bfloat16(len), Codec::Planes, 70),
            (float64(len), Codec::Planes, 90),
            (small_numbers(len), Codec::Planes, 27),
            (float32(4096).repeat(len / 4096), Codec::Zstd, 27),
        ] {
            let (chosen, stored) = stored(&raw);
            assert_eq!(chosen, codec, "{percent} {len}");
            assert!(stored * 100 <= len * percent, "{codec:?} {stored} of {len}");
        }
    }
}

#[test]
fn repeated_noise_is_found_though_its_bytes_are_even() {
    let raw = noise(2, 4096).repeat(CHUNK_BYTES / 4096);
    let (codec, stored) = stored(&raw);
    assert_eq!(codec, Codec::Zstd);
    assert!(stored < 8192, "{stored}");
}

#[test]
fn data_shorter_than_a_frame_stay_raw() {
    for len in 0..16 {
        assert_eq!(stored(&noise(1, len)), (Codec::Raw, len));
        assert_eq!(stored(&vec![b'a'; len]), (Codec::Raw, len));
    }
}

#[test]
fn truncated_numbers_round_trip() {
    for less in 0..16 {
        let raw = float32(CHUNK_BYTES);
        assert_eq!(stored(&raw[..CHUNK_BYTES - less]).0, Codec::Planes);
        assert_eq!(stored(&raw[less..]).0, Codec::Planes, "{less}");
    }
}

#[test]
fn a_level_without_literals_still_packs_planes_and_text() {
    let mut encoder = Encoder::new(-5).unwrap();
    let float32 = float32(CHUNK_BYTES);
    assert_eq!(encoder.encode(&float32).unwrap().0, Codec::Planes);
    let text = text(CHUNK_BYTES);
    assert_eq!(encoder.encode(&text).unwrap().0, Codec::Zstd);
}

#[test]
fn more_than_a_chunk_is_refused() {
    let raw = vec![0; CHUNK_BYTES + 1];
    let refused = Encoder::new(1).unwrap().encode(&raw).map(|_| ());
    assert_eq!(refused.unwrap_err().kind(), io::ErrorKind::InvalidInput);
    let refused = Decoder::new()
        .unwrap()
        .decode(Codec::Raw, &raw, &mut raw.clone());
    assert_eq!(refused.unwrap_err().kind(), io::ErrorKind::InvalidInput);
}

#[test]
fn a_stored_form_of_another_length_is_an_error() {
    let len = 5000;
    for raw in [noise(1, len), text(len), float32(len), bfloat16(len)] {
        let mut encoder = Encoder::new(1).unwrap();
        let (codec, stored) = encoder.encode(&raw).unwrap();
        let mut decoder = Decoder::new().unwrap();
        for wrong in [0, 1, len / 2, len - 1, len + 1, 2 * len] {
            let result = decoder.decode(codec, stored, &mut vec![0; wrong]);
            assert!(result.is_err(), "{codec:?} {wrong}");
        }
        let mut back = vec![0; len];
        for wrong in 0..stored.len() {
            let result = decoder.decode(codec, &stored[..wrong], &mut back);
            assert!(result.is_err(), "{codec:?} cut to {wrong}");
        }
        let longer = [stored, &[0]].concat();
        assert!(decoder.decode(codec, &longer, &mut back).is_err());
    }
}

#[test]
fn the_lengths_that_fit_are_those_that_the_encoder_makes() {
    for raw in [noise(1, 9000), text(9000), float32(9000)] {
        let (codec, stored) = stored(&raw);
        let stored = u32::try_from(stored).unwrap();
        assert!(codec.fits(stored, 9000));
        assert_eq!(Codec::from_disk(codec as u8), Some(codec));
        assert!(!codec.fits(9001, 9000) && !codec.fits(0, 9000));
        assert_eq!(codec.fits(9000, 9000), codec == Codec::Raw);
    }
    assert_eq!(Codec::from_disk(0), None);
    assert_eq!(Codec::from_disk(4), None);
}

/// Strategy for bytes with the features that the codecs look for: matches, skewed bytes, numbers, noise.
fn bytes() -> impl Strategy<Value = Vec<u8>> {
    let piece = (0..6_u8, any::<u64>(), 0..40_000_usize).prop_map(|(kind, seed, len)| match kind {
        0 => noise(seed, len),
        1 => text(len),
        2 => float32(len),
        3 => bfloat16(len),
        4 => float64(len),
        _ => vec![7; len],
    });
    proptest::collection::vec(piece, 0..6).prop_map(|pieces| pieces.concat())
}

fn width() -> impl Strategy<Value = Width> {
    proptest::sample::select(&Width::ALL[..])
}

/// Returns the stored form, even if it does not save space.
fn packed(raw: &[u8], plan: Plan) -> Vec<u8> {
    let mut output = vec![0; zstd::zstd_safe::compress_bound(CHUNK_BYTES) + HEADERS_BYTES_MAX];
    let len = Packer::new().unwrap().pack(raw, plan, &mut output).unwrap();
    output.truncate(len);
    output
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn any_bytes_round_trip(raw in bytes()) {
        let (codec, len) = stored(&raw);
        prop_assert!(len <= raw.len());
        prop_assert!(codec == Codec::Raw || len < raw.len());
    }

    #[test]
    fn any_bytes_round_trip_in_any_planes(raw in bytes(), width in width(), coded: u8) {
        let packed = packed(&raw, Plan { width, coded });
        prop_assert!(packed.len() <= raw.len() + HEADERS_BYTES_MAX);
        let mut back = vec![1; raw.len()];
        Decoder::new().unwrap().decode(Codec::Planes, &packed, &mut back).unwrap();
        prop_assert!(back == raw);
    }

    #[test]
    fn damage_is_an_error_or_other_bytes(
        raw in bytes(),
        width in width(),
        damage in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..9),
    ) {
        let mut decoder = Decoder::new().unwrap();
        let mut back = vec![0; raw.len()];
        let zstd = zstd::bulk::compress(&raw, 1).unwrap();
        let planes = packed(&raw, Plan { width, coded: u8::MAX });
        for (codec, mut stored) in [(Codec::Zstd, zstd), (Codec::Planes, planes)] {
            for (at, byte) in &damage {
                // Half of the changes hit the headers.
                let at = at.index(if byte % 2 == 0 { stored.len() } else { stored.len().min(64) });
                stored[at] = *byte;
            }
            let _ = decoder.decode(codec, &stored, &mut back);
            let _ = decoder.decode(codec, &stored[..stored.len() / 2], &mut back);
        }
    }

    #[test]
    fn any_stored_bytes_are_an_error_or_bytes(stored: Vec<u8>, raw_len in 0..5000_usize) {
        let mut decoder = Decoder::new().unwrap();
        for codec in [Codec::Raw, Codec::Zstd, Codec::Planes] {
            let _ = decoder.decode(codec, &stored, &mut vec![0; raw_len]);
        }
        for width in Width::ALL {
            let stored = [&[width as u8], &stored[..]].concat();
            let _ = decoder.decode(Codec::Planes, &stored, &mut vec![0; raw_len]);
        }
    }
}
