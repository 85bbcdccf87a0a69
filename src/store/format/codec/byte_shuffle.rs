//! Conversion between numbers and planes of their bytes.
//!
//! The loops are written so that the compiler vectorizes them on every target. One pass separates even from odd bytes;
//! log2(width) passes leave the planes in order. This is three times faster than one pass over each number (x86-64 with
//! SSE2: 20 GB/s per pass). The content of the planes is irrelevant here.

use super::byte_planes::Width;

/// Number of numbers joined at a time: with all intermediate data, a third of a core's L1 cache.
const TILE: usize = 1024;

/// Fills `planes` with the first bytes of all numbers, then their second bytes, and so on. `spare` is scratch space.
/// All three slices have the same length, a multiple of the width.
pub(super) fn split(numbers: &[u8], width: Width, planes: &mut [u8], spare: &mut [u8]) {
    match width {
        Width::Two => unzip(numbers, planes),
        Width::Four => {
            unzip(numbers, spare);
            unzip(spare, planes);
        }
        Width::Eight => {
            unzip(numbers, planes);
            unzip(planes, spare);
            unzip(spare, planes);
        }
    }
}

/// Reverses [`split`]. There must be one plane for each byte of a number, each as long as the count of numbers.
///
/// The work is done in tiles, so that intermediate data stay in the fastest cache.
pub(super) fn join(planes: &[&[u8]], width: Width, numbers: &mut [u8]) {
    let mut pairs = [[0; 2 * TILE]; 4];
    let mut fours = [[0; 4 * TILE]; 2];
    let mut start = 0;
    for tile in numbers.chunks_mut(width.bytes() * TILE) {
        let len = tile.len() / width.bytes();
        let part = |place: usize| &planes[place][start..start + len];
        match width {
            Width::Two => zip(part(0), part(1), tile),
            Width::Four => {
                let [even, odd, ..] = pairs.each_mut().map(|pair| &mut pair[..2 * len]);
                zip(part(0), part(2), even);
                zip(part(1), part(3), odd);
                zip(even, odd, tile);
            }
            Width::Eight => {
                let pairs = pairs.each_mut().map(|pair| &mut pair[..2 * len]);
                let [even, odd] = fours.each_mut().map(|four| &mut four[..4 * len]);
                let [first, second, third, fourth] = pairs;
                zip(part(0), part(4), first);
                zip(part(1), part(5), second);
                zip(part(2), part(6), third);
                zip(part(3), part(7), fourth);
                zip(first, third, even);
                zip(second, fourth, odd);
                zip(even, odd, tile);
            }
        }
        start += len;
    }
}

/// Copies the even bytes to the first half and the odd bytes to the second.
#[expect(
    clippy::cast_possible_truncation,
    reason = "a narrowing cast compiles to one instruction"
)]
fn unzip(bytes: &[u8], halves: &mut [u8]) {
    let (pairs, _) = bytes.as_chunks::<2>();
    let (even, odd) = halves.split_at_mut(halves.len() / 2);
    for (byte, pair) in even.iter_mut().zip(pairs) {
        *byte = u16::from_le_bytes(*pair) as u8;
    }
    for (byte, pair) in odd.iter_mut().zip(pairs) {
        *byte = (u16::from_le_bytes(*pair) >> 8) as u8;
    }
}

/// Interleaves the bytes of both slices; each is half as long as `bytes`.
fn zip(even: &[u8], odd: &[u8], bytes: &mut [u8]) {
    let (pairs, _) = bytes.as_chunks_mut::<2>();
    for ((pair, even), odd) in pairs.iter_mut().zip(even).zip(odd) {
        *pair = [*even, *odd];
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn planes_hold_the_bytes_of_one_place_and_come_together_again() {
        for width in Width::ALL {
            let bytes = width.bytes();
            for count in [0, 1, 2, 15, 16, 17, 1000, 1024, 2049] {
                let numbers = crate::store::format::codec::tests::noise(7, count * bytes);
                let mut planes = vec![0; numbers.len()];
                let mut spare = planes.clone();
                split(&numbers, width, &mut planes, &mut spare);
                for (at, byte) in planes.iter().enumerate() {
                    let (plane, number) = (at / count, at % count);
                    assert_eq!(*byte, numbers[number * bytes + plane], "{width:?} {at}");
                }
                let mut joined = vec![0; numbers.len()];
                let planes: Vec<&[u8]> = (0..bytes)
                    .map(|place| &planes[place * count..][..count])
                    .collect();
                join(&planes, width, &mut joined);
                assert_eq!(joined, numbers, "{width:?} {count}");
            }
        }
    }
}
