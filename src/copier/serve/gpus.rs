//! Opened GPUs, and the memory reserved on them for shadows.

use std::collections::{HashMap, HashSet, VecDeque};
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex};

use super::segments::{Extent, Segment, Segments};
use crate::copier::wire::{KEYS_BYTES, Refusal};
use crate::cuda::GpuUuid;
use crate::cuda::device::{
    Context, DeviceApi, DeviceCopy, DeviceError, DeviceMemory, Fingerprinter, Room, Stream,
    copy_all,
};
use crate::shared_memory::SharedMemory;
use crate::sync::locked;

/// Size of a shadow allocation. Several allocations let the memory be freed in steps as segments are released; an
/// allocation takes less than a millisecond.
const PIECE_BYTES: u64 = 1 << 30;

/// Opened GPUs; they stay open until the process exits.
#[derive(Debug, Default)]
pub(super) struct Gpus {
    api: Option<DeviceApi>,
    keys: Option<OwnedFd>,
    open: HashMap<GpuUuid, Gpu>,
    programs: Programs,
}

/// Programs of the GPUs that can compute fingerprints, shared with the lanes.
pub(super) type Programs = Arc<Mutex<HashMap<GpuUuid, Arc<Fingerprinter>>>>;

#[derive(Debug)]
struct Gpu {
    context: Context,
    stream: Stream,
    reserved: Reserved,
}

impl Gpus {
    pub(super) fn api(&mut self) -> Result<&DeviceApi, Refusal> {
        Ok(match &mut self.api {
            Some(api) => api,
            none => none.insert(DeviceApi::load()?),
        })
    }

    pub(super) fn open(&mut self, gpu: GpuUuid) -> Result<Room, Refusal> {
        if !self.open.contains_key(&gpu) {
            let context = self.api()?.context(gpu)?;
            let stream = Stream::new(&context)?;
            let reserved = Reserved::default();
            if let Some(program) = self.program(&context) {
                locked(&self.programs).insert(gpu, Arc::new(program));
            }
            self.open.insert(
                gpu,
                Gpu {
                    context,
                    stream,
                    reserved,
                },
            );
        }
        Ok(self.context(gpu)?.free_and_total()?)
    }

    /// Keeps the keys for GPUs that are opened from now on.
    pub(super) fn set_keys(&mut self, keys: OwnedFd) {
        self.keys = Some(keys);
    }

    /// Returns the program for fingerprints; `None` without keys or if the driver cannot compile it.
    fn program(&self, context: &Context) -> Option<Fingerprinter> {
        let keys = SharedMemory::open(self.keys.as_ref()?, KEYS_BYTES).ok()?;
        context
            .fingerprinter(&keys)
            .inspect_err(|error| tracing::debug!(%error, "this GPU computes no fingerprints"))
            .ok()
    }

    pub(super) fn programs(&self) -> Programs {
        Arc::clone(&self.programs)
    }

    pub(super) fn context(&self, gpu: GpuUuid) -> Result<&Context, Refusal> {
        let found = self.open.get(&gpu).map(|gpu| &gpu.context);
        found.ok_or_else(|| not_open(gpu))
    }

    /// Returns the contexts of all GPUs.
    pub(super) fn contexts(&self) -> impl Iterator<Item = &Context> {
        self.open.values().map(|gpu| &gpu.context)
    }

    pub(super) fn reserve(&mut self, gpu: GpuUuid, bytes: u64) -> Result<(), Refusal> {
        let found = self.open.get_mut(&gpu).ok_or_else(|| not_open(gpu))?;
        let free = found.context.free_and_total()?.free;
        if bytes > free {
            let text = format!("{gpu} has {free} bytes free, but {bytes} are needed");
            return Err(Refusal::OutOfMemory(text));
        }
        found.reserved.grow(&found.context, bytes)?;
        Ok(())
    }

    /// Copies segments; see [`crate::copier::Copier::shadow`].
    pub(super) fn shadow(
        &mut self,
        segments: &Segments,
        ids: &[u64],
        last: bool,
    ) -> Result<Vec<u64>, Refusal> {
        if ids.iter().collect::<HashSet<_>>().len() < ids.len() {
            return Err(Refusal::request("a segment is named twice"));
        }
        let originals = ids
            .iter()
            .map(|id| segments.get(*id))
            .collect::<Result<Vec<_>, _>>()?;
        // The plan uses copies, so that nothing is lost if the copying fails.
        let mut reserved: HashMap<GpuUuid, Reserved> = self
            .open
            .iter()
            .map(|(gpu, found)| (*gpu, found.reserved.clone()))
            .collect();
        let plans: Vec<Vec<Extent>> = originals
            .iter()
            .map(|segment| plan(segment, &mut reserved))
            .collect();
        self.copy(&originals, &plans)?;
        for (gpu, left) in reserved {
            if let Some(gpu) = self.open.get_mut(&gpu) {
                gpu.reserved = if last { Reserved::default() } else { left };
            }
        }
        let mut safe = Vec::with_capacity(ids.len());
        for ((id, original), shadow) in ids.iter().zip(&originals).zip(plans) {
            if shadow.is_empty() {
                safe.push(original.safe);
                continue;
            }
            let segment = original.shadowed(shadow);
            safe.push(segment.safe);
            segments.replace(*id, segment);
        }
        Ok(safe)
    }

    fn copy(&self, originals: &[Arc<Segment>], plans: &[Vec<Extent>]) -> Result<(), Refusal> {
        let mut sources = Vec::new();
        for (original, shadow) in originals.iter().zip(plans) {
            let mut at = 0;
            for to in shadow {
                let from = original.extents_of(at..at + to.len, u64::MAX);
                sources.extend(from.map(|from| (from, to)));
                at += to.len;
            }
        }
        let copies = sources
            .iter()
            .map(|(from, to)| {
                let gpu = from.memory.context().gpu();
                let gpu = self.open.get(&gpu).ok_or_else(|| not_open(gpu))?;
                Ok(DeviceCopy {
                    stream: &gpu.stream,
                    from: &from.memory,
                    from_offset: from.offset,
                    to: &to.memory,
                    to_offset: to.offset,
                    len: to.len,
                })
            })
            .collect::<Result<Vec<_>, Refusal>>()?;
        Ok(copy_all(&copies)?)
    }
}

/// Plans the shadow of a segment's beginning; none if the segment has a shadow already.
fn plan(segment: &Segment, reserved: &mut HashMap<GpuUuid, Reserved>) -> Vec<Extent> {
    let room = reserved.get_mut(&segment.context().gpu());
    match room {
        Some(room) if segment.safe == 0 => room.take(segment.len),
        Some(_) | None => Vec::new(),
    }
}

fn not_open(gpu: GpuUuid) -> Refusal {
    Refusal::Request(format!("{gpu} was not opened"))
}

/// Memory reserved for shadows. Memory in use is held by the segments alone.
#[derive(Debug, Default, Clone)]
struct Reserved {
    pieces: VecDeque<Piece>,
}

#[derive(Debug, Clone)]
struct Piece {
    memory: Arc<DeviceMemory>,
    used: u64,
}

impl Reserved {
    /// Grows by `bytes`, or not at all.
    fn grow(&mut self, context: &Context, bytes: u64) -> Result<(), DeviceError> {
        let mut more = VecDeque::new();
        let mut left = bytes;
        while left > 0 {
            let memory = Arc::new(context.allocate(left.min(PIECE_BYTES))?);
            left -= memory.len();
            more.push_back(Piece { memory, used: 0 });
        }
        self.pieces.append(&mut more);
        Ok(())
    }

    /// Takes `len` bytes, or the rest.
    fn take(&mut self, len: u64) -> Vec<Extent> {
        let mut taken = Vec::new();
        let mut left = len;
        while left > 0
            && let Some(piece) = self.pieces.front_mut()
        {
            let len = left.min(piece.memory.len() - piece.used);
            taken.push(Extent {
                memory: Arc::clone(&piece.memory),
                offset: piece.used,
                len,
            });
            piece.used += len;
            left -= len;
            if piece.used == piece.memory.len() {
                self.pieces.pop_front();
            }
        }
        taken
    }
}
