//! Errors of operations on device memory.

use thiserror::Error;

use crate::cuda::sys;
use crate::cuda::{Code, GpuUuid, LoadError};

/// The reason why an operation on a GPU's memory failed. A partial operation is undone; the GPU can still be used,
/// unless the driver's code means something else.
#[derive(Debug, Error)]
pub enum DeviceError {
    /// No usable driver exists.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// The driver refused.
    #[error("{call} failed: {code}")]
    Call {
        /// The function.
        call: &'static str,
        /// The driver's result.
        code: Code,
    },
    /// The driver does not show this GPU.
    #[error(
        "cannot find {gpu} among the {count} GPUs that CUDA can use; `ckpt-run cuda gpus` lists them; in a container, \
         make the GPU available"
    )]
    NoSuchGpu {
        /// The requested GPU.
        gpu: GpuUuid,
        /// The number of GPUs that CUDA can use.
        count: usize,
    },
    /// A length is not a multiple of the GPU's page size, which exportable memory requires.
    #[error("cannot allocate {len} bytes of GPU memory: not a multiple of {granularity} bytes")]
    Length {
        /// The requested length.
        len: u64,
        /// The number that the length must be a nonzero multiple of.
        granularity: u64,
    },
    /// Imported memory is larger than the length that its exporter reported.
    #[error("cannot import {len} bytes of GPU memory: the memory behind the descriptor is larger")]
    Larger {
        /// The reported length.
        len: u64,
    },
    /// A copy would exceed the memory or the buffer.
    #[error("cannot copy {len} bytes at offset {offset} of GPU memory: it has {available} bytes")]
    Range {
        /// The first byte.
        offset: u64,
        /// The number of bytes.
        len: u64,
        /// Length of the memory, or of the buffer.
        available: u64,
    },
    /// A copy would be between two GPUs.
    #[error("cannot copy from {from} to {to}: copies are possible within one GPU only")]
    OtherGpu {
        /// The GPU of the memory.
        from: GpuUuid,
        /// The GPU of the other memory or of the stream.
        to: GpuUuid,
    },
    /// The driver cannot run programs of this process on the GPU.
    #[error("the driver has no functions for programs on the GPU")]
    NoPrograms,
    /// The driver reported success but returned no result.
    #[error("{call} returned no result")]
    Nothing {
        /// The function.
        call: &'static str,
    },
}

impl DeviceError {
    /// Returns true if the GPU has too little free memory for the request.
    #[must_use]
    pub fn is_out_of_memory(&self) -> bool {
        matches!(self, Self::Call { code, .. } if code.number == sys::OUT_OF_MEMORY)
    }
}
