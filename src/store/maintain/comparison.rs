//! Comparison of two images of a store, from their manifests alone: a chunk's name identifies its content.

use std::collections::{BTreeMap, HashSet};

use crate::store::format::chunk::Hash;
use crate::store::format::manifest::{Chunk, Content, Manifest};

/// The data that an image shares with another image of the same store, and the data that it does not share.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Comparison {
    /// Streams of both images, by name.
    pub streams: Vec<StreamComparison>,
    /// Totals of all streams.
    pub total: Shares,
}

/// A stream of one or both images.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StreamComparison {
    /// Its name.
    pub name: String,
    /// Its length in the older image; `None` if that image has no such stream.
    pub before: Option<u64>,
    /// Its length in the newer image; `None` if that image has no such stream.
    pub after: Option<u64>,
    /// Composition of the newer image's stream.
    pub shares: Shares,
}

/// Composition of bytes of the newer image. A shared chunk may be anywhere in the older image.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Shares {
    /// Bytes in chunks that the older image has, too.
    pub shared_bytes: u64,
    /// Bytes in chunks that the older image does not have.
    pub new_bytes: u64,
    /// Zeros, which are not stored.
    pub zero_bytes: u64,
    /// Stored size of the new chunks in the packs; each is counted at its first occurrence.
    pub new_stored_bytes: u64,
}

impl Shares {
    fn add(&mut self, other: Self) {
        self.shared_bytes += other.shared_bytes;
        self.new_bytes += other.new_bytes;
        self.zero_bytes += other.zero_bytes;
        self.new_stored_bytes += other.new_stored_bytes;
    }
}

/// Compares two images of one store. Reads no data.
#[must_use]
pub fn compare(older: &Manifest, newer: &Manifest) -> Comparison {
    let known: HashSet<Hash> = older.chunks.iter().filter_map(name).collect();
    let mut counted = vec![false; newer.chunks.len()];
    let mut streams: BTreeMap<&str, StreamComparison> = BTreeMap::new();
    for stream in &older.streams {
        entry(&mut streams, &stream.name).before = Some(stream.raw_len);
    }
    let mut total = Shares::default();
    for stream in &newer.streams {
        let mut shares = Shares::default();
        for index in &stream.chunks {
            let is_first = !std::mem::replace(&mut counted[*index as usize], true);
            shares.add(share(&newer.chunks[*index as usize], &known, is_first));
        }
        total.add(shares);
        let entry = entry(&mut streams, &stream.name);
        entry.after = Some(stream.raw_len);
        entry.shares = shares;
    }
    Comparison {
        streams: streams.into_values().collect(),
        total,
    }
}

fn entry<'a, 'm>(
    streams: &'a mut BTreeMap<&'m str, StreamComparison>,
    name: &'m str,
) -> &'a mut StreamComparison {
    streams.entry(name).or_insert_with(|| StreamComparison {
        name: name.to_owned(),
        before: None,
        after: None,
        shares: Shares::default(),
    })
}

fn share(chunk: &Chunk, known: &HashSet<Hash>, is_first: bool) -> Shares {
    let raw = u64::from(chunk.raw_len);
    let mut shares = Shares::default();
    match chunk.content {
        Content::Zero => shares.zero_bytes = raw,
        Content::Stored(stored) if known.contains(&stored.hash) => shares.shared_bytes = raw,
        Content::Stored(stored) => {
            shares.new_bytes = raw;
            shares.new_stored_bytes = if is_first { stored.len.into() } else { 0 };
        }
    }
    shares
}

fn name(chunk: &Chunk) -> Option<Hash> {
    match chunk.content {
        Content::Zero => None,
        Content::Stored(stored) => Some(stored.hash),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::CHUNK_BYTES;
    use crate::store::format::codec::tests::noise;
    use crate::store::tests::support::{packs, temporary_store, write_image};

    const MIB: u64 = 1 << 20;

    #[test]
    fn every_byte_of_the_newer_image_is_shared_new_or_zero() {
        let (_folder, store) = temporary_store();
        let lock = store.lock().unwrap();
        let kept = noise(1, 4 << 20);
        let grown = [&kept[..], &vec![0; 1 << 20], &noise(2, 1 << 20)].concat();
        let older = write_image(&store, &lock, &[("pages", &kept), ("gone", b"gone")]);
        let newer = write_image(&store, &lock, &[("pages", &grown), ("moved", &kept)]);
        let found = compare(&older, &newer);
        let stream = |name: &str| found.streams.iter().find(|one| one.name == name).unwrap();
        let lens = |name: &str| (stream(name).before, stream(name).after);
        assert_eq!(lens("gone"), (Some(4), None));
        assert_eq!(lens("pages"), (Some(4 * MIB), Some(6 * MIB)));
        assert_eq!(lens("moved"), (None, Some(4 * MIB)));
        assert_eq!(
            stream("moved").shares.shared_bytes,
            4 * MIB,
            "wherever it was"
        );
        let all = found.total;
        assert_eq!(
            all.shared_bytes + all.new_bytes + all.zero_bytes,
            newer.raw_bytes
        );
        // A chunk may extend across a border of the new data.
        let slack = 2 * CHUNK_BYTES as u64;
        assert!(all.new_bytes.abs_diff(MIB) <= slack, "{all:?}");
        assert!(all.zero_bytes.abs_diff(MIB) <= slack, "{all:?}");
        assert!(all.new_stored_bytes <= newer.stored_bytes, "{all:?}");
        assert!(
            all.new_stored_bytes + slack >= newer.stored_bytes,
            "{all:?}"
        );
    }

    #[test]
    fn comparing_an_image_with_itself_finds_no_new_bytes() {
        let (_folder, store) = temporary_store();
        let lock = store.lock().unwrap();
        let image = write_image(&store, &lock, &[("a", &noise(1, 1 << 20)), ("empty", b"")]);
        for pack in packs(&store) {
            std::fs::remove_file(store.path().join("packs").join(pack)).unwrap();
        }
        let image = store.manifest(image.id).unwrap();
        let found = compare(&image, &image);
        let shares = Shares {
            shared_bytes: MIB,
            ..Shares::default()
        };
        assert_eq!(found.total, shares);
    }
}
