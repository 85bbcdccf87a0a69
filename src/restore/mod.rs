//! Restore of an image to a running job.
//!
//! `restore_image` is the entry point: it examines an image, rolls files back, lets `criu_restore` create the processes and
//! `gpu_resume` resume the GPU state. A restore blocks; the supervisor runs it on a separate thread.

pub(crate) mod bundled_files;
mod compatibility;
mod criu_restore;
pub(crate) mod error;
mod files_plan;
pub(crate) mod gpu_resume;
#[cfg(test)]
mod hostile_metadata;
pub(crate) mod huge_pages;
mod image_files;
mod landing;
pub(crate) mod restore_image;

pub use bundled_files::companions;
pub use error::RestoreError;
pub(crate) use files_plan::companions_elsewhere;
