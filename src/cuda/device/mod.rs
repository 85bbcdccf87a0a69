//! Device memory: the context of a GPU, memory on it, and copies.
//!
//! ```text
//! DeviceApi ──▶ Context ──▶ DeviceMemory   plain, or exportable, or imported from a descriptor
//!                       ├──▶ Pinned        host memory that the GPU reaches at full speed
//!                       ├──▶ Stream        copies between them
//!                       └──▶ Fingerprinter fingerprints of blocks, computed on the GPU
//! ```
//! A context takes about 0.3 s to create, and a few hundred MiB each of host and GPU memory for the lifetime of the
//! process. A process with a context cannot be forked safely. Only processes dedicated to this purpose should use it.
//!
//! Every function here is safe to call in any order from any thread: the memory of a copy is borrowed until the copy
//! has ended. Only the driver's documented failures are returned. This module knows no jobs, images or processes.

mod api;
mod context;
mod device_types;
mod error;
mod fingerprints;
mod host_memory;
mod memory;
mod stream;

pub use api::DeviceApi;
pub use context::{Context, Room};
pub use error::DeviceError;
pub use fingerprints::{BLOCK_BYTES, FINGERPRINT_BYTES, Fingerprinter, KEY_BYTES};
pub use host_memory::Pinned;
pub use memory::DeviceMemory;
pub use stream::{DeviceCopy, Stream, copy_all};
