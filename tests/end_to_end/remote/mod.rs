//! Runs whose images are also in a remote store: continuation elsewhere, kills at requests, older images, other
//! machines, the lease, uploads, verbs.
//!
//! The remote store is a folder (`remote_folder`), or a bucket of an S3 server that is not ours, on loopback
//! (`s3_server`). "Another machine" is an empty store: that of another folder, or that of the same folder, emptied.

mod continuation;
mod kills_at_requests;
mod leases;
mod older_images;
mod other_machines;
mod remote_folder;
mod s3_server;
mod shared_store;
mod steps_job;
mod uploads;
mod verbs;

use remote_folder::RemoteFolder;
use s3_server::S3Server;
use steps_job::StepsJob;
