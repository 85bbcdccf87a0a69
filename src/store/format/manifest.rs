//! Content of an image: its streams, their chunks, and the packs that hold them.
//!
//! This module has plain data and its validity rules. Every [`Manifest`] is valid, so readers need not check indexes or
//! lengths again. `manifest_file` defines the form on disk.

use std::collections::HashSet;

use super::chunk::{CHUNK_LEN_MAX, Hash};
use super::cipher::OVERHEAD_LEN;
use super::codec::Codec;
use super::image_id::ImageId;
use super::pack::{HEADER_BYTES, Pack};

/// Maximum length of a stream's name, equal to that of a file name.
const NAME_BYTES_MAX: usize = 255;

/// First format that stores a check of each chunk.
const FORMAT_OF_CHECKS: u32 = 2;

/// Complete description of an image's content.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Manifest {
    /// Format that the image was written in.
    pub format: u32,
    /// The image's number.
    pub id: ImageId,
    /// Start of the image, in milliseconds since 1970 UTC.
    pub created_unix_ms: u64,
    /// Streams in the order in which they were opened.
    pub streams: Vec<Stream>,
    /// Distinct chunks of the streams.
    pub chunks: Vec<Chunk>,
    /// Packs that hold the chunks. They may belong to any image: a repair may use chunks in newer packs.
    pub packs: Vec<Pack>,
    /// Total length of all streams.
    pub raw_bytes: u64,
    /// True if the chunks are sealed.
    pub encrypted: bool,
    /// Bytes that this image added to the store's packs.
    pub stored_bytes: u64,
    /// Caller's own data.
    pub meta: Vec<u8>,
}

/// Named sequence of bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stream {
    /// The caller's name for it.
    pub name: String,
    /// Its length.
    pub raw_len: u64,
    /// Chunks in order, as positions in [`Manifest::chunks`].
    pub chunks: Vec<u32>,
}

/// Piece of one or more streams.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Chunk {
    /// Uncompressed length, at least 1.
    pub raw_len: u32,
    /// The chunk's bytes.
    pub content: Content,
}

/// Content of a chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Content {
    /// Zeros, which are not stored.
    Zero,
    /// Bytes in a pack.
    Stored(Stored),
}

/// Chunk in a pack.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stored {
    /// BLAKE3 of the uncompressed bytes, with a key in an encrypted store.
    pub hash: Hash,
    /// Position in [`Manifest::packs`].
    pub pack: u32,
    /// Offset in the pack.
    pub offset: u64,
    /// Length in the pack.
    pub len: u32,
    /// Encoding.
    pub codec: Codec,
    /// XXH3 (64 bits) of the bytes in the pack; absent in images of format 1.
    pub check: Option<u64>,
}

/// Validity rule that a manifest violates.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InvalidManifest {
    /// A stream has a name that [`is_stream_name`] rejects.
    #[error("a stream has the name {name:?}")]
    StreamName {
        /// The name.
        name: String,
    },
    /// Two streams have the same name.
    #[error("two streams have the name {name:?}")]
    StreamTwice {
        /// The name.
        name: String,
    },
    /// The chunks of a stream do not exist, or their total length differs from the stream's.
    #[error("the chunks of the stream {name:?} do not add up to its {raw_len} bytes")]
    StreamChunks {
        /// The name.
        name: String,
        /// The length it should have.
        raw_len: u64,
    },
    /// A chunk has an impossible length or position, or lacks its check.
    #[error("chunk {chunk} lies outside of its pack, has an impossible length or no check")]
    Chunk {
        /// Position in the table.
        chunk: usize,
    },
    /// The sum of the streams' lengths differs from the total.
    #[error("the streams do not add up to {raw_bytes} bytes")]
    RawBytes {
        /// The length that the manifest gives.
        raw_bytes: u64,
    },
}

/// Returns true if a name is valid for a stream: 1 to 255 bytes of `[A-Za-z0-9._-]` and `/`, where no part between
/// slashes is empty, `.` or `..`.
#[must_use]
pub fn is_stream_name(name: &str) -> bool {
    let known = |byte: u8| byte.is_ascii_alphanumeric() || b"._-/".contains(&byte);
    name.len() <= NAME_BYTES_MAX
        && name.bytes().all(known)
        && name.split('/').all(|part| !matches!(part, "" | "." | ".."))
}

impl Manifest {
    pub(crate) fn validate(&self) -> Result<(), InvalidManifest> {
        for (index, chunk) in self.chunks.iter().enumerate() {
            if !self.is_valid_chunk(chunk) {
                return Err(InvalidManifest::Chunk { chunk: index });
            }
        }
        let mut names = HashSet::new();
        let mut raw_bytes = Some(0_u64);
        for stream in &self.streams {
            self.validate_stream(stream)?;
            if !names.insert(stream.name.as_str()) {
                let name = stream.name.clone();
                return Err(InvalidManifest::StreamTwice { name });
            }
            raw_bytes = raw_bytes.and_then(|sum| sum.checked_add(stream.raw_len));
        }
        if raw_bytes != Some(self.raw_bytes) {
            let raw_bytes = self.raw_bytes;
            return Err(InvalidManifest::RawBytes { raw_bytes });
        }
        Ok(())
    }

    /// Returns the stored chunks in the order in which the streams use them first, with their positions.
    pub(crate) fn first_uses(&self) -> Vec<(u32, Stored)> {
        let mut is_used = vec![false; self.chunks.len()];
        let indices = self.streams.iter().flat_map(|stream| &stream.chunks);
        let first =
            indices.filter(|index| !std::mem::replace(&mut is_used[**index as usize], true));
        first
            .filter_map(|index| match self.chunks[*index as usize].content {
                Content::Stored(stored) => Some((*index, stored)),
                Content::Zero => None,
            })
            .collect()
    }

    fn is_valid_chunk(&self, chunk: &Chunk) -> bool {
        let lengths = 1..=CHUNK_LEN_MAX;
        lengths.contains(&chunk.raw_len)
            && match chunk.content {
                Content::Zero => true,
                Content::Stored(stored) => {
                    let pack = self.packs.get(stored.pack as usize);
                    let end = stored.offset.checked_add(u64::from(stored.len));
                    let overhead = if self.encrypted { OVERHEAD_LEN } else { 0 };
                    let encoded_len = stored.len.checked_sub(overhead);
                    let len_fits =
                        encoded_len.is_some_and(|len| stored.codec.fits(len, chunk.raw_len));
                    let inside = pack.zip(end).is_some_and(|(pack, end)| end <= pack.len);
                    let has_check = stored.check.is_some() || self.format < FORMAT_OF_CHECKS;
                    len_fits && inside && has_check && stored.offset >= HEADER_BYTES
                }
            }
    }

    fn validate_stream(&self, stream: &Stream) -> Result<(), InvalidManifest> {
        let name = || stream.name.clone();
        if !is_stream_name(&stream.name) {
            return Err(InvalidManifest::StreamName { name: name() });
        }
        // At most 2^32 chunks of 2^18 bytes: the sum cannot overflow.
        let sum = stream.chunks.iter().try_fold(0_u64, |sum, index| {
            let chunk = self.chunks.get(*index as usize)?;
            Some(sum + u64::from(chunk.raw_len))
        });
        if sum != Some(stream.raw_len) {
            let raw_len = stream.raw_len;
            return Err(InvalidManifest::StreamChunks {
                name: name(),
                raw_len,
            });
        }
        Ok(())
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::store::format::FORMAT;
    use crate::store::format::pack::PackName;

    /// Creates a manifest with one stream of three chunks: stored, zero, stored again.
    pub(in crate::store) fn example() -> Manifest {
        let id = ImageId::new(12).unwrap();
        let stored = Stored {
            hash: [7; 32],
            pack: 0,
            offset: HEADER_BYTES,
            len: 50,
            codec: Codec::Zstd,
            check: Some(99),
        };
        let chunk = |raw_len, content| Chunk { raw_len, content };
        Manifest {
            format: FORMAT,
            id,
            created_unix_ms: 1_800_000_000_000,
            streams: vec![Stream {
                name: "pages-1.img".to_owned(),
                raw_len: 500,
                chunks: vec![0, 1, 0],
            }],
            chunks: vec![
                chunk(100, Content::Stored(stored)),
                chunk(300, Content::Zero),
            ],
            packs: vec![Pack {
                name: PackName {
                    image: id,
                    number: 0,
                },
                len: 100,
            }],
            raw_bytes: 500,
            encrypted: false,
            stored_bytes: 100,
            meta: b"{}".to_vec(),
        }
    }

    fn broken(change: impl FnOnce(&mut Manifest)) -> InvalidManifest {
        let mut manifest = example();
        change(&mut manifest);
        manifest.validate().unwrap_err()
    }

    fn stored(manifest: &mut Manifest) -> &mut Stored {
        match &mut manifest.chunks[0].content {
            Content::Stored(stored) => stored,
            Content::Zero => panic!("the example's first chunk is stored"),
        }
    }

    #[test]
    fn the_example_is_valid() {
        assert_eq!(example().validate(), Ok(()));
    }

    #[test]
    fn a_chunk_outside_of_its_pack_is_refused() {
        let refused = InvalidManifest::Chunk { chunk: 0 };
        assert_eq!(broken(|m| stored(m).pack = 1), refused);
        assert_eq!(broken(|m| stored(m).offset = 51), refused);
        assert_eq!(broken(|m| stored(m).offset = 23), refused);
        assert_eq!(broken(|m| stored(m).offset = u64::MAX), refused);
        assert_eq!(broken(|m| stored(m).len = 0), refused);
        assert_eq!(broken(|m| stored(m).len = 100), refused);
        assert_eq!(broken(|m| stored(m).codec = Codec::Raw), refused);
        assert_eq!(broken(|m| stored(m).check = None), refused);
        assert_eq!(broken(|m| m.chunks[0].raw_len = CHUNK_LEN_MAX + 1), refused);
        assert_eq!(
            broken(|m| m.chunks[1].raw_len = 0),
            InvalidManifest::Chunk { chunk: 1 }
        );
    }

    #[test]
    fn a_stream_that_does_not_add_up_is_refused() {
        let refused = |found| matches!(found, InvalidManifest::StreamChunks { .. });
        assert!(refused(broken(|m| m.streams[0].chunks.push(2))));
        assert!(refused(broken(|m| m.streams[0].chunks.push(1))));
        assert!(refused(broken(|m| m.streams[0].raw_len = 501)));
        assert_eq!(
            broken(|m| m.raw_bytes = 1),
            InvalidManifest::RawBytes { raw_bytes: 1 }
        );
        let twice = broken(|m| m.streams.push(m.streams[0].clone()));
        assert!(matches!(twice, InvalidManifest::StreamTwice { .. }));
    }

    #[test]
    fn stream_names_stay_plain() {
        let long = "x".repeat(255);
        for name in [
            "a",
            "core-1.img",
            "files/0/x_y.z",
            long.as_str(),
            "...",
            ".x",
        ] {
            assert!(is_stream_name(name), "{name:?}");
        }
        let longer = "x".repeat(256);
        for name in [
            "",
            "/",
            "/a",
            "a/",
            "a//b",
            ".",
            "..",
            "a/../b",
            "a b",
            "ä",
            "a\0",
            longer.as_str(),
        ] {
            assert!(!is_stream_name(name), "{name:?}");
        }
    }
}
