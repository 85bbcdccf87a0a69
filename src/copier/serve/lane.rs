//! A lane's thread: while the GPU copies one buffer, the other goes through the pipe.
//!
//! ```text
//! drain   GPU ─▶ [buffer] [buffer] ─▶ pipe        fill   pipe ─▶ [buffer] [buffer] ─▶ GPU
//! ```
//! Pages are copied into the pipe, not lent to it: when a lent page has been read, nobody tells.

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, ErrorKind, Read, Write};
use std::mem::swap;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileTypeExt;
use std::sync::Arc;
use std::thread;

use nix::fcntl::{FcntlArg, OFlag, fcntl};

use super::segments::{Extent, Segment, Segments};
use crate::copier::wire::{LaneRequest, Part, Refusal, Reply, Socket, short};
use crate::cuda::GpuUuid;
use crate::cuda::device::{Context, DeviceError, Pinned, Stream};

/// One buffer: enough for the copy over the bus to go at full speed, and small to pin.
const BUFFER_BYTES: usize = 16 << 20;

/// What a lane's thread has.
#[derive(Debug)]
pub(super) struct LaneThread {
    socket: Socket,
    segments: Arc<Segments>,
    buffers: [Pinned; 2],
    streams: HashMap<GpuUuid, Stream>,
}

impl LaneThread {
    /// Makes all that takes time, then starts the thread. It ends with the connection.
    pub(super) fn start<'a>(
        socket: Socket,
        contexts: impl Iterator<Item = &'a Context>,
        segments: Arc<Segments>,
    ) -> Result<(), Refusal> {
        let mut contexts = contexts.peekable();
        let &any = contexts
            .peek()
            .ok_or_else(|| Refusal::request("no GPU was opened"))?;
        let buffers = [
            Pinned::new(any, BUFFER_BYTES)?,
            Pinned::new(any, BUFFER_BYTES)?,
        ];
        let streams = contexts
            .map(|context| Ok((context.gpu(), Stream::new(context)?)))
            .collect::<Result<_, DeviceError>>()?;
        let mut lane = Self {
            socket,
            segments,
            buffers,
            streams,
        };
        thread::Builder::new()
            .name("lane".to_owned())
            .spawn(move || lane.serve())
            .map(drop)
            .map_err(|error| Refusal::Request(short(format!("start a thread: {error}"))))
    }

    fn serve(&mut self) {
        while let Ok(Some((request, descriptors))) = self.socket.receive::<LaneRequest>() {
            // The pipe is closed by then, so that its other end sees no writer but the caller.
            let reply = match self.answer(&request, descriptors) {
                Ok(()) => Reply::Done,
                Err(refusal) => Reply::Failed(refusal),
            };
            if self.socket.send(&reply, &[]).is_err() {
                return;
            }
        }
    }

    fn answer(&mut self, request: &LaneRequest, descriptors: Vec<OwnedFd>) -> Result<(), Refusal> {
        let [descriptor] = <[OwnedFd; 1]>::try_from(descriptors)
            .map_err(|_| Refusal::request("one pipe has to come along"))?;
        let pipe = pipe(descriptor)?;
        match request {
            LaneRequest::Drain(part) => self.drain(*part, &pipe),
            LaneRequest::Fill(part) => self.fill(*part, &pipe),
        }
    }

    fn drain(&mut self, part: Part, mut pipe: &File) -> Result<(), Refusal> {
        let segment = self.segments.of(part)?;
        let stream = stream(&mut self.streams, &segment)?;
        let [mut full, mut empty] = self.buffers.each_mut();
        let mut ready = 0;
        for extent in pieces(&segment, part) {
            let len = host_len(&extent);
            let write = || pipe.write_all(&full[..ready]);
            stream
                .read(&extent.memory, extent.offset, empty, len, write)?
                .map_err(|error| pipe_failed(&error))?;
            swap(&mut full, &mut empty);
            ready = len;
        }
        pipe.write_all(&full[..ready])
            .map_err(|error| pipe_failed(&error))
    }

    fn fill(&mut self, part: Part, pipe: &File) -> Result<(), Refusal> {
        let segment = self.segments.of(part)?;
        if segment.safe > 0 {
            return Err(Refusal::request("the segment has a shadow"));
        }
        let stream = stream(&mut self.streams, &segment)?;
        let [mut full, mut empty] = self.buffers.each_mut();
        let mut left = part.end - part.start;
        let mut before: Option<Extent> = None;
        for extent in pieces(&segment, part) {
            let mut read = || read_fully(pipe, &mut empty[..host_len(&extent)]);
            let missing = match &before {
                None => read(),
                Some(to) => stream.write(&to.memory, to.offset, full, host_len(to), read)?,
            };
            match missing.map_err(|error| pipe_failed(&error))? {
                0 => {}
                missing => {
                    let missing = left - extent.len + missing as u64;
                    return Err(Refusal::Short { missing });
                }
            }
            swap(&mut full, &mut empty);
            left -= extent.len;
            before = Some(extent);
        }
        match &before {
            Some(to) => Ok(stream.write(&to.memory, to.offset, full, host_len(to), || ())?),
            None => Ok(()),
        }
    }
}

/// The stream of the segment's GPU, which may have been opened after the lane.
fn stream<'a>(
    streams: &'a mut HashMap<GpuUuid, Stream>,
    segment: &Segment,
) -> Result<&'a Stream, Refusal> {
    use std::collections::hash_map::Entry;
    let context = segment.context();
    Ok(match streams.entry(context.gpu()) {
        Entry::Occupied(found) => found.into_mut(),
        Entry::Vacant(place) => place.insert(Stream::new(context)?),
    })
}

fn pieces(segment: &Segment, part: Part) -> impl Iterator<Item = Extent> {
    segment.extents_of(part.start..part.end, BUFFER_BYTES as u64)
}

/// Pieces are no longer than a buffer.
fn host_len(piece: &Extent) -> usize {
    usize::try_from(piece.len).map_or(BUFFER_BYTES, |len| len.min(BUFFER_BYTES))
}

/// The descriptor as a pipe whose ends wait for each other.
fn pipe(descriptor: OwnedFd) -> Result<File, Refusal> {
    let flags =
        fcntl(&descriptor, FcntlArg::F_GETFL).map_err(|error| pipe_failed(&error.into()))?;
    let file = File::from(descriptor);
    let kind = file.metadata().map_err(|error| pipe_failed(&error))?;
    if !kind.file_type().is_fifo() || OFlag::from_bits_truncate(flags).contains(OFlag::O_NONBLOCK) {
        return Err(Refusal::Pipe(
            "what came along is no blocking pipe".to_owned(),
        ));
    }
    Ok(file)
}

/// Fills the buffer; how many bytes are missing when the pipe ends before.
fn read_fully(mut pipe: &File, mut buffer: &mut [u8]) -> io::Result<usize> {
    while !buffer.is_empty() {
        match pipe.read(buffer) {
            Ok(0) => break,
            Ok(len) => buffer = &mut buffer[len..],
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(buffer.len())
}

fn pipe_failed(error: &io::Error) -> Refusal {
    Refusal::Pipe(short(format!("use the pipe: {error}")))
}
