//! GPU state through the CUDA driver: who uses the GPU, suspend, resume.
//!
//! ```text
//! running ──lock──> locked ──checkpoint──> checkpointed     suspend: lock, checkpoint
//!    ^                 │ ^                      │
//!    └─────unlock──────┘ └───────restore────────┘           resume: restore, unlock
//! ```
//!
//! While a process is checkpointed its device memory lives in its own host
//! memory, where CRIU can carry it. [`lock_all`], [`Locked`] and [`Suspended`]
//! do this for every CUDA process of a job at once and undo what they cannot
//! finish; [`Driver`] and [`CudaProcess`] are the single calls beneath.
//!
//! # What it costs
//! `libcuda.so.1` is loaded by name at run time and on first use only: a
//! program that never meets a GPU never loads it. Ask [`available`] first (it
//! looks at device nodes), call [`Driver::load`] at the first snapshot. No CUDA
//! context is ever made here, so no GPU memory is taken. `cuInit`, which is what
//! makes libcuda large in memory, is called once, before the first lock or restore,
//! and only where a restore may need it: unless every GPU of the machine is known to
//! have persistence mode on.
//!
//! This module knows nothing of CRIU, images or the sandbox.

mod error;
#[cfg(any(fuzzing, test))]
pub(crate) mod fuzz;
mod gpu;
mod group;
mod loader;
mod nvml;
mod process;
mod sys;
mod tree;

#[cfg(test)]
mod fake;

pub use error::{
    Aftermath, Call, CallError, Code, GpuError, Left, LoadError, LockError, TreeError,
};
pub use gpu::{ComputeMode, Gpu, GpuMemory, GpuUse, Inventory, device_count, inventory, uses};
pub use loader::{Driver, DriverVersion, available};
pub use process::{CudaProcess, State};
pub use tree::{Locked, ResumeTimes, SuspendOptions, Suspended, find, lock_all, resume_restored};
