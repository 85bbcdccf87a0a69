//! The two messages in a manifest's file, and their conversion from and to plain data.
//!
//! Streams and chunks are columns of numbers, which protobuf packs and zstd compresses. Columns of inconsistent lengths
//! are refused; `manifest` checks the values.

use prost::Message;

use super::ManifestError;
use crate::store::format::chunk::Hash;
use crate::store::format::codec::Codec;
use crate::store::format::image_id::ImageId;
use crate::store::format::manifest::{Chunk, Content, Manifest, Stored, Stream};
use crate::store::format::pack::{Pack, PackName};

#[derive(Clone, PartialEq, Message)]
pub(crate) struct SummaryMessage {
    #[prost(uint64, tag = "1")]
    pub(crate) created_unix_ms: u64,
    #[prost(uint64, tag = "2")]
    pub(crate) raw_bytes: u64,
    #[prost(uint64, tag = "3")]
    pub(crate) stored_bytes: u64,
    #[prost(bytes = "vec", tag = "4")]
    pub(crate) meta: Vec<u8>,
    #[prost(uint64, repeated, tag = "5")]
    pack_images: Vec<u64>,
    #[prost(uint32, repeated, tag = "6")]
    pack_numbers: Vec<u32>,
    #[prost(uint64, repeated, tag = "7")]
    pack_lens: Vec<u64>,
}

/// Message of three groups of columns, with an entry per stream, per chunk and per stored chunk.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct BodyMessage {
    #[prost(string, repeated, tag = "1")]
    stream_names: Vec<String>,
    #[prost(uint64, repeated, tag = "2")]
    stream_lens: Vec<u64>,
    /// Number of entries in `stream_chunks` for each stream.
    #[prost(uint32, repeated, tag = "3")]
    stream_counts: Vec<u32>,
    #[prost(uint32, repeated, tag = "4")]
    stream_chunks: Vec<u32>,

    /// `KIND_ZERO` or the number of a codec, one byte per chunk.
    #[prost(bytes = "vec", tag = "5")]
    chunk_kinds: Vec<u8>,
    #[prost(uint32, repeated, tag = "6")]
    chunk_lens: Vec<u32>,

    /// Hashes, 32 bytes per stored chunk.
    #[prost(bytes = "vec", tag = "7")]
    hashes: Vec<u8>,
    #[prost(uint32, repeated, tag = "8")]
    packs: Vec<u32>,
    #[prost(uint64, repeated, tag = "9")]
    offsets: Vec<u64>,
    #[prost(uint32, repeated, tag = "10")]
    lens: Vec<u32>,
    /// Checksums; absent in format 1.
    #[prost(fixed64, repeated, tag = "11")]
    checks: Vec<u64>,
}

const KIND_ZERO: u8 = 0;

pub(crate) fn summary_message(manifest: &Manifest) -> SummaryMessage {
    let packs = &manifest.packs;
    SummaryMessage {
        created_unix_ms: manifest.created_unix_ms,
        raw_bytes: manifest.raw_bytes,
        stored_bytes: manifest.stored_bytes,
        meta: manifest.meta.clone(),
        pack_images: packs.iter().map(|pack| pack.name.image.number()).collect(),
        pack_numbers: packs.iter().map(|pack| pack.name.number).collect(),
        pack_lens: packs.iter().map(|pack| pack.len).collect(),
    }
}

pub(crate) fn packs_of(message: &SummaryMessage) -> Option<Vec<Pack>> {
    let count = message.pack_images.len();
    if message.pack_numbers.len() != count || message.pack_lens.len() != count {
        return None;
    }
    let names = message.pack_images.iter().zip(&message.pack_numbers);
    let pack = |((image, number), len): ((&u64, &u32), &u64)| {
        let name = PackName {
            image: ImageId::new(*image)?,
            number: *number,
        };
        Some(Pack { name, len: *len })
    };
    names.zip(&message.pack_lens).map(pack).collect()
}

pub(crate) fn body_message(manifest: &Manifest) -> Result<BodyMessage, ManifestError> {
    let references = manifest.streams.iter().map(|stream| stream.chunks.len());
    let chunks = manifest.chunks.len();
    let mut body = BodyMessage {
        stream_chunks: Vec::with_capacity(references.sum()),
        chunk_lens: Vec::with_capacity(chunks),
        chunk_kinds: Vec::with_capacity(chunks),
        hashes: Vec::with_capacity(chunks * size_of::<Hash>()),
        packs: Vec::with_capacity(chunks),
        offsets: Vec::with_capacity(chunks),
        lens: Vec::with_capacity(chunks),
        checks: Vec::with_capacity(chunks),
        ..BodyMessage::default()
    };
    for stream in &manifest.streams {
        let count = u32::try_from(stream.chunks.len()).map_err(|_| ManifestError::TooLarge)?;
        body.stream_names.push(stream.name.clone());
        body.stream_lens.push(stream.raw_len);
        body.stream_counts.push(count);
        body.stream_chunks.extend_from_slice(&stream.chunks);
    }
    for chunk in &manifest.chunks {
        body.chunk_lens.push(chunk.raw_len);
        match chunk.content {
            Content::Zero => body.chunk_kinds.push(KIND_ZERO),
            Content::Stored(stored) => {
                body.chunk_kinds.push(stored.codec as u8);
                body.hashes.extend_from_slice(&stored.hash);
                body.packs.push(stored.pack);
                body.offsets.push(stored.offset);
                body.lens.push(stored.len);
                body.checks.extend(stored.check);
            }
        }
    }
    Ok(body)
}

pub(crate) fn streams_of(body: &BodyMessage) -> Option<Vec<Stream>> {
    let count = body.stream_names.len();
    if body.stream_lens.len() != count || body.stream_counts.len() != count {
        return None;
    }
    let mut chunks = &body.stream_chunks[..];
    let lens = body.stream_lens.iter().zip(&body.stream_counts);
    let streams: Option<Vec<Stream>> = body
        .stream_names
        .iter()
        .zip(lens)
        .map(|(name, (raw_len, count))| {
            let (own, rest) = chunks.split_at_checked(*count as usize)?;
            chunks = rest;
            Some(Stream {
                name: name.clone(),
                raw_len: *raw_len,
                chunks: own.to_vec(),
            })
        })
        .collect();
    streams.filter(|_| chunks.is_empty())
}

pub(crate) fn chunks_of(body: &BodyMessage) -> Option<Vec<Chunk>> {
    let (hashes, rest) = body.hashes.as_chunks::<32>();
    let count = hashes.len();
    let same_length = body.packs.len() == count
        && body.offsets.len() == count
        && body.lens.len() == count
        && (body.checks.is_empty() || body.checks.len() == count)
        && body.chunk_lens.len() == body.chunk_kinds.len();
    if !rest.is_empty() || !same_length {
        return None;
    }
    let mut next = 0;
    let kinds = body.chunk_kinds.iter().zip(&body.chunk_lens);
    let chunks: Option<Vec<Chunk>> = kinds
        .map(|(kind, raw_len)| {
            let raw_len = *raw_len;
            if *kind == KIND_ZERO {
                let content = Content::Zero;
                return Some(Chunk { raw_len, content });
            }
            let stored = Stored {
                hash: *hashes.get(next)?,
                pack: body.packs[next],
                offset: body.offsets[next],
                len: body.lens[next],
                codec: Codec::from_disk(*kind)?,
                check: body.checks.get(next).copied(),
            };
            next += 1;
            let content = Content::Stored(stored);
            Some(Chunk { raw_len, content })
        })
        .collect();
    chunks.filter(|_| next == count)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::store::format::manifest::tests::example;

    #[test]
    fn columns_of_different_lengths_are_refused() {
        let body = body_message(&example()).unwrap();
        let broken = |change: fn(&mut BodyMessage)| {
            let mut body = body.clone();
            change(&mut body);
            streams_of(&body).is_none() || chunks_of(&body).is_none()
        };
        assert!(!broken(|_| ()));
        assert!(broken(|body| body.stream_lens.push(1)));
        assert!(broken(|body| body.stream_counts[0] = 4));
        assert!(broken(|body| body.stream_counts[0] = 2));
        assert!(broken(|body| body.chunk_kinds.push(0)));
        assert!(broken(|body| body.chunk_kinds[0] = 0));
        assert!(broken(|body| body.chunk_kinds[1] = 1));
        assert!(broken(|body| body.chunk_kinds[0] = 99));
        assert!(broken(|body| body.hashes.push(1)));
        assert!(broken(|body| body.packs.clear()));
        assert!(broken(|body| body.offsets.push(1)));
        assert!(broken(|body| body.lens.push(1)));
        assert!(broken(|body| body.checks.push(1)));
    }

    proptest! {
        #[test]
        fn changed_bytes_never_make_an_invalid_manifest(at: prop::sample::Index, with: u8) {
            let mut manifest = example();
            let mut bytes = body_message(&manifest).unwrap().encode_to_vec();
            let at = at.index(bytes.len());
            bytes[at] = with;
            if let Ok(body) = BodyMessage::decode(&bytes[..])
                && let Some((streams, chunks)) = streams_of(&body).zip(chunks_of(&body))
            {
                (manifest.streams, manifest.chunks) = (streams, chunks);
                if manifest.validate().is_ok() {
                    for stream in &manifest.streams {
                        let chunks = stream.chunks.iter().map(|index| &manifest.chunks[*index as usize]);
                        let len: u64 = chunks.map(|chunk| u64::from(chunk.raw_len)).sum();
                        prop_assert_eq!(len, stream.raw_len);
                    }
                }
            }
        }
    }
}
