//! Thread of a lane: copies between GPU memory and memory shared with the supervisor, one request at a time. During a
//! copy of one half, the supervisor works on the other.

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::thread;

use super::segments::{Segment, Segments};
use crate::copier::wire::{Direction, LANE_BYTES, LaneRequest, Refusal, Reply, Socket, short};
use crate::cuda::GpuUuid;
use crate::cuda::device::{Context, DeviceError, Pinned, Stream};
use crate::shared_memory::SharedMemory;

/// State of a lane's thread.
#[derive(Debug)]
pub(super) struct LaneThread {
    socket: Socket,
    segments: Arc<Segments>,
    memory: Pinned,
    streams: HashMap<GpuUuid, Stream>,
}

impl LaneThread {
    /// Performs all slow preparations, then starts the thread. The thread ends with the connection.
    pub(super) fn start<'a>(
        socket: Socket,
        memory: &OwnedFd,
        contexts: impl Iterator<Item = &'a Context>,
        segments: Arc<Segments>,
    ) -> Result<(), Refusal> {
        let mut contexts = contexts.peekable();
        let &any = contexts
            .peek()
            .ok_or_else(|| Refusal::request("no GPU was opened"))?;
        let memory = SharedMemory::open(memory, LANE_BYTES).map_err(|error| {
            Refusal::Request(short(format!("cannot map a lane's memory: {error}")))
        })?;
        let memory = Pinned::new(any, memory)?;
        let streams = contexts
            .map(|context| Ok((context.gpu(), Stream::new(context)?)))
            .collect::<Result<_, DeviceError>>()?;
        let mut lane = Self {
            socket,
            segments,
            memory,
            streams,
        };
        thread::Builder::new()
            .name("lane".to_owned())
            .spawn(move || lane.serve())
            .map(drop)
            .map_err(|error| Refusal::Request(short(format!("cannot start a thread: {error}"))))
    }

    fn serve(&mut self) {
        while let Ok(Some((request, _))) = self.socket.receive::<LaneRequest>() {
            let reply = match self.copy(request) {
                Ok(()) => Reply::Done,
                Err(refusal) => Reply::Failed(refusal),
            };
            if self.socket.send(&reply, &[]).is_err() {
                return;
            }
        }
    }

    fn copy(&mut self, request: LaneRequest) -> Result<(), Refusal> {
        let LaneRequest {
            direction, part, ..
        } = request;
        let segment = self.segments.of(part)?;
        if direction == Direction::Fill && segment.safe > 0 {
            return Err(Refusal::request("the segment has a shadow"));
        }
        let stream = stream(&mut self.streams, &segment)?;
        let mut at = request.at;
        for extent in segment.extents_of(part.start..part.end, u64::MAX) {
            let (memory, offset, len) = (&extent.memory, extent.offset, extent.len);
            match direction {
                Direction::Drain => stream.read(memory, offset, &self.memory, at, len)?,
                Direction::Fill => stream.write(memory, offset, &self.memory, at, len)?,
            }
            // A copy of this length was within the lane's memory.
            at += len;
        }
        Ok(())
    }
}

/// Returns the stream of the segment's GPU, which may have been opened after the lane.
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
