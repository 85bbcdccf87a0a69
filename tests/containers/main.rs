//! The patterns for containers, with real ones: what `ckpt-run template docker` and `template kubernetes` print is built
//! and run by podman, with CRIU and job inside, stopped, killed and started again.

#[path = "../common/mod.rs"]
mod common;

mod docker;
mod image;
mod kubernetes;
mod machine;
mod rights;
