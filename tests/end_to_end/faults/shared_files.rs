//! A log to which the job and another program append.

use std::fs::{self, OpenOptions};
use std::io::Write;

use crate::harness::{ON_REQUEST, Place, Run, apply, as_root};

/// Writes a line, and after each gate the next one.
const JOB: &str = r#"
import os, time
log = open("log", "a", buffering=1)
for step in range(3):
    while step and not os.path.exists(f"gate-{step}"): time.sleep(0.005)
    log.write(f"job {step}\n")
    print(step, flush=True)
while not os.path.exists("end"): time.sleep(0.005)
"#;

/// Lines of the log at the crash.
const LINES: &str = "job 0\nother 0\njob 1\nother 1\njob 2\n";

/// Has both append a line after each of two snapshots, and then kills the job.
fn crashed(shared: &str) -> (Place, Run) {
    let place = Place::new();
    let run = place.start_python_with(&ON_REQUEST, JOB, |command| {
        command.env("CKPT_RUN_FILES_SHARED", shared);
    });
    for step in 0..2 {
        place.wait_for("out", &format!("{step}\n"));
        place.snapshot();
        let log = OpenOptions::new().append(true).open(place.file("log"));
        writeln!(log.expect("the log"), "other {step}").expect("a line");
        fs::write(place.file(&format!("gate-{}", step + 1)), "").expect("a gate");
    }
    place.wait_for("out", "2\n");
    run.crash();
    fs::write(place.file("end"), "").expect("a gate");
    (place, run)
}

#[apply(as_root)]
fn a_log_of_several_programs_is_not_cut() {
    let (place, mut run) = crashed("");
    assert_eq!(run.wait(), 125, "{}", place.text("err"));
    let err = place.text("err");
    for words in [
        "/log, too: a restore is refused if both have changed such a file",
        "/log (changed since by the job and by another program; files.shared leaves",
    ] {
        assert!(err.contains(words), "{words}: {err}");
    }
    assert_eq!(place.text("log"), LINES);
}

#[apply(as_root)]
fn a_log_that_may_be_shared_stays_as_it_is() {
    let (place, mut run) = crashed("log");
    assert_eq!(run.wait(), 0, "{}", place.text("err"));
    assert!(
        !place.text("err").contains("/log, too"),
        "{}",
        place.text("err")
    );
    assert_eq!(place.text("log"), format!("{LINES}job 2\n"));
}
