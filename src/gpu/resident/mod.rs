//! Device memory that stays on the GPUs while the job is suspended (`cuda.memory`).
//!
//! ```text
//! prepare ─▶ lock ─▶ halt ─▶ unlock ─▶ agents release ─▶ lock ─▶ suspend ─▶ stop ─▶ (criu dump)
//!                                         │ copier: shadow on the GPU, or directly into the image
//!            (criu) ─▶ halt ─▶ resume ─▶ agents map ─▶ threads continue ─▶ computing ─▶ shadow into the image
//! ```
//! An agent in each process of the job allocates large pieces of memory in a form that other processes can hold. This
//! module halts the processes, so that none accesses an unmapped address, and keeps the memory by descriptors. The
//! driver suspends the rest, which is small. A copier process reads the memory meanwhile. At a restore it creates and
//! fills the memory before the agents map it or, on another GPU, fills memory that the agents have created there.
//!
//! The driver cannot restore memory that was mapped from a descriptor (580: its restore returns 801), so a process with
//! such memory can be suspended in this way only.

mod copy_lanes;
mod error;
mod image_fingerprints;
mod kept_memory;
mod known_blocks;
mod memory_usage;
mod policy;
mod refill;
mod resident_restore;
mod resident_snapshot;
mod standby;
mod suspend;

pub use error::ResidentError;

pub(crate) use kept_memory::KeptMemory;
pub(crate) use policy::Purpose;
pub(crate) use refill::refill;
pub(crate) use resident_restore::ResidentRestore;
pub(crate) use resident_snapshot::{PlanOptions, ResidentPlan, ResidentTransfer, driver_suffices};
pub(crate) use standby::Standby;
