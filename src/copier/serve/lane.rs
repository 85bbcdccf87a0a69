//! Thread of a lane: copies between GPU memory and memory shared with the supervisor, one request at a time. During a
//! copy of one half, the supervisor works on the other.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::thread;

use super::gpus::Programs;
use super::segments::{Segment, Segments};
use crate::copier::wire::{Direction, LANE_BYTES, LaneRequest, Refusal, Reply, Socket, short};
use crate::cuda::GpuUuid;
use crate::cuda::device::{
    BLOCK_BYTES, Context, DeviceError, DeviceMemory, FINGERPRINT_BYTES, Pinned, Stream,
};
use crate::shared_memory::SharedMemory;
use crate::sync::locked;

/// Size of a lane's memory for fingerprints on a GPU.
const RESULTS_BYTES: u64 = 16 << 10;
/// Maximum number of blocks whose fingerprints are computed at once.
const BLOCKS_MAX: u64 = RESULTS_BYTES / FINGERPRINT_BYTES as u64;

/// State of a lane's thread.
#[derive(Debug)]
pub(super) struct LaneThread {
    socket: Socket,
    segments: Arc<Segments>,
    memory: Pinned,
    streams: HashMap<GpuUuid, Stream>,
    programs: Programs,
    /// Memory for fingerprints on each GPU.
    results: HashMap<GpuUuid, DeviceMemory>,
}

impl LaneThread {
    /// Performs all slow preparations, then starts the thread. The thread ends with the connection.
    pub(super) fn start<'a>(
        (socket, memory): (Socket, &OwnedFd),
        contexts: impl Iterator<Item = &'a Context>,
        segments: Arc<Segments>,
        programs: Programs,
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
            programs,
            results: HashMap::new(),
        };
        thread::Builder::new()
            .name("lane".to_owned())
            .spawn(move || lane.serve())
            .map(drop)
            .map_err(|error| Refusal::Request(short(format!("cannot start a thread: {error}"))))
    }

    fn serve(&mut self) {
        while let Ok(Some((request, _))) = self.socket.receive::<LaneRequest>() {
            let done = match request.direction {
                Direction::Fingerprint => self.fingerprint(request),
                Direction::Drain | Direction::Fill => self.copy(request),
            };
            let reply = match done {
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
                Direction::Fingerprint => {}
            }
            // A copy of this length was within the lane's memory.
            at += len;
        }
        Ok(())
    }
}

impl LaneThread {
    /// Computes the fingerprints of a part into the lane's memory.
    fn fingerprint(&mut self, request: LaneRequest) -> Result<(), Refusal> {
        let LaneRequest { part, .. } = request;
        let segment = self.segments.of(part)?;
        let context = segment.context();
        let program = locked(&self.programs).get(&context.gpu()).map(Arc::clone);
        let program =
            program.ok_or_else(|| Refusal::request("this GPU computes no fingerprints"))?;
        let stream = stream(&mut self.streams, &segment)?;
        let results = match self.results.entry(context.gpu()) {
            Entry::Occupied(found) => found.into_mut(),
            Entry::Vacant(place) => place.insert(context.allocate(RESULTS_BYTES)?),
        };
        let mut at = request.at;
        for extent in segment.extents_of(part.start..part.end, BLOCKS_MAX * BLOCK_BYTES) {
            if !extent.len.is_multiple_of(BLOCK_BYTES) {
                return Err(Refusal::request("the part is not of whole blocks"));
            }
            let count = extent.len / BLOCK_BYTES;
            let blocks = (&*extent.memory, extent.offset, count);
            program.compute(stream, blocks, results, (&self.memory, at))?;
            at += count * FINGERPRINT_BYTES as u64;
        }
        Ok(())
    }
}

/// Returns the stream of the segment's GPU, which may have been opened after the lane.
fn stream<'a>(
    streams: &'a mut HashMap<GpuUuid, Stream>,
    segment: &Segment,
) -> Result<&'a Stream, Refusal> {
    let context = segment.context();
    Ok(match streams.entry(context.gpu()) {
        Entry::Occupied(found) => found.into_mut(),
        Entry::Vacant(place) => place.insert(Stream::new(context)?),
    })
}
