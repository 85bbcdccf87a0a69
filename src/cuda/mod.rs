//! GPU state through the CUDA driver: processes that use the GPU, suspend, resume.
//!
//! ```text
//! running ──lock──> locked ──checkpoint──> checkpointed     suspend: lock, checkpoint
//!    ^                 │ ^                      │
//!    └─────unlock──────┘ └───────restore────────┘           resume: restore, unlock
//! ```
//!
//! While a process is checkpointed, its device memory is in its own host memory, where CRIU can dump it. [`lock_all`],
//! [`Locked`] and [`Suspended`] do this for every CUDA process of a job at once and undo operations that they cannot
//! finish. [`Driver`] and [`CudaProcess`] are the single calls beneath. [`suspend_all`] and [`resume_all`] are the two
//! halves as separate operations, for processes that stay suspended. A process that was suspended on other GPUs is
//! resumed with a [`GpuMap`].
//!
//! # Cost
//! `libcuda.so.1` is loaded by name at run time and on first use only: a program that never uses a GPU never loads it.
//! Call [`available`] first (it checks device nodes), and [`Driver::load`] at the first snapshot. Only [`device`] makes
//! a CUDA context, for a process that wants one. `cuInit`, which makes libcuda large in memory, is called once, before
//! the first lock or restore, and only if a restore may need it: unless every GPU of the machine is known to have
//! persistence mode on.
//!
//! This module knows nothing of CRIU, images or the sandbox.

pub mod device;
mod error;
mod gpu;
mod group;
mod loader;
mod map;
mod nvml;
mod state;
mod suspension;
mod sys;
mod uuid;

mod cuda_process;
mod driver_version;
#[cfg(test)]
pub(crate) mod fake;
#[cfg(any(fuzzing, test))]
pub(crate) mod fuzz_cuda;
mod gpu_activity;
mod job_processes;

pub use cuda_process::CudaProcess;
pub use driver_version::{Capabilities, DriverVersion};
pub use error::{
    Call, CallError, Code, GpuError, LoadError, LockError, MapError, RestoreOntoError, WaitError,
};
pub use gpu::{ComputeMode, Gpu, GpuMemory, GpuUse, Inventory, device_count, inventory, uses};
pub use gpu_activity::Activity;
pub use job_processes::{
    Aftermath, Left, Locked, ResumeTimes, SuspendOptions, Suspended, TreeError, find, lock_all,
    resume_restored,
};
pub use loader::{Driver, available};
pub use map::{GpuMap, GpuMapError, GpuPair};
pub use nvml::KeptNvml;
pub use state::State;
pub use suspension::{Step, resume_all, step_all, suspend_all, toggle_all};
pub use uuid::{GpuUuid, UuidError};
