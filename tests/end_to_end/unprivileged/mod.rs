//! `ckpt-run` in the hands of an ordinary user: no root, no capabilities, nothing installed by an administrator.
//!
//! Many tests elsewhere run as this user too (`#[apply(as_root_and_user)]`). Here is what differs.

mod basics;
mod files;
mod memory;
mod network;
mod own_filters;
mod refusals;

use crate::harness::{Place, Run};

/// Takes a snapshot of a job that is ready, crashes it, and waits for its end after the restore.
fn snapshot_crash_and_end(place: &Place, mut run: Run) {
    place.wait_for("out", "ready");
    place.snapshot();
    run.crash();
    place.wait_for("err", "ckpt-run: restored image=000001");
    place.go();
    assert_eq!(run.wait(), 0, "{}", place.text("err"));
}
