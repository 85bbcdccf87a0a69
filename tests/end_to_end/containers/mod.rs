//! Container templates with real containers: the output of `ckpt-run template docker` and `template kubernetes` is
//! built and run by podman, with CRIU and the job inside, stopped, killed and started again.

mod docker;
mod image_build;
mod kubernetes;
mod machine;
mod rights;
