//! The patterns for containers, with real ones: what `ckpt-run template docker` and `template kubernetes` print is built
//! and run by podman, with CRIU and job inside, stopped, killed and started again.

mod docker;
mod image_build;
mod kubernetes;
mod machine;
mod rights;
