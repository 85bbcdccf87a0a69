//! Transfer of device memory to and from an image, by a copier process with parallel lanes.
//!
//! ```text
//! GPU ─▶ copier's lane ─▶ stream of the image        one part of a segment at a time, in both directions
//! ```

use std::collections::BTreeSet;
use std::ops::Range;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use super::super::error::GpuError;
use super::error::ResidentError;
use super::image_fingerprints::{ImageFingerprints, Keys};
use super::kept_memory::KeptMemory;
use super::known_blocks::{Changes, Place};
use super::refill::Memory;
use crate::agent_client::{Held, Segment};
use crate::copier::{Copier, CopierError, Fingerprint, Lane, SegmentId};
use crate::cuda::GpuUuid;
use crate::run::resident_facts::{Part, ResidentFacts};
use crate::store::{ImageReader, StreamOpener, StreamReader, StreamWriter};
use crate::sync::locked;

/// Maximum number of lanes: each keeps a core busy, with copies of some GB/s or with decompression of one GB/s, and the
/// bus carries 54 GB/s.
const LANES_MAX: usize = 32;
const _: () = assert!(Lane::ROOM >= StreamReader::ROOM_MIN);
/// Divisor for the share of a GPU's memory that a shadow leaves free, for the job's allocations until the shadow is in
/// the image, some seconds later.
const SHADOW_LEAVES: u64 = 16;
/// Niceness of a lane's thread that reads memory into an image, while CRIU dumps and then the job computes.
const NICENESS_DRAIN: i32 = 5;
/// Niceness of a lane's thread that fills memory. Meanwhile CRIU creates the processes, which takes almost twice as long
/// if the lanes take its processors.
const NICENESS_FILL: i32 = 15;
/// Time limit for a piece in any lane, including slow disks: if all lanes share one disk, it transfers a piece of each
/// in this time (128 MiB, at 1.5 MB/s). Without a limit, a hanging copier would block the job for ever.
const PIECE_LIMIT: Duration = Duration::from_secs(90);
const _: () = assert!(LANES_MAX * Lane::ROOM <= 128 << 20);

/// Copier with its lanes.
#[derive(Debug)]
pub(crate) struct CopyLanes {
    copier: Copier,
    /// Keys of the fingerprints.
    keys: Option<Keys>,
    lanes: Mutex<Vec<Lane>>,
}

/// Memory that the copier has imported.
#[derive(Debug)]
pub(crate) struct TakenMemory {
    parts: Vec<Part>,
    segments: Vec<SegmentId>,
    /// Process and address of each segment.
    places: Vec<(i32, u64)>,
    /// Number of bytes from the beginning of each segment that have a shadow; the job may change the original.
    safe: Vec<u64>,
}

impl TakenMemory {
    /// Writes the fingerprints of all its memory, which is drained, into the image.
    pub fn write_fingerprints(
        &self,
        streams: &StreamOpener,
        changes: &Changes,
    ) -> Result<(), GpuError> {
        let place = |part: &Part| Place::of(self.places[part.segment], part);
        Ok(changes.write_fingerprints(self.parts.iter().map(place), streams)?)
    }
}

/// Thread that takes over memory.
pub(crate) type TakeOver = JoinHandle<Result<TakenMemory, GpuError>>;

impl CopyLanes {
    /// Creates contexts of the copier on these GPUs, and its lanes. The GPUs compute fingerprints with `keys`.
    pub fn begin(
        copier: Copier,
        gpus: &[GpuUuid],
        keys: Option<Keys>,
    ) -> Result<Self, ResidentError> {
        if let Some(keys) = &keys {
            copier.use_keys(keys)?;
        }
        let copy_lanes = Self {
            lanes: Mutex::default(),
            copier,
            keys,
        };
        copy_lanes.open(gpus)?;
        let lanes = copy_lanes.open_lanes()?;
        tracing::debug!("the copier is ready");
        Ok(Self {
            lanes: Mutex::new(lanes),
            ..copy_lanes
        })
    }

    /// Opens all lanes at once, because the kernel clears their memory.
    fn open_lanes(&self) -> Result<Vec<Lane>, ResidentError> {
        let cores = thread::available_parallelism().map_or(1, usize::from);
        thread::scope(|scope| {
            let opening: Vec<_> = (0..cores.clamp(1, LANES_MAX))
                .map(|_| scope.spawn(|| self.copier.lane()))
                .collect();
            let opened = opening.into_iter().map(|thread| match thread.join() {
                Ok(lane) => Ok(lane?),
                Err(_) => Err(ResidentError::Panicked),
            });
            opened.collect()
        })
    }

    pub fn keys(&self) -> Option<Keys> {
        self.keys.clone()
    }

    /// Ends the copier without waiting for its exit.
    pub fn leave(self) {
        self.copier.leave();
    }

    /// Creates contexts on those of the GPUs that have none.
    pub fn open(&self, gpus: &[GpuUuid]) -> Result<(), ResidentError> {
        for gpu in gpus {
            self.copier.open(*gpu)?;
        }
        Ok(())
    }

    /// Returns the free memory of a GPU, less the share left to others, in bytes.
    pub fn room(&self, gpu: GpuUuid) -> Result<u64, ResidentError> {
        let room = self.copier.open(gpu)?;
        Ok(room.free.saturating_sub(room.total / SHADOW_LEAVES))
    }

    /// Reserves memory for shadows of up to the given sizes on the GPUs, as far as there is room; returns the total
    /// size.
    pub fn make_room(&self, shadows: &[(GpuUuid, u64)]) -> Result<u64, ResidentError> {
        let mut reserved = 0;
        for (gpu, bytes) in shadows {
            let wanted = (*bytes).min(self.room(*gpu)?);
            match self.copier.reserve(*gpu, wanted) {
                Ok(bytes) => {
                    tracing::debug!(%gpu, bytes, "room for a shadow");
                    reserved += bytes;
                }
                // Other processes took the memory: then the data go directly into the image.
                Err(error @ CopierError::OutOfMemory { .. }) => {
                    tracing::debug!(%gpu, %error, "no room for a shadow");
                }
                Err(error) => return Err(error.into()),
            }
        }
        Ok(reserved)
    }

    /// Imports the kept memory and copies the part without a shadow into the image, on a thread: meanwhile the driver
    /// suspends the rest, and CRIU dumps.
    pub fn take(
        self: &Arc<Self>,
        kept: &KeptMemory,
        streams: &StreamOpener,
        changes: &Arc<Changes>,
    ) -> Result<TakeOver, ResidentError> {
        let facts = kept.facts();
        let held = kept.processes().iter().flat_map(|process| &process.held);
        let originals = facts.segments().zip(held);
        let originals = originals.filter(|(segment, _)| segment.same_as.is_none());
        let copy = |(_, held): (_, &Held)| {
            Ok(Held {
                segment: held.segment,
                descriptor: held.descriptor.try_clone()?,
            })
        };
        let memory: Vec<Held> = originals.map(copy).collect::<std::io::Result<_>>()?;
        let (copy_lanes, streams) = (Arc::clone(self), streams.clone());
        let changes = Arc::clone(changes);
        let taking = thread::Builder::new().name("gpu-take".to_owned());
        Ok(taking.spawn(move || {
            let taken = copy_lanes.take_over(&facts, &memory)?;
            copy_lanes.drain(&taken, Shadowed::No, &streams, &changes)?;
            copy_lanes.leave_originals(&taken)?;
            Ok(taken)
        })?)
    }

    fn take_over(
        &self,
        facts: &ResidentFacts,
        memory: &[Held],
    ) -> Result<TakenMemory, ResidentError> {
        let gpu = |held: &Held| GpuUuid::from_bytes(held.segment.device);
        // The driver does not list the GPUs of a process that has just started.
        let gpus: BTreeSet<GpuUuid> = memory.iter().map(gpu).collect();
        for gpu in gpus {
            self.copier.open(gpu)?;
        }
        let segments = self.import(memory.iter().map(|held| (gpu(held), held)))?;
        Ok(TakenMemory {
            safe: self.copier.shadow(&segments)?,
            parts: facts.parts(),
            places: facts.places(),
            segments,
        })
    }

    /// Reads memory into streams: the part without a shadow while the job is frozen, or the rest, whose shadow is freed
    /// segment by segment.
    pub fn drain(
        &self,
        taken: &TakenMemory,
        shadowed: Shadowed,
        streams: &StreamOpener,
        changes: &Changes,
    ) -> Result<(), GpuError> {
        let wanted = |part: &&Part| {
            let safe = part.end <= taken.safe[part.segment];
            safe == (shadowed == Shadowed::Yes)
        };
        let parts: Vec<&Part> = taken.parts.iter().filter(wanted).collect();
        let left: Vec<AtomicUsize> = taken.segments.iter().map(|_| AtomicUsize::new(0)).collect();
        for part in &parts {
            left[part.segment].fetch_add(1, Ordering::Relaxed);
        }
        let copy = |lane: &mut Lane, part: &Part, stream: &mut StreamWriter, tell: &dyn Fn()| {
            let id = taken.segments[part.segment];
            let place = Place::of(taken.places[part.segment], part);
            let fingerprints = lane.fingerprints(id, part.begin..part.end).ok();
            let found = fingerprints.map(|found| (&*part.stream, found));
            changes.append(place, found, stream, |stream, range| {
                let range = part.begin + range.start..part.begin + range.end;
                lane.drain(id, range, |bytes| {
                    stream.write_all(bytes)?;
                    tell();
                    Ok(())
                })
            })
        };
        let finish = |part: &Part, stream: StreamWriter| {
            stream.finish()?;
            let was_last = left[part.segment].fetch_sub(1, Ordering::Relaxed) == 1;
            if was_last && shadowed == Shadowed::Yes {
                // The job may need this memory.
                self.copier.release(&[taken.segments[part.segment]])?;
            }
            Ok(())
        };
        let open = |part: &Part| Ok(streams.open_in_place(&part.stream)?);
        self.side_by_side(&parts, NICENESS_DRAIN, open, copy, finish)
    }

    /// Releases originals that will not be read any more, so that the job can free them.
    fn leave_originals(&self, taken: &TakenMemory) -> Result<(), ResidentError> {
        let segments = taken.segments.iter().zip(&taken.safe);
        let unsafe_ones = segments.filter(|(_, safe)| **safe == 0);
        let originals: Vec<SegmentId> = unsafe_ones.map(|(segment, _)| *segment).collect();
        Ok(self.copier.release(&originals)?)
    }

    /// Creates memory for an image's processes. `map` contains the replaced GPUs.
    pub fn make(
        &self,
        facts: &ResidentFacts,
        map: impl Fn(&str) -> Option<GpuUuid>,
    ) -> Result<(Memory, Vec<SegmentId>), ResidentError> {
        let mut made: Vec<Held> = Vec::new();
        let mut segments = Vec::new();
        for segment in facts.segments() {
            let gpu = map(&segment.gpu).ok_or(ResidentError::Facts)?;
            let descriptor = if let Some(place) = segment.same_as {
                let original = made.get(place).ok_or(ResidentError::Facts)?;
                original.descriptor.try_clone()?
            } else {
                let (id, descriptor) = self.copier.create(gpu, segment.len)?;
                segments.push(id);
                descriptor
            };
            made.push(Held {
                segment: Segment {
                    address: segment.address,
                    len: segment.len,
                    device: *gpu.as_bytes(),
                },
                descriptor,
            });
        }
        let mut made = made.into_iter();
        let processes = facts.processes.iter();
        let memory = processes.map(|process| {
            let own = made.by_ref().take(process.segments.len());
            (process.pid, own.collect())
        });
        Ok((memory.collect(), segments))
    }

    /// Imports memory that others created on these GPUs, to fill it.
    pub fn import<'a>(
        &self,
        memory: impl Iterator<Item = (GpuUuid, &'a Held)>,
    ) -> Result<Vec<SegmentId>, ResidentError> {
        let import = |(gpu, held): (GpuUuid, &Held)| {
            let descriptor = held.descriptor.as_fd();
            Ok(self.copier.import(gpu, descriptor, held.segment.len)?)
        };
        memory.map(import).collect()
    }

    /// Fills the memory of an image's processes from the image's streams. The GPU compares it with the image's
    /// fingerprints; without them, each chunk is compared with its name. Returns the fingerprints of the blocks.
    pub fn fill<'a>(
        &self,
        facts: &ResidentFacts,
        segments: &[SegmentId],
        image: &'a ImageReader,
        fingerprints: Option<&ImageFingerprints>,
    ) -> Result<Changes, ResidentError> {
        let (parts, places) = (facts.parts(), facts.places());
        let found = Changes::with(self.keys.clone());
        let fingerprints = fingerprints.filter(|image| Some(image.keys()) == self.keys.as_ref());
        // False once the GPU has computed no fingerprints, so that not each part is filled twice.
        let are_computed = AtomicBool::new(true);
        let parts: Vec<&Part> = parts.iter().collect();
        let open = |part: &Part| {
            let stream = image.open(&part.stream)?;
            if stream.stream_len() == part.end - part.begin {
                Ok(stream)
            } else {
                Err(ResidentError::Facts)
            }
        };
        let copy = |lane: &mut Lane,
                    part: &Part,
                    stream: &mut StreamReader<'a>,
                    tell: &dyn Fn()| {
            let memory = (segments[part.segment], part.begin..part.end);
            let place = Place::of(places[part.segment], part);
            let expected = fingerprints.and_then(|image| image.of(part));
            let expected = expected.filter(|_| are_computed.load(Ordering::Relaxed));
            if expected.is_some() {
                stream.trust();
            }
            let mut filled = pour(lane, memory.clone(), stream, tell)?;
            are_computed.fetch_and(filled.is_some(), Ordering::Relaxed);
            if expected.is_some() && filled.as_deref() != expected {
                // The names of the chunks show whether the image is damaged.
                if filled.is_some() {
                    tracing::warn!("GPU memory differs from the snapshot's; filling it again");
                }
                *stream = open(part)?;
                filled = pour(lane, memory, stream, tell)?;
            }
            match (&filled, expected) {
                (Some(filled), Some(expected)) if filled != expected => Err(ResidentError::Altered),
                _ => {
                    found.filled(place, &part.stream, filled);
                    Ok(())
                }
            }
        };
        self.side_by_side(&parts, NICENESS_FILL, open, copy, |_, _| Ok(()))?;
        Ok(found)
    }

    /// Ends the copier if no piece is transferred in time; returns when all lanes are done.
    fn watch(&self, working: &Receiver<()>) {
        loop {
            match working.recv_timeout(PIECE_LIMIT) {
                Ok(()) => {}
                Err(RecvTimeoutError::Disconnected) => return,
                Err(RecvTimeoutError::Timeout) => {
                    tracing::warn!(
                        "the copier process for GPU memory does not respond and is killed"
                    );
                    self.copier.kill();
                    return;
                }
            }
        }
    }

    /// Distributes the parts to the lanes, until all are done or one fails. For each part, a lane opens its stream,
    /// copies, and finishes the stream. `copy` reports each piece.
    fn side_by_side<S, E: From<ResidentError> + Send>(
        &self,
        parts: &[&Part],
        niceness: i32,
        open: impl Fn(&Part) -> Result<S, E> + Sync,
        copy: impl Fn(&mut Lane, &Part, &mut S, &dyn Fn()) -> Result<(), E> + Sync,
        finish: impl Fn(&Part, S) -> Result<(), E> + Sync,
    ) -> Result<(), E> {
        let mut lanes = locked(&self.lanes);
        let next = AtomicUsize::new(0);
        let failure = Mutex::new(None);
        let (working, watched) = channel();
        let fail = |error| {
            // The other lanes stop after their present part. Errors that result from this one come later.
            next.store(parts.len(), Ordering::Relaxed);
            locked(&failure).get_or_insert(error);
        };
        let one = |lane: &mut Lane, part: &Part, tell: &dyn Fn()| {
            let mut stream = open(part).map_err(&fail)?;
            // The stream is abandoned after the error is recorded.
            copy(lane, part, &mut stream, tell).map_err(&fail)?;
            finish(part, stream).map_err(&fail)
        };
        let drive = |lane: &mut Lane, working: Sender<()>| {
            step_back(niceness);
            // The watch ends with a hanging copier, and so does this lane.
            let tell = || {
                let _ = working.send(());
            };
            while let Some(part) = parts.get(next.fetch_add(1, Ordering::Relaxed)) {
                if one(lane, part, &tell).is_err() {
                    return;
                }
                tell();
            }
        };
        let panicked = thread::scope(|scope| {
            let threads: Vec<_> = lanes
                .iter_mut()
                .map(|lane| {
                    let (working, drive) = (working.clone(), &drive);
                    scope.spawn(move || drive(lane, working))
                })
                .collect();
            drop(working);
            scope.spawn(move || self.watch(&watched));
            // All threads are joined, so that a panic is reported for its own thread.
            let ends: Vec<_> = threads
                .into_iter()
                .map(thread::ScopedJoinHandle::join)
                .collect();
            ends.iter().any(Result::is_err)
        });
        let failure = failure.into_inner().unwrap_or_else(PoisonError::into_inner);
        match failure {
            Some(error) => Err(error),
            None if panicked => Err(ResidentError::Panicked.into()),
            None => Ok(()),
        }
    }
}

/// Fills a part of a segment from its stream; returns the fingerprints of its blocks, if the GPU computes them.
fn pour(
    lane: &mut Lane,
    (segment, range): (SegmentId, Range<u64>),
    stream: &mut StreamReader<'_>,
    tell: &dyn Fn(),
) -> Result<Option<Vec<Fingerprint>>, ResidentError> {
    lane.fill(segment, range.clone(), |room| {
        let len = stream.read(room)?;
        tell();
        if len == 0 {
            return Err(ResidentError::Facts);
        }
        Ok(len)
    })?;
    Ok(lane.fingerprints(segment, range).ok())
}

/// Lowers the priority of a lane, for CRIU, which has fewer threads for its part, and for the job, if there are too few
/// cores.
fn step_back(niceness: i32) {
    if let Err(error) = rustix::process::nice(niceness) {
        tracing::debug!(%error, "cannot lower the priority of a lane");
    }
}

/// Part of a snapshot's memory: with a shadow or without.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Shadowed {
    Yes,
    No,
}
