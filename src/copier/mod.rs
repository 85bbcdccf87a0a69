//! Copies GPU memory, in a process of its own: no CUDA context lives in the supervisor, and killing the copier harms
//! nobody.
//!
//! ```text
//! supervisor                                    `ckpt-run gpu-copier`
//!   Copier ── open, reserve, import, create, ──▶ control thread: contexts, segments, shadow
//!     │       shadow, release
//!     └─ Lane ── drain, fill ──────────────────▶ a thread, a stream
//!            └── two buffers, pinned, which both have mapped ──┘
//! ```
//! At a snapshot: [`Copier::open`], [`Copier::reserve`] and [`Copier::lane`] before the job stops, for they take time;
//! then [`Copier::import`] what the job exported, [`Copier::shadow`] as much as there is room for; [`Lane::drain`] what
//! has no shadow before the job goes on, the rest afterwards; [`Copier::release`] as it is done.
//! At a restore: [`Copier::create`] and [`Lane::fill`].
//!
//! The process dies with its parent, and when the [`Copier`] is dropped. It knows nothing of jobs and images.

mod client_lane;
mod copier_client;
mod copier_process;
mod error;
mod serve;
mod wire;

pub use client_lane::Lane;
pub use copier_client::{Copier, SegmentId};
pub use error::CopierError;
pub use serve::{main, started_as_one};

pub use crate::cuda::device::Room;

/// First argument by which the binary knows that it is to be a copier.
pub const ARGUMENT: &str = "gpu-copier";
