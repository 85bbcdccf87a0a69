//! Sequential reader of an image's stream into the caller's memory, without further copies.

use std::io::{self, Write};

use super::image_reader::{Fetching, ImageReader};
use crate::store::error::ReadError;
use crate::store::format::chunk::CHUNK_BYTES;
use crate::store::format::manifest::Stream;

/// Stream being read by one thread.
pub struct StreamReader<'a> {
    image: &'a ImageReader,
    stream: &'a Stream,
    fetcher: Fetching<'a>,
    /// The next chunk.
    next: usize,
}

impl ImageReader {
    /// Opens a stream for reading.
    ///
    /// # Errors
    /// The stream does not exist, or there is no memory for the decoder.
    pub fn open(&self, name: &str) -> Result<StreamReader<'_>, ReadError> {
        Ok(StreamReader {
            image: self,
            stream: self.stream(name)?,
            fetcher: self.fetcher()?,
            next: 0,
        })
    }
}

impl ImageReader {
    /// Returns the length of a stream; `None` if it does not exist.
    #[must_use]
    pub fn len_of(&self, name: &str) -> Option<u64> {
        self.stream(name).ok().map(|stream| stream.raw_len)
    }

    /// Writes `len` bytes of a stream to `sink`, starting at `offset`. Earlier chunks are not read.
    ///
    /// # Errors
    /// The same as [`ImageReader::copy_to`]; [`ReadError::Sink`] also if the stream is too short.
    pub fn copy_range(
        &self,
        name: &str,
        offset: u64,
        len: u64,
        sink: &mut impl Write,
    ) -> Result<(), ReadError> {
        self.copy_ranges(name, [(offset, len)], sink)
    }

    /// Writes parts of a stream to `sink`, each given by offset and length. Chunks without such a part are not read;
    /// each other chunk is read once if the offsets ascend.
    ///
    /// # Errors
    /// The same as [`ImageReader::copy_range`].
    pub fn copy_ranges(
        &self,
        name: &str,
        ranges: impl IntoIterator<Item = (u64, u64)>,
        sink: &mut impl Write,
    ) -> Result<(), ReadError> {
        let mut reader = self.open(name)?;
        let mut room = vec![0; StreamReader::ROOM_MIN];
        // The part of the stream that is in `room`.
        let mut there = 0..0;
        for (offset, len) in ranges {
            let (mut at, end) = (offset, offset.saturating_add(len));
            while at < end {
                if at < there.start {
                    (reader.next, there) = (0, 0..0);
                }
                if at >= there.end {
                    there.start = there.end + reader.skip(at - there.end);
                    there.end = there.start + reader.read(&mut room)? as u64;
                    if there.is_empty() {
                        return Err(ReadError::Sink(io::ErrorKind::UnexpectedEof.into()));
                    }
                    continue;
                }
                let next = end.min(there.end);
                // Both are within `room`.
                let [from, to] =
                    [at, next].map(|it| usize::try_from(it - there.start).unwrap_or(room.len()));
                sink.write_all(&room[from..to]).map_err(ReadError::Sink)?;
                at = next;
            }
        }
        Ok(())
    }
}

impl StreamReader<'_> {
    /// Size of a buffer that has room for any chunk.
    pub const ROOM_MIN: usize = CHUNK_BYTES;

    /// Reads without comparisons from now on, for a caller that compares the content with fingerprints.
    pub(crate) fn trust(&mut self) {
        self.fetcher.fetcher().trust();
    }

    /// Returns the size of the stream.
    #[must_use]
    pub fn stream_len(&self) -> u64 {
        self.stream.raw_len
    }

    /// Skips the next chunks that lie completely in the next `bytes`. Returns their length.
    fn skip(&mut self, bytes: u64) -> u64 {
        let mut skipped = 0;
        while let Some(number) = self.stream.chunks.get(self.next) {
            let len = u64::from(self.image.manifest().chunks[*number as usize].raw_len);
            if skipped + len > bytes {
                break;
            }
            skipped += len;
            self.next += 1;
        }
        skipped
    }

    /// Fills the beginning of `room` with the next chunks, as many as fit completely, each checked unless the caller
    /// compares their content. Returns the number of bytes; 0 at the end of the stream, or if the next chunk is longer
    /// than `room`.
    ///
    /// # Errors
    /// [`ReadError::Corrupt`]; the content of `room` is unspecified.
    pub fn read(&mut self, room: &mut [u8]) -> Result<usize, ReadError> {
        let mut filled = 0;
        while let Some(number) = self.stream.chunks.get(self.next) {
            let len = self.image.manifest().chunks[*number as usize].raw_len as usize;
            let Some(place) = room[filled..].get_mut(..len) else {
                break;
            };
            self.image
                .fetch(&mut self.fetcher, self.stream, self.next, place)?;
            self.next += 1;
            filled += len;
        }
        Ok(filled)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::format::codec::tests::noise;
    use crate::store::tests::support::{temporary_store, write_image};

    #[test]
    fn ranges_of_a_stream_are_copied_in_any_order() {
        let (_folder, store) = temporary_store();
        let lock = store.lock().unwrap();
        let bytes = noise(1, 5 * CHUNK_BYTES + 5);
        let image = write_image(&store, &lock, &[("a", &bytes)]).id;
        let reader = store.read(image).unwrap();
        let (len, chunk) = (bytes.len(), CHUNK_BYTES);
        for ranges in [
            vec![(0, len)],
            vec![(0, 1), (1, 2), (3, 0), (chunk, 2 * chunk), (len - 1, 1)],
            vec![(3 * chunk, chunk), (7, 9), (len, 0), (2 * chunk - 1, 2)],
        ] {
            let mut found = Vec::new();
            let wanted = ranges.iter().map(|(at, len)| (*at as u64, *len as u64));
            reader.copy_ranges("a", wanted, &mut found).unwrap();
            let parts = ranges.iter().map(|(at, len)| &bytes[*at..][..*len]);
            assert!(found == parts.collect::<Vec<_>>().concat(), "{ranges:?}");
        }
        let len = len as u64;
        for beyond in [(len, 1), (len - 1, 2), (u64::MAX - 1, 1), (1, u64::MAX)] {
            let copied = reader.copy_ranges("a", [beyond], &mut io::sink());
            assert!(matches!(copied, Err(ReadError::Sink(_))), "{beyond:?}");
        }
    }

    #[test]
    fn a_chunk_with_several_ranges_is_read_once() {
        let (_folder, store) = temporary_store();
        let lock = store.lock().unwrap();
        let bytes = noise(1, 5 * CHUNK_BYTES);
        let image = write_image(&store, &lock, &[("a", &bytes)]).id;
        let reader = store.read(image).unwrap();
        let ranges = (0..bytes.len() as u64).step_by(1000).map(|at| (at, 100));
        reader.copy_ranges("a", ranges, &mut io::sink()).unwrap();
        assert_eq!(reader.given().bytes(), bytes.len() as u64);
    }
}
