//! A restore: an image becomes the running job.
//!
//! `restore_image` is the entry: it examines an image, rolls files back, runs CRIU and has `gpu_resume` resume the
//! GPU state. Blocks; the supervisor calls it on a thread of its own.

pub(crate) mod bundled_files;
pub(crate) mod error;
pub(crate) mod gpu_resume;
pub(crate) mod huge_pages;
pub(crate) mod restore_image;

pub use bundled_files::companions;
pub use error::RestoreError;
