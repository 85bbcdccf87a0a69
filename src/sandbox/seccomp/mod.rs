//! Seccomp filters: those that the sandbox installs, and those that CRIU leaves out of an image.

mod bpf_filter;
mod inherited;
mod io_uring;
pub(super) mod small_pipes;

pub use io_uring::IoUring;
