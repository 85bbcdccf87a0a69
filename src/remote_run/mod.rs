//! A run whose images are also in object storage, from which another machine can continue it.
//!
//! ```text
//! state/…            the log of the run's state: who continues the run, which images it has (`state_log`)
//! images/…, packs/…  the images (`store::remote`)
//! ```
//! An image is uploaded in the background after it is durable in the local store, and is part of the run as soon as the
//! state names it. At the start a supervisor acquires the run's lease (`lease`, `lease_keeper`) and downloads the newest
//! image if the local store does not have it. Verbs read and change the images without the lease (`remote_images`).
//! Start reading at `begin_remote`. A run whose store several machines share takes the same lease without such images
//! (`store_lease`). This module does not depend on jobs.

mod begin_remote;
mod lease;
mod lease_keeper;
#[cfg(test)]
mod lease_model;
mod lease_wait;
mod local_record;
mod remote_images;
mod remote_retention;
mod run_lease;
mod shared_state;
mod state_log;
mod store_lease;
mod uploader;

pub(crate) use begin_remote::{Begun, RemoteRun, RemoteTerms};
pub(crate) use remote_images::{Pruned, RemoteImages, Removal};
pub(crate) use run_lease::RunLease;
pub(crate) use store_lease::{StoreLease, lock_alone, lock_for_run};
pub use uploader::UploadProgress;
