//! Test of `ckpt-run stop`: it takes an image and ends the run, which the same command line continues.

use std::fs;

use crate::harness::{
    COUNT, ON_REQUEST, Place, UNTIL_GO, apply, as_root, as_root_and_user, code, lines, stderr,
    stdout, wait_until,
};

#[apply(as_root)]
fn stopped_run_continues_when_rerun() {
    let place = Place::new();
    let mut run = place.start_python(&ON_REQUEST, COUNT);
    place.wait_for("log", "5\n");
    place.snapshot();
    place.wait_for("log", "15\n");
    let stopped = place.verb(&["stop"]);
    assert_eq!(code(stopped.status), 0, "{}", stderr(&stopped));
    assert_eq!(stdout(&stopped), "000002\n");
    // The verb has waited for the supervisor's exit, so the store is free.
    let mut again = place.start_python(&ON_REQUEST, COUNT);
    assert_eq!(run.wait(), 75, "{}", place.text("err"));
    place.wait_for("err", "ckpt-run: restored image=000002");
    place.go();
    assert_eq!(again.wait(), 0, "{}", place.text("err"));
    assert_eq!(place.text("log"), lines(40));
    assert_eq!(place.text("out"), lines(40));
    let nobody = place.verb(&["stop"]);
    assert_eq!(code(nobody.status), 125);
    assert!(stderr(&nobody).contains("none runs"), "{}", stderr(&nobody));
}

#[apply(as_root_and_user)]
fn paused_run_is_stopped_in_its_present_state() {
    let place = Place::new();
    let mut run = place.start_ready(&ON_REQUEST);
    assert_eq!(stdout(&place.verb(&["pause"])), "000001\n");
    let stopped = place.verb(&["stop", "--json"]);
    let told: serde_json::Value = serde_json::from_slice(&stopped.stdout).unwrap();
    assert_eq!(told, serde_json::json!({ "id": "000001" }));
    assert_eq!(run.wait(), 75, "{}", place.text("err"));
}

#[apply(as_root_and_user)]
fn a_stop_that_cannot_save_leaves_the_job_computing() {
    let place = Place::new();
    let job = format!("import os\nfd = os.eventfd(3, os.EFD_SEMAPHORE)\n{UNTIL_GO}");
    let mut run = place.start_python(&ON_REQUEST, &job);
    place.wait_for("out", "ready");
    let refused = place.verb(&["stop"]);
    assert_eq!(code(refused.status), 125);
    let said = stderr(&refused);
    assert!(
        said.starts_with("ckpt-run: error: cannot stop the job: ")
            && said.contains("EFD_SEMAPHORE"),
        "{said}"
    );
    place.go();
    assert_eq!(run.wait(), 0, "{}", place.text("err"));
}

#[apply(as_root_and_user)]
fn run_waiting_for_a_restart_stops_if_it_has_an_image() {
    for saved in [true, false] {
        let place = Place::new();
        fs::write(
            place.file("ckpt-run.toml"),
            "[restart]\nbackoff = '1h'\nbackoff_max = '1h'\nwithout_image = 'start'\n",
        )
        .unwrap();
        let mut run = place.start_ready(&ON_REQUEST);
        if saved {
            place.snapshot();
        }
        run.crash();
        wait_until("it waits", || {
            stdout(&place.verb(&["status"])).starts_with("waiting")
        });
        let stopped = place.verb(&["stop"]);
        if saved {
            assert_eq!(stdout(&stopped), "000001\n", "{}", stderr(&stopped));
            assert_eq!(run.wait(), 75, "{}", place.text("err"));
        } else {
            assert_eq!(code(stopped.status), 125);
            assert!(stderr(&stopped).contains("SIGTERM"), "{}", stderr(&stopped));
            assert!(!run.has_ended());
        }
    }
}
