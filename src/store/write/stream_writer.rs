//! Writer of a stream: fills buffers and passes full ones to the workers.
//!
//! This code runs while the job is frozen, so it only copies data and detects zeros, which then take no memory.

use std::fs::File;
use std::io::{self, Read};
use std::sync::Arc;

use super::buffer_pool::Buffer;
use super::chunker::{Ends, Known};
use super::pipe_lanes::Lanes;
use super::work_queue::Passing;
use super::worker::Shared;
use crate::store::error::WriteError;
use crate::store::format::chunk::{self, CHUNK_BYTES};

/// Maximum number of pieces in a stream: 16 TiB. A piece is cut into less than 64 chunks.
const PIECES_MAX: u32 = u32::MAX / 64;

/// Number of bytes read from a pipe before lanes are opened: complete chunks, more than most of CRIU's files have.
const START_BYTES: u64 = 4 * CHUNK_BYTES as u64;

/// Stream being written by one thread. If it is dropped before it is finished, the image fails.
#[derive(Debug)]
pub struct StreamWriter {
    pub(super) shared: Arc<Shared>,
    name: String,
    stream: u32,
    position: u32,
    raw_len: u64,
    /// Piece being filled.
    current: Option<Filling>,
    state: StreamState,
}

#[derive(Debug)]
struct Filling {
    buffer: Buffer,
    len: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum StreamState {
    Open,
    Finished,
}

/// Opener of an image's streams, usable from any thread. Fails after the image is settled or abandoned.
#[derive(Clone, Debug)]
pub struct StreamOpener {
    shared: Arc<Shared>,
}

impl StreamOpener {
    pub(crate) fn new(shared: &Arc<Shared>) -> Self {
        Self {
            shared: Arc::clone(shared),
        }
    }

    /// Opens a stream like [`ImageWriter::stream`](crate::store::ImageWriter::stream).
    ///
    /// # Errors
    /// The same.
    pub fn open(&self, name: &str) -> Result<StreamWriter, WriteError> {
        self.shared.work_queue.check()?;
        StreamWriter::open(&self.shared, name)
    }

    /// Opens a stream of memory that changes in place: its chunks end at multiples of 256 KiB, which makes them longer
    /// and few of them change. Other streams are cut by their content, which recognizes what has moved.
    ///
    /// # Errors
    /// The same as [`open`](Self::open).
    pub fn open_in_place(&self, name: &str) -> Result<StreamWriter, WriteError> {
        let stream = self.open(name)?;
        self.shared.set_ends(stream.stream, Ends::AtPieces);
        Ok(stream)
    }
}

impl StreamWriter {
    fn open(shared: &Arc<Shared>, name: &str) -> Result<Self, WriteError> {
        Ok(Self {
            stream: shared.builder.open(name)?,
            shared: Arc::clone(shared),
            name: name.to_owned(),
            position: 0,
            raw_len: 0,
            current: None,
            state: StreamState::Open,
        })
    }

    /// Reads `source` to its end into the stream and returns the number of bytes. Blocks while the buffer is full.
    ///
    /// # Errors
    /// The source or the image failed. The stream cannot be finished then.
    pub fn copy_from(&mut self, source: &mut impl Read) -> Result<u64, WriteError> {
        let before = self.raw_len;
        loop {
            let filling = self.filling()?;
            match source.read(&mut filling.buffer[filling.len..]) {
                Ok(0) => return Ok(self.raw_len - before),
                Ok(len) => self.filled(len)?,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(self.source_error(error)),
            }
        }
    }

    /// Copies like [`StreamWriter::copy_from`] from a pipe, with `lanes` threads. Fewer than two lanes, or a short
    /// stream, are copied by this thread.
    ///
    /// # Errors
    /// The same as [`StreamWriter::copy_from`].
    pub fn copy_from_pipe(&mut self, pipe: &File, lanes: usize) -> Result<u64, WriteError> {
        let mut source = pipe;
        if lanes < 2 {
            return self.copy_from(&mut source);
        }
        let start = self.copy_from(&mut source.take(START_BYTES))?;
        if start < START_BYTES {
            return Ok(start);
        }
        match self.current.take() {
            None => Ok(start + self.copy_in_lanes(pipe, lanes, None)?),
            Some(Filling { buffer, len: 0 }) => {
                Ok(start + self.copy_in_lanes(pipe, lanes, Some(buffer))?)
            }
            // Lanes take complete pieces only, and this piece is partly filled.
            begun @ Some(_) => {
                self.current = begun;
                Ok(start + self.copy_from(&mut source)?)
            }
        }
    }

    /// Copies through lanes; `spare` is a buffer that the stream already holds.
    fn copy_in_lanes(
        &mut self,
        pipe: &File,
        count: usize,
        mut spare: Option<Buffer>,
    ) -> Result<u64, WriteError> {
        let before = self.raw_len;
        let shared = Arc::clone(&self.shared);
        let (shared, stream) = (&*shared, self.stream);
        std::thread::scope(|scope| {
            let take = move |buffer, (position, passing): (u32, Passing<'_>)| {
                take_piece(shared, stream, position, buffer);
                drop(passing); // only now that the queue has the piece
            };
            let lanes = Lanes::open(scope, count, take).map_err(|e| self.source_error(e))?;
            let ended = loop {
                let buffer = match spare.take() {
                    Some(buffer) => buffer,
                    None => shared.work_queue.acquire()?,
                };
                let passage = match lanes.fill(buffer, pipe) {
                    Ok(passage) if passage.is_full() => passage,
                    ended => break ended,
                };
                let position = self.next_position()?;
                self.raw_len += CHUNK_BYTES as u64;
                if let Err(error) =
                    lanes.complete(&passage, (position, shared.work_queue.passing()))
                {
                    break Err(error);
                }
            };
            let (buffer, len) = lanes.finish(ended).map_err(|e| self.source_error(e))?;
            self.current = Some(Filling { buffer, len });
            self.raw_len += len as u64;
            Ok(self.raw_len - before)
        })
    }

    fn source_error(&self, source: io::Error) -> WriteError {
        let stream = self.name.clone();
        WriteError::Source { stream, source }
    }

    /// Appends bytes to the stream. Blocks while the buffer is full.
    ///
    /// # Errors
    /// The image failed.
    pub fn write_all(&mut self, mut bytes: &[u8]) -> Result<(), WriteError> {
        while !bytes.is_empty() {
            let filling = self.filling()?;
            let len = bytes.len().min(CHUNK_BYTES - filling.len);
            let (now, rest) = bytes.split_at(len);
            filling.buffer[filling.len..filling.len + len].copy_from_slice(now);
            self.filled(len)?;
            bytes = rest;
        }
        Ok(())
    }

    /// Appends chunks of earlier images that are [stored](super::manifest_builder::ManifestBuilder::known).
    pub(super) fn append_known(&mut self, chunks: Vec<Known>) -> Result<(), WriteError> {
        self.shared.work_queue.check()?;
        self.end_piece()?;
        self.raw_len += chunks.iter().map(|chunk| u64::from(chunk.len)).sum::<u64>();
        let position = self.next_position()?;
        self.shared
            .work_queue
            .push_known(self.stream, position, chunks);
        Ok(())
    }

    /// Passes on the piece being filled.
    fn end_piece(&mut self) -> Result<(), WriteError> {
        let Some(Filling { buffer, len }) = self.current.take() else {
            return Ok(());
        };
        if len == 0 {
            self.shared.work_queue.release(buffer);
            return Ok(());
        }
        let position = self.next_position()?;
        let work_queue = &self.shared.work_queue;
        work_queue.push_last(self.stream, position, buffer, len);
        Ok(())
    }

    /// Ends the stream; returns its length.
    ///
    /// # Errors
    /// The image failed.
    pub fn finish(mut self) -> Result<u64, WriteError> {
        self.shared.work_queue.check()?;
        self.end_piece()?;
        self.shared.work_queue.push_end(self.stream, self.position);
        self.shared.builder.finish(self.stream, self.raw_len);
        self.state = StreamState::Finished;
        Ok(self.raw_len)
    }

    fn filling(&mut self) -> Result<&mut Filling, WriteError> {
        let filling = match self.current.take() {
            Some(filling) => filling,
            None => Filling {
                buffer: self.shared.work_queue.acquire()?,
                len: 0,
            },
        };
        Ok(self.current.insert(filling))
    }

    /// Counts `len` new bytes in the piece and passes it on if it is full.
    fn filled(&mut self, len: usize) -> Result<(), WriteError> {
        self.raw_len += len as u64;
        if let Some(filling) = &mut self.current {
            filling.len += len;
        }
        let is_full = |filling: &mut Filling| filling.len == CHUNK_BYTES;
        let Some(full) = self.current.take_if(is_full) else {
            return Ok(());
        };
        let position = self.next_position()?;
        let work_queue = &self.shared.work_queue;
        if chunk::is_zero(&full.buffer) {
            // The buffer is not used up: it is filled again.
            work_queue.push_zeros(self.stream, position);
            self.current = Some(Filling { len: 0, ..full });
        } else {
            work_queue.push(self.stream, position, full.buffer, CHUNK_BYTES);
        }
        Ok(())
    }

    fn next_position(&mut self) -> Result<u32, WriteError> {
        if self.position == PIECES_MAX {
            return Err(WriteError::TooManyChunks);
        }
        self.position += 1;
        Ok(self.position - 1)
    }
}

/// Passes on a full piece that a lane has copied.
fn take_piece(shared: &Shared, stream: u32, position: u32, buffer: Buffer) {
    if chunk::is_zero(&buffer) {
        shared.work_queue.release(buffer);
        shared.work_queue.push_zeros(stream, position);
    } else {
        shared
            .work_queue
            .push(stream, position, buffer, CHUNK_BYTES);
    }
}

impl Drop for StreamWriter {
    fn drop(&mut self) {
        if let Some(filling) = self.current.take() {
            self.shared.work_queue.release(filling.buffer);
        }
        match self.state {
            StreamState::Finished => {}
            StreamState::Open => self.shared.work_queue.stop(WriteError::StreamUnfinished {
                stream: std::mem::take(&mut self.name),
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::os::fd::OwnedFd;

    use super::*;
    use crate::store::format::codec::tests::noise;
    use crate::store::tests::support::{OPTIONS, read_stream, temporary_store};

    /// Writes `head`, then `tail` through a pipe; returns the number of buffers that were not returned.
    fn buffers_lost(head: &[u8], tail: &[u8]) -> usize {
        let (_folder, store) = temporary_store();
        let lock = store.lock().unwrap();
        let mut writer = store.begin(&lock, OPTIONS).unwrap();
        writer.start_workers();
        let mut stream = writer.stream("pages").unwrap();
        let shared = Arc::clone(&stream.shared);
        let (pipe, mut sink) = io::pipe().unwrap();
        let pipe = File::from(OwnedFd::from(pipe));
        std::thread::scope(|scope| {
            scope.spawn(move || sink.write_all(tail).unwrap());
            stream.write_all(head).unwrap();
            let copied = stream.copy_from_pipe(&pipe, 2).unwrap();
            assert_eq!(copied, tail.len() as u64);
        });
        stream.finish().unwrap();
        writer.settle().unwrap();
        let id = writer.commit(b"").unwrap().id;
        assert!(read_stream(&store, id, "pages") == [head, tail].concat());
        shared.work_queue.buffers_lost()
    }

    #[test]
    fn a_pipe_after_other_bytes_is_appended_to_them() {
        buffers_lost(b"begun", &noise(3, 6 * CHUNK_BYTES));
    }

    #[test]
    fn every_buffer_is_returned_from_lanes() {
        for extra in [0, 5] {
            let bytes = noise(4, 6 * CHUNK_BYTES + extra);
            assert_eq!(buffers_lost(b"", &bytes), 0, "{extra}");
        }
    }
}
