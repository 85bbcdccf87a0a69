//! Device memory that stays on the GPUs while the job is suspended (`cuda.memory`).
//!
//! ```text
//! prepare ─▶ lock ─▶ halt ─▶ unlock ─▶ agents let go ─▶ lock ─▶ suspend ─▶ stop ─▶ (criu dump)
//!                                         │ copier: shadow on the GPU, or straight into the image
//!            (criu) ─▶ halt ─▶ resume ─▶ agents map ─▶ threads go on ─▶ computing ─▶ shadow into the image
//! ```
//! An agent in each process of the job has backed large allocations by memory that can be held from outside. Here the
//! processes are halted, so that none meets an address without memory, and descriptors keep the memory. The driver
//! suspends the rest, which is small. A copier process reads the memory meanwhile; at a restore it makes and fills it
//! before the agents map it, or, on another GPU, fills what they have made there.
//!
//! Memory that was mapped from a descriptor once is lost to the driver's own way (580: restore answers 801), so a
//! process with such memory is suspended in this way or not at all.

mod copy_lanes;
mod error;
mod kept_memory;
mod memory_usage;
mod policy;
mod refill;
mod resident_restore;
mod resident_snapshot;
mod standby;
mod suspend;

pub use error::ResidentError;

pub(crate) use kept_memory::KeptMemory;
pub(crate) use refill::refill;
pub(crate) use resident_restore::ResidentRestore;
pub(crate) use resident_snapshot::{ResidentPlan, ResidentTransfer, driver_suffices};
pub(crate) use standby::Standby;
