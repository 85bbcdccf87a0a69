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
        let mut reader = self.open(name)?;
        let (mut skip, mut left) = (offset, len);
        let chunk_len = |number: &u32| self.manifest().chunks[*number as usize].raw_len;
        while let Some(len) = reader.stream.chunks.get(reader.next).map(chunk_len)
            && skip >= u64::from(len)
        {
            skip -= u64::from(len);
            reader.next += 1;
        }
        let mut room = vec![0; StreamReader::ROOM_MIN];
        while left > 0 {
            let got = reader.read(&mut room)?;
            let from = usize::try_from(skip).unwrap_or(got).min(got);
            let end = usize::try_from(left).map_or(got, |left| got.min(from + left));
            if from == end {
                return Err(ReadError::Sink(io::ErrorKind::UnexpectedEof.into()));
            }
            sink.write_all(&room[from..end]).map_err(ReadError::Sink)?;
            (skip, left) = (0, left - (end - from) as u64);
        }
        Ok(())
    }
}

impl StreamReader<'_> {
    /// Size of a buffer that has room for any chunk.
    pub const ROOM_MIN: usize = CHUNK_BYTES;

    /// Returns the size of the stream.
    #[must_use]
    pub fn stream_len(&self) -> u64 {
        self.stream.raw_len
    }

    /// Fills the beginning of `room` with the next chunks, as many as fit completely, each checked. Returns the number
    /// of bytes; 0 at the end of the stream, or if the next chunk is longer than `room`.
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
