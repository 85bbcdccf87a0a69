//! Protocol between the supervisor and the agent in a job's process, in datagrams of host byte order.
//!
//! ```text
//! supervisor                          agent
//!   HELLO    ──────────────────────▶         identity and held memory
//!            ◀──────────────────────  OK     thread, segments, bytes, flags
//!   PROBE    ──────────────────────▶         is the driver callable (all other threads are stopped)
//!            ◀──────────────────────  OK, BUSY
//!   RELEASE  ──────────────────────▶         release all device memory
//!            ◀──────────────────────  MORE   up to BATCH_MAX segments, a descriptor each; repeated
//!            ◀──────────────────────  OK     nothing is mapped any more
//!   MAP      ──────────────────────▶         segments from `first` in the order of the release, a descriptor each
//!            ◀──────────────────────  OK     these are mapped where they were
//!   REMAKE   ──────────────────────▶         instead of MAP, if the driver has restored the process onto another GPU
//!            ◀──────────────────────  MORE   as after RELEASE: the process's own memory, new, of unspecified content
//!            ◀──────────────────────  OK     all is mapped where it was
//!   ORIGINS  ──────────────────────▶         which segments are mapped by several processes (CUDA IPC)
//!            ◀──────────────────────  MORE   up to BATCH_MAX values of `Segment::shared`, no descriptors
//!            ◀──────────────────────  OK     these are all
//!   HOLDINGS ──────────────────────▶         amount of memory on each GPU
//!            ◀──────────────────────  MORE   one `Segment::holding` a GPU, no descriptors
//!            ◀──────────────────────  OK     these are all
//!   HOLD     ──────────────────────▶         make the job's CUDA calls wait, for less than a second
//!   PASS     ──────────────────────▶         end that
//! ```
//! An agent also sends requests to another agent of the same run and user, if its process opens memory of the other
//! process (CUDA IPC):
//! ```text
//!   SHARE    ──────────────────────▶         the segment with the number `count` << 32 | `first`
//!            ◀──────────────────────  MORE   the segment, with a descriptor; `bytes` is its requested length
//! ```
//! The agent replies to the sender's address with the request's serial number. A repeated request is answered with OK.
//! This file is shared with the agent, which has no standard library. Receivers check everything.

/// First word of every datagram.
pub const MAGIC: u32 = u32::from_ne_bytes(*b"ckpA");
/// Protocol version, changed with any change of these messages. A restored process has the agent of its original start.
pub const VERSION: u32 = 2;

/// Environment variable with the run's token in hexadecimal digits. Without it the agent does nothing.
pub const TOKEN_VARIABLE: &str = "CKPT_RUN_AGENT";
/// Digits of a token.
pub const TOKEN_LEN: usize = 32;
/// Prefix of the abstract name of an agent's socket: prefix, token, "/", pid in the process's own namespace, decimal.
pub const NAME_PREFIX: &str = "ckpt-run-agent/";

/// Maximum number of segments, and of descriptors, in a datagram; Linux allows 253 descriptors (`SCM_MAX_FD`).
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
/// See above.
pub const HOLD: u32 = 9;
/// See above.
pub const PASS: u32 = 10;

/// Success.
pub const OK: u32 = 0;
/// Part of the reply; more follow.
pub const MORE: u32 = 1;
/// A stopped thread holds a required lock. Nothing was changed.
pub const BUSY: u32 = 2;
/// The request is invalid, or not possible at present. Nothing was changed.
pub const REFUSED: u32 = 3;
/// The driver failed with `code`; the changes were undone.
pub const DRIVER: u32 = 4;
/// The driver failed with `code`, and so did the undoing: the process's device memory is incomplete.
pub const LOST: u32 = 5;

/// Flag: memory is released and waits for MAP.
pub const RELEASED: u32 = 1;
/// Flag: some memory was provided by the supervisor before. The driver cannot restore it; only RELEASE and MAP can.
pub const IMPORTED: u32 = 2;
/// Flag: the process has shared the driver's own memory with others, or uses theirs (CUDA IPC or exported handles), which
/// cannot be restored.
pub const SHARES: u32 = 4;
/// Flag: the process was restored onto another GPU, so its driver cannot import memory. MAP would fail, and RELEASE is
/// refused. Only the driver's checkpoint can save its memory.
pub const MOVED: u32 = 8;
/// Flag: the process has shared segments with others, or uses theirs (CUDA IPC). ORIGINS lists them; RELEASE and MAP of
/// all these processes restore them.
pub const LENDS: u32 = 16;
/// Flag: the process maps memory in a way that the agent does not follow (multicast, access of the host, or more mappings
/// than its table has), or that the driver cannot resume (memory of the host, or for sparse arrays).
pub const OPAQUE: u32 = 32;

/// Request of the supervisor to an agent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct Request {
    pub magic: u32,
    pub version: u32,
    pub kind: u32,
    /// MAP: number of the first segment.
    pub first: u32,
    /// MAP: number of segments, equal to the number of descriptors sent along.
    pub count: u32,
    pub reserved: u32,
    /// Serial number, repeated in the replies.
    pub serial: u64,
}

/// Reply of an agent to the supervisor; `count` segments follow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct Reply {
    pub magic: u32,
    pub version: u32,
    pub kind: u32,
    pub status: u32,
    /// Driver's `CUresult` for `DRIVER` and `LOST`, else 0.
    pub code: i32,
    /// Id of the agent's thread in the process's own namespace.
    pub thread: i32,
    /// Number of the first segment that follows.
    pub first: u32,
    /// Number of segments that follow, with a descriptor each; 0 except in MORE.
    pub count: u32,
    /// Total number of segments.
    pub total: u32,
    /// `RELEASED`, `IMPORTED`, `SHARES`, `MOVED`, `LENDS`, `OPAQUE`.
    pub flags: u32,
    /// Total length of all segments in bytes.
    pub bytes: u64,
    pub serial: u64,
}

/// Piece of device memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct Segment {
    /// Address of the mapping in the process.
    pub address: u64,
    /// Length in bytes; a multiple of the driver's granularity.
    pub len: u64,
    /// UUID of the GPU.
    pub device: [u8; 16],
}

impl Segment {
    /// Describes the segment at an address by the process that owns it and its number there.
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

    /// Describes a GPU by the memory that the process has created or received on it, and the part that it received from
    /// the supervisor.
    pub const fn holding(device: [u8; 16], len: u64, imported: u64) -> Self {
        Self {
            address: imported,
            len,
            device,
        }
    }

    /// Returns the process and the number given to [`Segment::shared`].
    pub const fn origin(&self) -> (i32, u64) {
        let [a, b, c, d, ..] = self.device;
        (i32::from_ne_bytes([a, b, c, d]), self.len)
    }
}

const _: () = assert!(size_of::<Request>() == 32);
const _: () = assert!(size_of::<Reply>() == 56);
const _: () = assert!(size_of::<Segment>() == 32);
