//! The job's GPU state: the processes that use CUDA, and how they are halted, suspended and resumed.
//!
//! `processes` finds the CUDA processes and suspends them, `unsupported` refuses state that the driver would lose,
//! `mapping` chooses the GPUs of a restore, `resident` keeps device memory on the GPUs during a snapshot. The module
//! must not depend on CRIU or the supervisor's loop.

pub(crate) mod error;
pub(crate) mod halted;
pub(crate) mod inherited_devices;
pub(crate) mod mapping;
pub(crate) mod processes;
pub(crate) mod resident;
pub(crate) mod suspended;
pub(crate) mod unsupported;

pub use error::GpuError;
pub use mapping::Refusal;
pub use resident::ResidentError;
pub use unsupported::Unsupported;
