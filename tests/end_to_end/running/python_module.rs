//! The Python module: requests of the job, its restores, and the time in which it wants no snapshot.

use std::path::Path;
use std::process::Command;

use crate::harness::{ON_REQUEST, Place, Run, apply, as_root_and_user};

const MODULE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/python");

/// Kills itself after its own snapshot, once.
const ASKS: &str = r#"
import os, signal, threading, ckpt_run
told = threading.Event()
def say(*words):  # in one piece: two threads do
    os.write(1, (" ".join(map(str, words)) + "\n").encode())
ckpt_run.on_restore(lambda about: (say("callback", about.count, about.image), told.set()))
image = ckpt_run.snapshot(wait=True)
if ckpt_run.is_supervised() and ckpt_run.restored().count == 0:
    os.kill(os.getpid(), signal.SIGKILL)
say(ckpt_run.is_supervised(), image, *ckpt_run.restored())
if image:
    assert told.wait(60)
"#;

/// Requests a snapshot while it postpones snapshots, and looks at the events.
const POSTPONES: &str = r#"
import time, ckpt_run
from ckpt_run import _job
log = _job._EventLog()
log.skip()
# The start may be noted later than the job begins.
seen = lambda: [event["event"] for event in log.new() if event["event"] != "started"]
with ckpt_run.postpone():
    ckpt_run.snapshot()
    inside, end = [], time.monotonic() + 60
    while "snapshot-began" not in inside and time.monotonic() < end:
        inside += seen()
    # A snapshot of this job takes less.
    time.sleep(1)
    inside += seen()
after = []
while "snapshot" not in after and time.monotonic() < end:
    after += seen()
print(inside, "snapshot" in after, flush=True)
"#;

fn start(place: &Place, script: &str) -> Run {
    place.start_python_with(&ON_REQUEST, script, |command| {
        command
            .env("PYTHONPATH", MODULE)
            .env("CKPT_RUN_RESTART_BACKOFF", "50ms");
    })
}

#[apply(as_root_and_user)]
fn a_job_requests_a_snapshot_and_learns_of_its_restore() {
    let place = Place::new();
    let mut run = start(&place, ASKS);
    assert_eq!(run.wait(), 0, "{}", place.text("err"));
    let mut lines: Vec<_> = place.text("out").lines().map(str::to_owned).collect();
    // The thread with the callback is as fast as the other.
    lines.sort();
    assert_eq!(lines, ["True 000001 1 000001", "callback 1 000001"]);
}

#[apply(as_root_and_user)]
fn no_snapshot_begins_while_the_job_postpones_them() {
    let place = Place::new();
    let mut run = start(&place, POSTPONES);
    assert_eq!(run.wait(), 0, "{}", place.text("err"));
    assert_eq!(place.text("out"), "['snapshot-began'] True\n");
    assert_eq!(place.images().len(), 1);
}

#[test]
fn without_ckpt_run_the_module_does_nothing() {
    let mut python = Command::new("python3");
    let output = python
        .args(["-c", ASKS])
        .env("PYTHONPATH", Path::new(MODULE))
        .env_remove("CKPT_RUN_JOB")
        .output()
        .unwrap();
    assert!(output.status.success(), "{output:?}");
    assert_eq!(output.stdout, b"False None 0 None\n");
}
