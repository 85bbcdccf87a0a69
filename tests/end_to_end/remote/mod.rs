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

use std::path::Path;
use std::process::Command;

use remote_folder::RemoteFolder;
use s3_server::S3Server;
use steps_job::StepsJob;

use crate::harness::copy_environment;

/// Computes until there is a file `go`.
const WAITS: &str = r#"
import os, time
print("ready", flush=True)
while not os.path.exists("go"):
    time.sleep(0.02)
print("done", flush=True)
"#;

/// Runs a command with a file mounted in the place of another.
const WITH_FILE: &str = r#"mount --bind "$0" "$1" && shift && exec "$@""#;

/// Makes a command run on a machine where `path` has the content of this file.
fn seeing(file: &Path, path: &str, command: &Command) -> Command {
    let mut wrapped = Command::new("unshare");
    wrapped
        .args(["--mount", "--propagation", "private", "sh", "-euc"])
        .args([WITH_FILE.as_ref(), file.as_os_str(), path.as_ref()])
        .arg(command.get_program())
        .args(command.get_args());
    if let Some(folder) = command.get_current_dir() {
        wrapped.current_dir(folder);
    }
    copy_environment(command, &mut wrapped);
    wrapped
}
