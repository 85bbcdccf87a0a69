//! Fake `libcuda.so.1` and `libnvidia-ml.so.1` for tests on machines without a GPU: device memory is host memory.
//!
//! ```text
//! a job, the copier                                  ckpt-run
//!   context, memory, copy     the driver API           checkpoint   cuCheckpointProcess...
//!     └ gate ── process ── card                        nvml         memory on the GPUs, by process
//!   suspend                   the restore thread  ◀──── datagrams ────┘
//! ```
//! It imitates behaviour measured on an H200 with driver 580.159.04, as far as tests depend on it:
//! - Memory of a handle exists as long as any descriptor or mapping of it, in any process.
//! - An imported handle cannot be exported again (1); `cuIpcGetMemHandle` of mapped memory returns 1.
//! - A lock waits for calls in progress, returns 600 if they take too long, and blocks all others. A checkpoint moves
//!   own memory into host memory. A restore returns 801 if imported memory existed at the checkpoint.
//! - The driver's locks are separate from the checkpoint's: a thread that was stopped inside the driver holds them.
//! - A forked child cannot use CUDA (3). Calls return 3 for a process without CUDA, 304 for a missing process, 401 for
//!   a wrong state.
//!
//! `card` (GPUs) and `faults` (failures and hanging calls) document the environment variables for tests. The
//! only kernel is ckpt-run's own (`programs`): jobs compute on the host between copies. `tests/end_to_end/harness/fake_gpu.rs` builds the library by plain
//! `rustc`; `packages/fake-cuda` makes it visible to the other tools.
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
mod programs;
mod restore;
mod suspend;
mod virtual_memory;
