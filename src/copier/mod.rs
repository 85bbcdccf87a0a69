//! Copier of GPU memory, a separate process: the supervisor has no CUDA context, and killing the copier does no harm.
//!
//! ```text
//! supervisor                                    `ckpt-run gpu-copier`
//!   Copier ── open, reserve, import, create, ──▶ control thread: contexts, segments, shadow
//!     │       shadow, release
//!     └─ Lane ── drain, fill ──────────────────▶ a thread, a stream
//!            └── two pinned buffers, mapped by both ──┘
//! ```
//! A snapshot calls [`Copier::open`], [`Copier::reserve`] and [`Copier::lane`] before the job is frozen, because they
//! take time; then [`Copier::import`] for the job's exported memory, and [`Copier::shadow`] for the part that fits.
//! [`Lane::drain`] reads memory without a shadow before the job continues, and the rest afterwards; [`Copier::release`]
//! follows. A restore calls [`Copier::create`] and [`Lane::fill`].
//!
//! The process is killed with its parent, and when the [`Copier`] is dropped. It is independent of jobs and images.

mod client_lane;
mod copier_client;
mod copier_process;
mod error;
mod serve;
mod wire;

pub use client_lane::{Fingerprint, Lane};
pub use copier_client::{Copier, SegmentId};
pub use error::CopierError;
pub use serve::{main, started_as_one};

pub use crate::cuda::device::{BLOCK_BYTES, FINGERPRINT_BYTES, KEY_BYTES, Room};

/// First argument that makes the program a copier.
pub const ARGUMENT: &str = "gpu-copier";
