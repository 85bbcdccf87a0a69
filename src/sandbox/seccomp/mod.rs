//! Seccomp filters: those that the sandbox installs, and those that CRIU leaves out of an image.

mod bpf_filter;
mod hidden;
mod inherited;
pub(super) mod small_pipes;

pub use hidden::{Hidden, Visibility};
