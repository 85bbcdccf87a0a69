//! Handle of the supervisor on a copier.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Mutex;
use std::time::Duration;

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

use super::client_lane::Lane;
use super::copier_process::Process;
use super::error::CopierError;
use super::wire::{BATCH_MAX, KEYS_BYTES, Reply, Request, Socket, VERSION};
use crate::clock;
use crate::cuda::GpuUuid;
use crate::cuda::device::Room;
use crate::shared_memory::SharedMemory;
use crate::sync::locked;

/// Time limit for the greeting of the copier's program, its first message.
const GREETING_MAX: Duration = Duration::from_secs(10);
/// Time limit for the driver's work. Waking many GPUs without persistence mode takes longest, a second or two each; a
/// GPU copies its whole memory in a tenth of a second.
const ANSWER_MAX: Duration = Duration::from_secs(60);

/// Number of a piece of GPU memory in the copier, never reused by the same copier.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SegmentId(pub(super) u64);

/// Running copier. On drop it is killed and waited for; calls of its lanes then fail.
#[derive(Debug)]
pub struct Copier {
    control: Mutex<Control>,
    process: Process,
}

#[derive(Debug)]
struct Control {
    socket: Socket,
    /// True if the reply to an abandoned request may still arrive.
    broken: bool,
}

impl Copier {
    /// Path of this program itself.
    pub const SELF: &str = "/proc/self/exe";

    /// Starts `program`, usually [`Copier::SELF`], as a copier, and waits for its greeting.
    ///
    /// # Errors
    /// [`CopierError::NotACopier`] for another program or version.
    pub fn start(program: &Path) -> Result<Self, CopierError> {
        let failed = |source| CopierError::Start {
            program: program.to_owned(),
            source,
        };
        let (ours, theirs) = Socket::pair().map_err(failed)?;
        let process = Process::start(program, theirs.into()).map_err(failed)?;
        let control = Mutex::new(Control {
            socket: ours,
            broken: false,
        });
        let copier = Self { control, process };
        let hello = Request::Hello { version: VERSION };
        match copier.ask_within(GREETING_MAX, "connect to the copier", &hello, &[]) {
            Ok((Reply::Hello { version: VERSION }, _)) => Ok(copier),
            Ok(_) | Err(_) => Err(CopierError::NotACopier {
                program: program.to_owned(),
            }),
        }
    }

    /// Kills the copier without waiting. Calls in progress fail.
    pub fn kill(&self) {
        self.process.kill();
    }

    /// Ends the copier like a drop, without waiting for its exit: the driver takes a tenth of a second to destroy its
    /// contexts. After that, GPU memory that only the copier held is free.
    pub fn leave(self) {
        self.process.leave();
    }

    /// Returns the copier's pid on the host.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.process.pid()
    }

    /// Initializes CUDA unless it is initialized; otherwise the first context does. Takes 0.2 s and no GPU memory.
    ///
    /// # Errors
    /// [`CopierError::Device`] without a driver or a GPU.
    pub fn initialize(&self) -> Result<(), CopierError> {
        self.ask_done("initialize CUDA", &Request::Initialize)
    }

    /// Lets the GPUs that are opened from now on compute fingerprints, if their driver can. The `keys` are
    /// [`KEY_BYTES`](crate::copier::KEY_BYTES) random bytes.
    ///
    /// # Errors
    /// The copier does not answer.
    pub fn use_keys(&self, keys: &[u8]) -> Result<(), CopierError> {
        let operation = "pass keys to the copier";
        let failed = |source| CopierError::Talk { operation, source };
        let (_, descriptor) = SharedMemory::create(KEYS_BYTES).map_err(failed)?;
        let memory = File::from(descriptor);
        memory.write_all_at(keys, 0).map_err(failed)?;
        self.send_done(operation, &Request::Keys, &[memory.as_raw_fd()])
    }

    /// Creates the context of a GPU unless it exists, and returns the free memory after that. Takes 0.1 s or more.
    ///
    /// # Errors
    /// [`CopierError::Device`] without that GPU or a driver; [`CopierError::OutOfMemory`] if there is no room for a
    /// context.
    pub fn open(&self, gpu: GpuUuid) -> Result<Room, CopierError> {
        let operation = "open a GPU for copying";
        let gpu = *gpu.as_bytes();
        match self.ask(operation, &Request::Open { gpu }, &[])? {
            (Reply::Room { free, total }, _) => Ok(Room { free, total }),
            _ => Err(self.unexpected(operation)),
        }
    }

    /// Reserves memory of a GPU for shadows, all of it or none. The next [`Copier::shadow`] frees the unused part.
    ///
    /// # Errors
    /// [`CopierError::OutOfMemory`], also if the GPU's free memory is too fragmented.
    pub fn reserve(&self, gpu: GpuUuid, bytes: u64) -> Result<u64, CopierError> {
        let operation = "reserve GPU memory";
        let gpu = *gpu.as_bytes();
        let request = Request::Reserve { gpu, bytes };
        self.ask_done(operation, &request)?;
        Ok(bytes)
    }

    /// Maps memory that another process exported as this descriptor; the copier does not keep the descriptor.
    ///
    /// # Errors
    /// [`CopierError::Device`] if the descriptor is not of this kind, or the length differs.
    pub fn import(
        &self,
        gpu: GpuUuid,
        descriptor: BorrowedFd<'_>,
        len: u64,
    ) -> Result<SegmentId, CopierError> {
        let operation = "import GPU memory";
        let gpu = *gpu.as_bytes();
        let request = Request::Import { gpu, len };
        let descriptors = [descriptor.as_raw_fd()];
        match self.ask(operation, &request, &descriptors)? {
            (Reply::Segment { id }, none) if none.is_empty() => Ok(SegmentId(id)),
            _ => Err(self.unexpected(operation)),
        }
    }

    /// Creates exportable memory, and a descriptor that keeps it alive. The content is unspecified.
    ///
    /// # Errors
    /// [`CopierError::OutOfMemory`]; [`CopierError::Device`] for a length that is not a multiple of the GPU's page
    /// size.
    pub fn create(&self, gpu: GpuUuid, len: u64) -> Result<(SegmentId, OwnedFd), CopierError> {
        let operation = "create GPU memory";
        let gpu = *gpu.as_bytes();
        let request = Request::Create { gpu, len };
        let (reply, descriptors) = self.ask(operation, &request, &[])?;
        match (reply, <[OwnedFd; 1]>::try_from(descriptors)) {
            (Reply::Segment { id }, Ok([descriptor])) => Ok((SegmentId(id), descriptor)),
            _ => Err(self.unexpected(operation)),
        }
    }

    /// Copies segments, in this order, into the memory reserved on their GPUs, until it is full; all GPUs copy at the
    /// same time. Returns for each segment the number of bytes copied from its beginning.
    ///
    /// From now on these bytes are drained from the shadow, whatever happens to the original, which is released when it
    /// is copied completely. One segment per GPU may be copied in part. Unused reserved memory is freed.
    ///
    /// # Errors
    /// [`CopierError::Refused`] for a segment that does not exist, or is named twice; [`CopierError::Device`] if a GPU
    /// failed. Then the segments of earlier batches (of 1024) have their shadows, all others have none, and the
    /// reserved memory is kept for another attempt.
    pub fn shadow(&self, segments: &[SegmentId]) -> Result<Vec<u64>, CopierError> {
        let operation = "copy GPU memory on the GPU";
        let mut safe = Vec::with_capacity(segments.len());
        let mut rest = segments;
        loop {
            let (batch, others) = rest.split_at(rest.len().min(BATCH_MAX));
            rest = others;
            let last = rest.is_empty();
            let request = Request::Shadow {
                segments: numbers(batch),
                last,
            };
            match self.ask(operation, &request, &[])? {
                (Reply::Shadowed { bytes }, _) if bytes.len() == batch.len() => safe.extend(bytes),
                _ => return Err(self.unexpected(operation)),
            }
            if last {
                return Ok(safe);
            }
        }
    }

    /// Releases segments and their shadows; memory that a lane is copying is released after that.
    ///
    /// # Errors
    /// [`CopierError::Refused`] for a segment that does not exist.
    pub fn release(&self, segments: &[SegmentId]) -> Result<(), CopierError> {
        segments.chunks(BATCH_MAX).try_for_each(|batch| {
            let segments = numbers(batch);
            let request = Request::Release { segments };
            self.ask_done("release GPU memory", &request)
        })
    }

    /// Opens another connection for concurrent copies. Pins 8 MiB of host memory, which takes some time.
    ///
    /// # Errors
    /// [`CopierError::Refused`] before a GPU was opened, and beyond 64 lanes.
    pub fn lane(&self) -> Result<Lane, CopierError> {
        let operation = "open a lane to the copier";
        let failed = |source| CopierError::Talk { operation, source };
        let (ours, theirs) = Socket::pair().map_err(failed)?;
        let (lane, memory) = Lane::new(ours).map_err(failed)?;
        let descriptors = [theirs.as_fd().as_raw_fd(), memory.as_raw_fd()];
        self.send_done(operation, &Request::Lane, &descriptors)?;
        Ok(lane)
    }

    fn ask_done(&self, operation: &'static str, request: &Request) -> Result<(), CopierError> {
        self.send_done(operation, request, &[])
    }

    fn send_done(
        &self,
        operation: &'static str,
        request: &Request,
        descriptors: &[RawFd],
    ) -> Result<(), CopierError> {
        match self.ask(operation, request, descriptors)? {
            (Reply::Done, none) if none.is_empty() => Ok(()),
            _ => Err(self.unexpected(operation)),
        }
    }

    fn ask(
        &self,
        operation: &'static str,
        request: &Request,
        descriptors: &[RawFd],
    ) -> Result<(Reply, Vec<OwnedFd>), CopierError> {
        self.ask_within(ANSWER_MAX, operation, request, descriptors)
    }

    fn ask_within(
        &self,
        limit: Duration,
        operation: &'static str,
        request: &Request,
        descriptors: &[RawFd],
    ) -> Result<(Reply, Vec<OwnedFd>), CopierError> {
        let mut control = locked(&self.control);
        if control.broken {
            return Err(CopierError::Gone { operation });
        }
        let said = send_request(&control.socket, operation, request, descriptors);
        match said.and_then(|()| answer(&control.socket, operation, Some(limit))) {
            Ok((Reply::Failed(refusal), _)) => Err(CopierError::refused(operation, refusal)),
            Ok(answer) => Ok(answer),
            Err(error) => {
                control.broken = true;
                self.process.kill();
                Err(error)
            }
        }
    }

    /// Reports an invalid reply; the copier is not used any more.
    fn unexpected(&self, operation: &'static str) -> CopierError {
        locked(&self.control).broken = true;
        self.process.kill();
        CopierError::unexpected(operation)
    }
}

/// Sends a request, which has one reply.
pub(super) fn send_request(
    socket: &Socket,
    operation: &'static str,
    request: &impl serde::Serialize,
    descriptors: &[RawFd],
) -> Result<(), CopierError> {
    let sent = socket.send(request, descriptors);
    sent.map_err(|error| talk(operation, error))
}

/// Returns the reply to the oldest unanswered request.
pub(super) fn answer(
    socket: &Socket,
    operation: &'static str,
    limit: Option<Duration>,
) -> Result<(Reply, Vec<OwnedFd>), CopierError> {
    let failed = |error| talk(operation, error);
    if let Some(limit) = limit
        && !answers_within(socket, limit).map_err(failed)?
    {
        return Err(CopierError::Slow { operation, limit });
    }
    let answer = socket.receive::<Reply>().map_err(failed)?;
    answer.ok_or(CopierError::Gone { operation })
}

fn talk(operation: &'static str, source: io::Error) -> CopierError {
    match source.kind() {
        io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset => {
            CopierError::Gone { operation }
        }
        _ => CopierError::Talk { operation, source },
    }
}

fn answers_within(socket: &Socket, limit: Duration) -> io::Result<bool> {
    let end = clock::now() + limit;
    loop {
        let left = end.saturating_duration_since(clock::now());
        let timeout = PollTimeout::try_from(left).unwrap_or(PollTimeout::MAX);
        match poll(
            &mut [PollFd::new(socket.as_fd(), PollFlags::POLLIN)],
            timeout,
        ) {
            Ok(0) if left.is_zero() => return Ok(false),
            Ok(0) | Err(Errno::EINTR) => {}
            Ok(_) => return Ok(true),
            Err(error) => return Err(error.into()),
        }
    }
}

fn numbers(segments: &[SegmentId]) -> Vec<u64> {
    segments.iter().map(|segment| segment.0).collect()
}
