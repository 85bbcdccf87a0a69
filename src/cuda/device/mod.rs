//! Device memory: a context of a GPU, memory on it, copies.
//!
//! ```text
//! DeviceApi ──▶ Context ──▶ DeviceMemory   plain, or exportable, or imported from a descriptor
//!                       ├──▶ Pinned        host memory that the GPU reaches at full speed
//!                       └──▶ Stream        copies between them
//! ```
//! A context costs some 0.3 s, a few hundred MiB of host memory and as much of the GPU's, for as long as the process
//! lives, and a process that has one cannot be forked safely: this is for processes that exist for it.
//!
//! Everything here is safe to call in any order from any thread: what a copy uses is borrowed until the copy has
//! ended. Only the driver's own documented failures come back. It knows nothing of jobs, images or processes.

mod api;
mod context;
mod device_types;
mod error;
mod host_memory;
mod memory;
mod stream;

pub use api::DeviceApi;
pub use context::{Context, Room};
pub use error::DeviceError;
pub use host_memory::Pinned;
pub use memory::DeviceMemory;
pub use stream::{DeviceCopy, Stream, copy_all};
