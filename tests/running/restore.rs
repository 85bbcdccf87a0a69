//! The main job: a supervised job is snapshotted, killed, and comes back as if nothing had happened.

use super::common::{Place, can_run};
use super::{COUNT, lines};

#[test]
fn a_killed_job_comes_back_and_ends_as_if_nothing_had_happened() {
    if !can_run() {
        return;
    }
    let place = Place::new();
    let mut run = place.start_python(&["--interval", "never"], COUNT);
    place.wait_for("log", "5\n");
    place.snapshot();
    place.wait_for("log", "15\n");
    run.crash();
    place.go();
    assert_eq!(run.wait(), 0, "{}", place.text("err"));
    assert_eq!(place.text("log"), lines(40));
    assert_eq!(place.text("out"), lines(40));
}

#[test]
fn an_eventfd_that_criu_would_restore_wrongly_fails_the_snapshot_and_the_job_goes_on() {
    if !can_run() {
        return;
    }
    let place = Place::new();
    let job = r#"
import os, time
fd = os.eventfd(3, os.EFD_SEMAPHORE)
print("ready", flush=True)
while not os.path.exists("go"):
    time.sleep(0.02)
print(os.eventfd_read(fd), flush=True)
"#;
    let mut run = place.start_python(&["--interval", "never"], job);
    place.wait_for("out", "ready");
    let refused = place.verb(&["snapshot"]);
    assert_eq!(refused.status.code(), Some(125));
    let reason = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(reason.contains("EFD_SEMAPHORE"), "{reason}");
    place.go();
    assert_eq!(run.wait(), 0);
    assert_eq!(place.text("out"), "ready\n1\n");
}
