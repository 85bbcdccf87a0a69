//! A `libcuda.so.1` and `libnvidia-ml.so.1` for tests on machines without a GPU: device memory is host memory.
//!
//! ```text
//! a job, the copier                                  ckpt-run
//!   context, memory, copy     the driver API           checkpoint   cuCheckpointProcess...
//!     └ gate ── process ── card                        nvml         what the GPUs hold, and for whom
//!   suspend                   the restore thread  ◀──── datagrams ────┘
//! ```
//! It imitates what was measured on an H200 with driver 580.159.04, where tests depend on it:
//! - Memory of a handle lives as long as any descriptor or mapping of it, in any process.
//! - An imported handle cannot be exported again (1); `cuIpcGetMemHandle` of mapped memory answers 1.
//! - A lock waits for calls that are under way, 600 when they take too long, and holds up all others. A checkpoint
//!   moves own memory into host memory. A restore answers 801 where imported memory was there at the checkpoint.
//! - The driver's locks are not the checkpoint's: a thread that was stopped inside the driver holds them.
//! - A child that was forked has no CUDA (3). A process without CUDA answers 3, a missing one 304, a wrong state 401.
//!
//! What a test sets in the environment is in `card` (GPUs) and `faults` (failures and hanging calls). There are no
//! kernels: jobs compute on the host between copies. `tests/end_to_end/harness/fake_gpu.rs` builds it by plain `rustc`;
//! `packages/fake-cuda` shows it to the other tools.
#![allow(unsafe_code, reason = "a C library")]
#![allow(
    clippy::cast_possible_truncation,
    clippy::cast_possible_wrap,
    clippy::cast_sign_loss,
    reason = "addresses and lengths are C's words of 64 bits; counts are small"
)]
#![allow(non_snake_case, reason = "NVIDIA's names")]

mod c;
mod card;
mod checkpoint;
mod code;
mod context;
mod copy;
mod faults;
mod gate;
mod link;
mod lookup;
mod memory;
mod nvml;
mod process;
mod restore;
mod suspend;
mod virtual_memory;
