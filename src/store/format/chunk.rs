//! Chunks: the pieces into which streams are cut, each hashed, compressed and stored separately.
//!
//! This module has pure functions of bytes and uses neither files nor threads.

/// Maximum length of a chunk, and the size of reads from streams, chosen to fit a core's cache. `chunker` determines
/// the actual lengths.
pub const CHUNK_BYTES: usize = 256 * 1024;

/// Value of `CHUNK_BYTES` in the type of a chunk's length on disk.
pub(crate) const CHUNK_LEN_MAX: u32 = 256 * 1024;
const _: () = assert!(CHUNK_LEN_MAX as usize == CHUNK_BYTES);

/// Name of a chunk: BLAKE3 of its uncompressed bytes.
pub type Hash = [u8; 32];

/// Returns the hash table key of a name. The hash is already uniformly distributed.
pub(crate) fn key_of(hash: &Hash) -> u64 {
    let (first, _) = hash.split_first_chunk().unwrap_or((&[0; 8], &[]));
    u64::from_le_bytes(*first)
}

/// Zeros as long as a chunk, for comparisons and writes.
pub(crate) static ZEROS: [u8; CHUNK_BYTES] = [0; CHUNK_BYTES];

/// Number of bytes compared at a time: one page, because the first bytes decide for most chunks.
const COMPARED_BYTES: usize = 4096;

pub(crate) fn hash(bytes: &[u8]) -> Hash {
    *blake3::hash(bytes).as_bytes()
}

pub(crate) fn is_zero(bytes: &[u8]) -> bool {
    bytes
        .chunks(COMPARED_BYTES)
        .all(|page| page == &ZEROS[..page.len()])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_single_byte_anywhere_makes_a_chunk_not_zero() {
        let mut bytes = vec![0; CHUNK_BYTES];
        assert!(is_zero(&bytes) && is_zero(&bytes[..5]) && is_zero(&[]));
        for at in [0, 4095, 4096, 100_000, CHUNK_BYTES - 1] {
            bytes[at] = 1;
            assert!(!is_zero(&bytes), "byte {at}");
            bytes[at] = 0;
        }
    }
}
