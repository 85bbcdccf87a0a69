//! Device memory on its way into an image and out of one: a copier process, and lanes that work side by side.
//!
//! ```text
//! GPU ─▶ copier's lane ─▶ pipe ─▶ stream of the image        a part of a segment at a time, and back
//! ```

use std::collections::BTreeSet;
use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use nix::fcntl::{FcntlArg, OFlag, fcntl};

use super::error::ResidentError;
use super::facts::{Part, ResidentFacts};
use super::keep::Kept;
use super::refill::Memory;
use crate::copier::{Copier, CopierError, Lane, SegmentId};
use crate::cuda::GpuUuid;
use crate::resident::{Held, Segment};

/// Most lanes: one passes several GB/s, and few disks or decompressors take more than eight give.
const LANES_MAX: usize = 8;
/// A lane's pipe; the default of 64 KiB costs a factor of five.
const PIPE_BYTES: i32 = 1 << 20;
/// The part of a GPU's memory that a shadow leaves free, one in so many: for what the job allocates until the shadow is
/// in the image, some seconds later.
const SHADOW_LEAVES: u64 = 16;
/// For one part to go through a lane, to or from a slow disk as well (256 MiB at 3 MB/s). A copier that hangs would hold
/// up the job for ever.
const PART_LIMIT: Duration = Duration::from_secs(90);

/// A copier and its lanes.
#[derive(Debug)]
pub(in crate::supervisor) struct Carrier {
    copier: Copier,
    lanes: Mutex<Vec<Lane>>,
}

/// Memory that the copier has taken over.
#[derive(Debug)]
pub(in crate::supervisor) struct Taken {
    parts: Vec<Part>,
    segments: Vec<SegmentId>,
    /// Of each segment, how many bytes from its beginning have a shadow: the job may change the original.
    safe: Vec<u64>,
}

/// The same under way.
pub(in crate::supervisor) type Taking = JoinHandle<Result<Taken, ResidentError>>;

impl Carrier {
    /// Starts a copier with contexts on these GPUs.
    pub fn start(program: &Path, gpus: &[GpuUuid]) -> Result<Self, ResidentError> {
        let copier = Copier::start(program)?;
        for gpu in gpus {
            copier.open(*gpu)?;
        }
        let cores = thread::available_parallelism().map_or(1, usize::from);
        let lanes = (0..(cores / 2).clamp(1, LANES_MAX)).map(|_| copier.lane());
        let lanes: Result<_, CopierError> = lanes.collect();
        Ok(Self {
            lanes: Mutex::new(lanes?),
            copier,
        })
    }

    /// Reserves GPU memory for a shadow of up to `bytes` on each of the GPUs, as far as there is room; how much in all.
    pub fn make_room(&self, gpus: &[GpuUuid], bytes: u64) -> Result<u64, ResidentError> {
        let mut reserved = 0;
        for gpu in gpus {
            let room = self.copier.open(*gpu)?;
            let wanted = bytes.min(room.free.saturating_sub(room.total / SHADOW_LEAVES));
            match self.copier.reserve(*gpu, wanted) {
                Ok(bytes) => reserved += bytes,
                // Others took it: then it goes straight into the image.
                Err(error @ CopierError::OutOfMemory { .. }) => {
                    tracing::debug!(%gpu, %error, "no room for a shadow");
                }
                Err(error) => return Err(error.into()),
            }
        }
        Ok(reserved)
    }

    /// Takes over what was kept, on a thread: the driver suspends the rest meanwhile.
    pub fn take(self: &Arc<Self>, kept: &Kept) -> Result<Taking, ResidentError> {
        let facts = kept.facts();
        let held = kept.processes().iter().flat_map(|process| &process.held);
        let copy = |held: &Held| {
            Ok(Held {
                segment: held.segment,
                descriptor: held.descriptor.try_clone()?,
            })
        };
        let memory: Vec<Held> = held.map(copy).collect::<std::io::Result<_>>()?;
        let carrier = Arc::clone(self);
        let taking = thread::Builder::new().name("gpu-take".to_owned());
        Ok(taking.spawn(move || carrier.take_over(&facts, &memory))?)
    }

    fn take_over(&self, facts: &ResidentFacts, memory: &[Held]) -> Result<Taken, ResidentError> {
        let gpu = |held: &Held| GpuUuid::from_bytes(held.segment.device);
        // The driver does not list the GPUs of a process that has only just begun.
        let gpus: BTreeSet<GpuUuid> = memory.iter().map(gpu).collect();
        for gpu in gpus {
            self.copier.open(gpu)?;
        }
        let segments = self.import(memory.iter().map(|held| (gpu(held), held)))?;
        Ok(Taken {
            safe: self.copier.shadow(&segments)?,
            parts: facts.parts(),
            segments,
        })
    }

    /// Reads memory into streams: what has no shadow, while the job stands still, or the rest, whose shadow goes
    /// segment by segment.
    pub fn drain<E: From<ResidentError> + Send>(
        &self,
        taken: &Taken,
        shadowed: Shadowed,
        receive: impl Fn(&str, &File) -> Result<u64, E> + Sync,
    ) -> Result<(), E> {
        let wanted = |part: &&Part| {
            let safe = part.end <= taken.safe[part.segment];
            safe == (shadowed == Shadowed::Yes)
        };
        let parts: Vec<&Part> = taken.parts.iter().filter(wanted).collect();
        let left: Vec<AtomicUsize> = taken.segments.iter().map(|_| AtomicUsize::new(0)).collect();
        for part in &parts {
            left[part.segment].fetch_add(1, Ordering::Relaxed);
        }
        self.side_by_side(&parts, |lane, part| {
            let (read, write) = pipe()?;
            let read = File::from(read);
            let id = taken.segments[part.segment];
            thread::scope(|scope| -> Result<(), E> {
                let draining = scope.spawn(move || lane.drain(id, part.begin..part.end, write));
                let received = receive(&part.stream, &read);
                // A copier that still writes hears of a failure here.
                drop(read);
                received?;
                let drained = draining.join().map_err(|_| ResidentError::Panicked)?;
                Ok(drained.map_err(ResidentError::from)?)
            })?;
            let was_last = left[part.segment].fetch_sub(1, Ordering::Relaxed) == 1;
            if was_last && shadowed == Shadowed::Yes {
                // The job may want the room.
                self.copier.release(&[id]).map_err(ResidentError::from)?;
            }
            Ok(())
        })
    }

    /// Lets go of originals that nothing more is read of; the job may free them now.
    pub fn leave_originals(&self, taken: &Taken) -> Result<(), ResidentError> {
        let segments = taken.segments.iter().zip(&taken.safe);
        let unsafe_ones = segments.filter(|(_, safe)| **safe == 0);
        let originals: Vec<SegmentId> = unsafe_ones.map(|(segment, _)| *segment).collect();
        Ok(self.copier.release(&originals)?)
    }

    /// Makes memory for an image's processes. `map` says which GPU takes the place of which.
    pub fn make(
        &self,
        facts: &ResidentFacts,
        map: impl Fn(&str) -> Option<GpuUuid>,
    ) -> Result<(Memory, Vec<SegmentId>), ResidentError> {
        let mut memory = Memory::new();
        let mut segments = Vec::new();
        for process in &facts.processes {
            for segment in &process.segments {
                let gpu = map(&segment.gpu).ok_or(ResidentError::Facts)?;
                let (id, descriptor) = self.copier.create(gpu, segment.len)?;
                segments.push(id);
                memory.entry(process.pid).or_default().push(Held {
                    segment: Segment {
                        address: segment.address,
                        len: segment.len,
                        device: *gpu.as_bytes(),
                    },
                    descriptor,
                });
            }
        }
        Ok((memory, segments))
    }

    /// Takes memory that others made, on these GPUs, to fill it.
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

    /// Fills the memory of an image's processes from its streams.
    pub fn fill<E: From<ResidentError> + Send>(
        &self,
        facts: &ResidentFacts,
        segments: &[SegmentId],
        send: impl Fn(&str, &File) -> Result<u64, E> + Sync,
    ) -> Result<(), E> {
        let parts = facts.parts();
        let parts: Vec<&Part> = parts.iter().collect();
        self.side_by_side(&parts, |lane, part| {
            let (read, write) = pipe()?;
            let write = File::from(write);
            thread::scope(|scope| -> Result<(), E> {
                let id = segments[part.segment];
                let filling = scope.spawn(move || lane.fill(id, part.begin..part.end, read));
                let sent = send(&part.stream, &write);
                drop(write);
                let filled = filling.join().map_err(|_| ResidentError::Panicked)?;
                sent?;
                Ok(filled.map_err(ResidentError::from)?)
            })
        })
    }

    /// Ends the copier when no part gets through; until all lanes are done.
    fn watch(&self, working: &Receiver<()>) {
        loop {
            match working.recv_timeout(PART_LIMIT) {
                Ok(()) => {}
                Err(RecvTimeoutError::Disconnected) => return,
                Err(RecvTimeoutError::Timeout) => {
                    tracing::warn!("the copier of GPU memory hangs, and is ended");
                    self.copier.kill();
                    return;
                }
            }
        }
    }

    /// Has each lane do one part after the other, until all are done or one fails.
    fn side_by_side<E: From<ResidentError> + Send>(
        &self,
        parts: &[&Part],
        work: impl Fn(&mut Lane, &Part) -> Result<(), E> + Sync,
    ) -> Result<(), E> {
        let mut lanes = self.lanes.lock().unwrap_or_else(PoisonError::into_inner);
        let next = AtomicUsize::new(0);
        let (next, work) = (&next, &work);
        let (working, watched) = channel();
        let drive = |lane: &mut Lane, working: Sender<()>| {
            while let Some(part) = parts.get(next.fetch_add(1, Ordering::Relaxed)) {
                if let Err(error) = work(lane, part) {
                    // The others end with the part that they are at.
                    next.store(parts.len(), Ordering::Relaxed);
                    return Err(error);
                }
                // The watch ends with a copier that hangs, and so do we.
                let _ = working.send(());
            }
            Ok(())
        };
        let drive = &drive;
        thread::scope(|scope| {
            let threads: Vec<_> = lanes
                .iter_mut()
                .map(|lane| {
                    let working = working.clone();
                    scope.spawn(move || drive(lane, working))
                })
                .collect();
            drop(working);
            scope.spawn(move || self.watch(&watched));
            threads
                .into_iter()
                .try_for_each(|thread| thread.join().unwrap_or(Err(ResidentError::Panicked.into())))
        })
    }
}

/// Which memory of a snapshot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::supervisor) enum Shadowed {
    Yes,
    No,
}

fn pipe() -> Result<(OwnedFd, OwnedFd), ResidentError> {
    let (read, write) = nix::unistd::pipe2(OFlag::O_CLOEXEC).map_err(std::io::Error::from)?;
    // Smaller is only slower: an unprivileged user has a limit for all pipes.
    let _ = fcntl(&write, FcntlArg::F_SETPIPE_SZ(PIPE_BYTES));
    Ok((read, write))
}
