//! Appending of what has not changed since an earlier image: its chunks are named again, and only the rest is read.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

use super::chunker::Known;
use super::stream_writer::StreamWriter;
use crate::store::error::{ReadError, WriteError};
use crate::store::format::image_id::ImageId;
use crate::store::format::manifest::{Chunk, Content, Manifest};
use crate::store::format::store_folder::Store;

/// Streams of an earlier image of the same store, by name.
#[derive(Debug)]
pub struct EarlierStreams {
    manifest: Arc<Manifest>,
    by_name: HashMap<String, usize>,
}

impl Store {
    /// Reads the names of an image's chunks.
    ///
    /// # Errors
    /// There is no such image, or its manifest cannot be read.
    pub fn earlier_streams(&self, image: ImageId) -> Result<EarlierStreams, ReadError> {
        let manifest = self.cached_manifest(image)?;
        let names = manifest.streams.iter().map(|stream| stream.name.clone());
        let by_name = names.zip(0..).collect();
        Ok(EarlierStreams { manifest, by_name })
    }
}

impl EarlierStreams {
    /// Returns the chunks of a stream of this length, in order, each with its range; `None` if there is no such stream.
    fn chunks(&self, name: &str, len: u64) -> Option<impl Iterator<Item = (Range<u64>, &Chunk)>> {
        let stream = &self.manifest.streams[*self.by_name.get(name)?];
        let mut end = 0;
        let chunks = stream.chunks.iter().map(move |number| {
            let chunk = &self.manifest.chunks[*number as usize];
            let start = end;
            end += u64::from(chunk.raw_len);
            (start..end, chunk)
        });
        (stream.raw_len == len).then_some(chunks)
    }
}

impl StreamWriter {
    /// Appends `len` bytes of which a part is the same as the stream `name` of an earlier image: `is_same` says so for a
    /// range. The image names those chunks again; `read` appends each of the other ranges, in order. Returns the number
    /// of bytes that were not read.
    ///
    /// # Errors
    /// The image failed, or `read`.
    pub fn append_changes<E: From<WriteError>>(
        &mut self,
        (earlier, name): (&EarlierStreams, &str),
        len: u64,
        is_same: impl Fn(Range<u64>) -> bool,
        mut read: impl FnMut(&mut Self, Range<u64>) -> Result<(), E>,
    ) -> Result<u64, E> {
        let (mut done, mut unread) = (0, 0);
        let mut known = Vec::new();
        let chunks = earlier.chunks(name, len).into_iter().flatten();
        let same: Vec<_> = chunks.filter(|(range, _)| is_same(range.clone())).collect();
        let stored = self
            .shared
            .builder
            .known(same.iter().map(|(_, chunk)| *chunk));
        let usable = same.into_iter().zip(stored).filter(|(_, stored)| *stored);
        for ((range, chunk), _) in usable {
            if done < range.start {
                self.append_all(&mut known)?;
                read(self, done..range.start)?;
            }
            known.push(Known {
                len: chunk.raw_len,
                hash: match chunk.content {
                    Content::Zero => None,
                    Content::Stored(stored) => Some(stored.hash),
                },
            });
            done = range.end;
            unread += u64::from(chunk.raw_len);
        }
        self.append_all(&mut known)?;
        if done < len {
            read(self, done..len)?;
        }
        Ok(unread)
    }

    fn append_all(&mut self, known: &mut Vec<Known>) -> Result<(), WriteError> {
        if known.is_empty() {
            return Ok(());
        }
        self.append_known(std::mem::take(known))
    }
}

#[cfg(test)]
#[allow(clippy::cast_possible_truncation, reason = "the data are short")]
mod tests {
    use proptest::prelude::*;

    use crate::store::ImageWriter;
    use crate::store::error::WriteError;
    use crate::store::format::chunk::CHUNK_BYTES;
    use crate::store::format::codec::tests::noise;
    use crate::store::tests::support::{OPTIONS, read_stream, temporary_store};

    /// Length of the blocks that are compared.
    const BLOCK: usize = CHUNK_BYTES;
    const BLOCKS: usize = 12;

    proptest! {
        #![proptest_config(ProptestConfig { cases: 40, ..ProptestConfig::default() })]

        #[test]
        fn a_stream_with_changes_is_read_back_equal(
            changed in proptest::collection::vec((0..BLOCKS, 0..BLOCK, any::<bool>()), 0..4),
            zeros in proptest::collection::vec(0..BLOCKS * 64, 0..40),
            is_pruned in any::<bool>(),
            is_in_place in any::<bool>(),
        ) {
            let (_folder, store) = temporary_store();
            let lock = store.lock().unwrap();
            let mut first = noise(5, BLOCK * BLOCKS);
            for page in zeros {
                first[page * 4096..][..4096].fill(0);
            }
            let open = |writer: &ImageWriter, name: &str| {
                let streams = writer.streams();
                let opened = if is_in_place { streams.open_in_place(name) } else { streams.open(name) };
                opened.unwrap()
            };
            let write = |name: &str, bytes: &[u8]| {
                let writer = store.begin(&lock, OPTIONS).unwrap();
                writer.start_workers();
                let mut stream = open(&writer, name);
                stream.write_all(bytes).unwrap();
                stream.finish().unwrap();
                writer.commit(b"").unwrap().id
            };
            let earlier = write("memory", &first);
            let streams = store.earlier_streams(earlier).unwrap();
            if is_pruned {
                // The index has the newest two images only.
                write("other", &noise(6, BLOCK));
                write("other", &noise(7, BLOCK));
            }
            let mut second = first.clone();
            for (block, at, is_zero) in &changed {
                if *is_zero {
                    second[block * BLOCK..][..BLOCK].fill(0);
                } else {
                    second[block * BLOCK + at] ^= 1;
                }
            }
            let is_same = |range: std::ops::Range<u64>| {
                let blocks = range.start as usize / BLOCK..(range.end as usize).div_ceil(BLOCK);
                blocks.into_iter().all(|block| {
                    let range = block * BLOCK..(block + 1) * BLOCK;
                    first[range.clone()] == second[range]
                })
            };
            let writer = store.begin(&lock, OPTIONS).unwrap();
            writer.start_workers();
            let mut stream = open(&writer, "memory");
            let mut reads = 0;
            let unread = stream.append_changes((&streams, "memory"), second.len() as u64, is_same, |stream, range| {
                reads += range.end - range.start;
                stream.write_all(&second[range.start as usize..range.end as usize])?;
                Ok::<_, WriteError>(())
            });
            let unread = unread.unwrap();
            prop_assert_eq!(unread + reads, second.len() as u64);
            prop_assert_eq!(stream.finish().unwrap(), second.len() as u64);
            let id = writer.commit(b"").unwrap().id;
            prop_assert!(read_stream(&store, id, "memory") == second);
            // A change makes its block unknown, and the chunks that reach into it.
            let most = match (is_pruned, is_in_place) {
                (true, _) => BLOCKS,
                (false, true) => changed.len(),
                (false, false) => changed.len() * 3,
            };
            prop_assert!(reads <= (most * BLOCK) as u64, "{} bytes read", reads);
        }
    }

    #[test]
    fn another_length_or_name_is_read_completely() {
        let (_folder, store) = temporary_store();
        let lock = store.lock().unwrap();
        let bytes = noise(8, 3 * BLOCK);
        let writer = store.begin(&lock, OPTIONS).unwrap();
        let mut stream = writer.stream("memory").unwrap();
        stream.write_all(&bytes).unwrap();
        stream.finish().unwrap();
        let earlier = store
            .earlier_streams(writer.commit(b"").unwrap().id)
            .unwrap();
        for (name, len) in [("memory", 2 * BLOCK), ("storage", 3 * BLOCK)] {
            let writer = store.begin(&lock, OPTIONS).unwrap();
            let mut stream = writer.stream(name).unwrap();
            let read = |stream: &mut super::StreamWriter, range: std::ops::Range<u64>| {
                assert_eq!(range, 0..len as u64);
                stream.write_all(&bytes[..len])
            };
            let unread = stream.append_changes((&earlier, name), len as u64, |_| true, read);
            assert_eq!(unread.unwrap(), 0);
            stream.finish().unwrap();
            let id = writer.commit(b"").unwrap().id;
            assert!(read_stream(&store, id, name) == bytes[..len]);
        }
    }
}
