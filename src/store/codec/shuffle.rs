//! Takes numbers apart into planes of their bytes, and puts them together again.
//!
//! Written so that the compiler makes vector instructions of it on every target: one
//! pass separates even from odd bytes, and as many passes as the width is a power of two
//! leave the planes in their order. Three times faster than one pass over each number
//! (x86-64 with SSE2: 20 GB/s a pass). Knows nothing of what is in the planes.

use super::planes::Width;

/// Fills `planes` with the first bytes of all numbers, then their second bytes, and so
/// on. `spare` ends up holding anything. All three are of one length, a multiple of the width.
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

/// The reverse of [`split`]; `planes` and `spare` end up holding anything.
pub(super) fn join(planes: &mut [u8], width: Width, spare: &mut [u8], numbers: &mut [u8]) {
    match width {
        Width::Two => zip(planes, numbers),
        Width::Four => {
            zip(planes, spare);
            zip(spare, numbers);
        }
        Width::Eight => {
            zip(planes, spare);
            zip(spare, planes);
            zip(planes, numbers);
        }
    }
}

/// Even bytes to the first half, odd ones to the second.
#[expect(
    clippy::cast_possible_truncation,
    reason = "a narrowing cast is what becomes one instruction"
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

fn zip(halves: &[u8], bytes: &mut [u8]) {
    let (even, odd) = halves.split_at(halves.len() / 2);
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
            for count in [0, 1, 2, 15, 16, 17, 1000] {
                let numbers = crate::store::codec::tests::noise(7, count * bytes);
                let mut planes = vec![0; numbers.len()];
                let mut spare = planes.clone();
                split(&numbers, width, &mut planes, &mut spare);
                for (at, byte) in planes.iter().enumerate() {
                    let (plane, number) = (at / count, at % count);
                    assert_eq!(*byte, numbers[number * bytes + plane], "{width:?} {at}");
                }
                let mut joined = vec![0; numbers.len()];
                join(&mut planes, width, &mut spare, &mut joined);
                assert_eq!(joined, numbers, "{width:?} {count}");
            }
        }
    }
}
