//! What can go wrong with device memory.

use thiserror::Error;

use crate::cuda::sys;
use crate::cuda::{Code, GpuUuid, LoadError};

/// Why something was not done with a GPU's memory. What was begun is undone; the GPU can still be used, unless the
/// driver's code says otherwise.
#[derive(Debug, Error)]
pub enum DeviceError {
    /// There is no driver that can be used.
    #[error(transparent)]
    Load(#[from] LoadError),
    /// The driver refused.
    #[error("call {call}: {code}")]
    Call {
        /// The function.
        call: &'static str,
        /// What it answered.
        code: Code,
    },
    /// The driver shows other GPUs only.
    #[error(
        "find {gpu} among the {count} GPUs that CUDA shows: see `ckpt-run cuda gpus`, and \
             whether the container was given it"
    )]
    NoSuchGpu {
        /// What was sought.
        gpu: GpuUuid,
        /// How many there are.
        count: usize,
    },
    /// Memory that can be exported comes in whole pages of the GPU.
    #[error("take {len} bytes of GPU memory: it comes in multiples of {granularity}")]
    Length {
        /// What was asked for.
        len: u64,
        /// What it has to be a multiple of, and not 0.
        granularity: u64,
    },
    /// What was imported has another length than whoever exported it said.
    #[error("import {len} bytes of GPU memory: the memory behind the descriptor is larger")]
    Larger {
        /// What was said.
        len: u64,
    },
    /// A copy that would leave the memory or the buffer.
    #[error("copy {len} bytes at {offset} of GPU memory: there are {available}")]
    Range {
        /// First byte.
        offset: u64,
        /// Bytes.
        len: u64,
        /// Length of the memory, or of the buffer.
        available: u64,
    },
    /// A copy between two GPUs.
    #[error("copy from {from} to {to} within one GPU")]
    OtherGpu {
        /// Where the memory is.
        from: GpuUuid,
        /// Where the other memory, or the stream, is.
        to: GpuUuid,
    },
    /// The driver says that all went well, and gave nothing.
    #[error("call {call}: it gave nothing")]
    Nothing {
        /// The function.
        call: &'static str,
    },
}

impl DeviceError {
    /// Whether the GPU has too little free memory for what was asked.
    #[must_use]
    pub fn is_out_of_memory(&self) -> bool {
        matches!(self, Self::Call { code, .. } if code.number == sys::OUT_OF_MEMORY)
    }
}
