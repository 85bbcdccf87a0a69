//! Protocol between the supervisor and the agent in a job's process, in datagrams of host byte order.
//!
//! ```text
//! supervisor                          agent
//!   HELLO    ──────────────────────▶         who are you, what do you hold
//!            ◀──────────────────────  OK     thread, segments, bytes, flags
//!   PROBE    ──────────────────────▶         may the driver be called now (all other threads are stopped)
//!            ◀──────────────────────  OK, BUSY
//!   RELEASE  ──────────────────────▶         let go of all device memory
//!            ◀──────────────────────  MORE   up to BATCH_MAX segments, a descriptor each; as often as needed
//!            ◀──────────────────────  OK     nothing is mapped any more
//!   MAP      ──────────────────────▶         segments first.. of the order of the release, a descriptor each
//!            ◀──────────────────────  OK     these are mapped where they were
//!   REMAKE   ──────────────────────▶         instead of MAP, when the driver has restored it onto another GPU
//!            ◀──────────────────────  MORE   as after RELEASE: the process's own memory, new, of any content
//!            ◀──────────────────────  OK     all is mapped where it was
//!   ORIGINS  ──────────────────────▶         which segments do several processes have mapped (CUDA IPC)
//!            ◀──────────────────────  MORE   up to BATCH_MAX of them, made by `Segment::shared`, no descriptors
//!            ◀──────────────────────  OK     these are all
//!   HOLDINGS ──────────────────────▶         how much is there on which GPU
//!            ◀──────────────────────  MORE   one `Segment::holding` a GPU, no descriptors
//!            ◀──────────────────────  OK     these are all
//! ```
//! An agent also asks another of the same run and user, for a process that opens memory of another one (CUDA IPC):
//! ```text
//!   SHARE    ──────────────────────▶         the segment whose number is `first`, and above it `count`
//!            ◀──────────────────────  MORE   it, with a descriptor; `bytes` is what was asked for
//! ```
//! The agent answers to where a request came from, with its serial number. A request that was carried out already
//! is answered OK again. Shared with the agent, which has no standard library; whoever receives checks everything.

/// First word of every datagram.
pub const MAGIC: u32 = u32::from_ne_bytes(*b"ckpA");
/// Changes with any change of these messages; a restored process has the agent of its time.
pub const VERSION: u32 = 2;

/// Environment variable with the run's token, hexadecimal digits. Without it the agent does nothing.
pub const TOKEN_VARIABLE: &str = "CKPT_RUN_AGENT";
/// Digits of a token.
pub const TOKEN_LEN: usize = 32;
/// An agent's socket has the abstract name PREFIX, token, "/", pid as the process itself sees it, decimal.
pub const NAME_PREFIX: &str = "ckpt-run-agent/";

/// Most segments, and descriptors, in a datagram; Linux takes 253 descriptors (`SCM_MAX_FD`).
pub const BATCH_MAX: usize = 64;

/// Kinds of requests.
pub const HELLO: u32 = 1;
/// See above.
pub const PROBE: u32 = 2;
/// See above.
pub const RELEASE: u32 = 3;
/// See above.
pub const MAP: u32 = 4;
/// Request between agents; see above.
pub const SHARE: u32 = 5;
/// See above.
pub const REMAKE: u32 = 6;
/// See above.
pub const ORIGINS: u32 = 7;
/// See above.
pub const HOLDINGS: u32 = 8;

/// Done.
pub const OK: u32 = 0;
/// A part of the answer; more come.
pub const MORE: u32 = 1;
/// A stopped thread holds what the agent needs. Nothing was changed.
pub const BUSY: u32 = 2;
/// The request makes no sense, or not now. Nothing was changed.
pub const REFUSED: u32 = 3;
/// The driver failed with `code`; what was begun was undone.
pub const DRIVER: u32 = 4;
/// The driver failed with `code`, and undoing failed as well: the process's device memory is incomplete.
pub const LOST: u32 = 5;

/// Flag: memory is released and waits for MAP.
pub const RELEASED: u32 = 1;
/// Flag: some memory was given by the supervisor once. The driver cannot bring it back, only RELEASE and MAP can.
pub const IMPORTED: u32 = 2;
/// Flag: the process has shared memory of the driver's own with others, or uses theirs (CUDA IPC): nobody can bring
/// that back.
pub const SHARES: u32 = 4;
/// Flag: the process was restored onto another GPU, so the driver imports no memory there: MAP would fail, and RELEASE
/// is refused. The driver's own way is left.
pub const MOVED: u32 = 8;
/// Flag: the process has shared segments with others, or uses theirs (CUDA IPC). ORIGINS tells which; RELEASE and MAP of
/// all these processes bring them back.
pub const LENDS: u32 = 16;

/// Supervisor to agent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct Request {
    pub magic: u32,
    pub version: u32,
    pub kind: u32,
    /// MAP: number of the first segment.
    pub first: u32,
    /// MAP: number of segments, and of descriptors that come along.
    pub count: u32,
    pub reserved: u32,
    /// Repeated in the answers.
    pub serial: u64,
}

/// Agent to supervisor; `count` segments follow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct Reply {
    pub magic: u32,
    pub version: u32,
    pub kind: u32,
    pub status: u32,
    /// The driver's `CUresult` for `DRIVER` and `LOST`, else 0.
    pub code: i32,
    /// The agent's thread, as the process itself sees it.
    pub thread: i32,
    /// Number of the first segment that follows.
    pub first: u32,
    /// Segments that follow, with a descriptor each; 0 in all but MORE.
    pub count: u32,
    /// Segments in all.
    pub total: u32,
    /// `RELEASED`, `IMPORTED`, `SHARES`, `MOVED`, `LENDS`.
    pub flags: u32,
    /// Length of all segments, bytes.
    pub bytes: u64,
    pub serial: u64,
}

/// A piece of device memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct Segment {
    /// Address of the mapping in the process.
    pub address: u64,
    /// Bytes; a multiple of the driver's granularity.
    pub len: u64,
    /// UUID of its GPU.
    pub device: [u8; 16],
}

impl Segment {
    /// Says of the segment at an address which process it is of, and which of that process's it is.
    pub const fn shared(address: u64, owner: i32, id: u64) -> Self {
        let mut device = [0; 16];
        let (place, _) = device.split_at_mut(4);
        place.copy_from_slice(&owner.to_ne_bytes());
        Self {
            address,
            len: id,
            device,
        }
    }

    /// Says of a GPU how much of its memory the process has made or was given, and of that, how much was given by the
    /// supervisor.
    pub const fn holding(device: [u8; 16], len: u64, imported: u64) -> Self {
        Self {
            address: imported,
            len,
            device,
        }
    }

    /// The process and the number that [`Segment::shared`] was given.
    pub const fn origin(&self) -> (i32, u64) {
        let [a, b, c, d, ..] = self.device;
        (i32::from_ne_bytes([a, b, c, d]), self.len)
    }
}

const _: () = assert!(size_of::<Request>() == 32);
const _: () = assert!(size_of::<Reply>() == 56);
const _: () = assert!(size_of::<Segment>() == 32);
