//! The last changes of a job's files before its sandbox or the watcher is killed.

use std::thread;
use std::time::Duration;

use nix::sys::signal::Signal;

use super::counter_job::{processes_with, send};
use crate::harness::{ON_REQUEST, Place, Run, apply, as_root, descendants, inner_pid, wait_until};

/// Makes new files and removes them again, and ends if others are there than it has made.
const JOB: &str = r#"
import os
os.makedirs("made", exist_ok=True)
there = set()
while not os.path.exists("end"):
    found = set(os.listdir("made"))
    if found != there: print("wrong", len(found - there), len(there - found), flush=True); break
    name = os.urandom(6).hex()
    open("made/" + name, "w").close()
    there.add(name)
    print("made", flush=True)
    if len(there) > 100:
        for name in there: os.unlink("made/" + name)
        there.clear()
"#;

fn start(backoff: &'static str) -> (Place, Run) {
    let place = Place::new();
    let options = [&ON_REQUEST[..], &["--max-restarts", "-1"]].concat();
    let run = place.start_python_with(&options, JOB, |command| {
        command.env("CKPT_RUN_RESTART_BACKOFF", backoff);
        command.env("CKPT_RUN_FILES_EXCLUDE", "end");
    });
    place.wait_for("out", "made");
    place.snapshot();
    (place, run)
}

/// Kills the sandbox, and waits until the job makes files again.
fn kill_sandbox(place: &Place, run: &Run, restores: usize) {
    let inside = descendants(run.pid());
    let first = inside.into_iter().rfind(|pid| inner_pid(*pid) == Some(1));
    send(first.expect("pid 1"), Signal::SIGKILL);
    wait_until(&format!("a restore; {}", place.text("err")), || {
        place.text("err").matches("restored image").count() == restores
    });
    let before = place.text("out").len();
    wait_until("the next files", || {
        let out = place.text("out");
        out.len() > before || out.contains("wrong")
    });
}

fn finish(place: &Place, run: &mut Run) {
    std::fs::write(place.file("end"), "").expect("the file is written");
    assert_eq!(run.wait(), 0, "{}", place.text("err"));
    assert!(
        !place.text("out").contains("wrong"),
        "{}",
        place.text("err")
    );
}

#[apply(as_root)]
fn files_made_right_before_the_sandbox_was_killed_are_the_jobs() {
    let (place, mut run) = start("10ms");
    for restores in 1..=6 {
        kill_sandbox(&place, &run, restores);
        // At another moment of its loop.
        thread::sleep(Duration::from_millis(7 * restores as u64));
    }
    finish(&place, &mut run);
}

/// The record is read after the wait only.
#[apply(as_root)]
fn files_made_before_a_wait_for_the_restart_are_the_jobs() {
    let (place, mut run) = start("4s");
    for restores in 1..=2 {
        kill_sandbox(&place, &run, restores);
    }
    finish(&place, &mut run);
}

#[apply(as_root)]
fn a_snapshot_replaces_a_killed_watcher() {
    let (place, mut run) = start("10ms");
    for pid in processes_with(&run, "__watch") {
        send(pid, Signal::SIGKILL);
    }
    place.snapshot();
    let before = place.text("out").len();
    wait_until("more files", || place.text("out").len() > before + 100);
    run.crash();
    wait_until(&format!("a restore; {}", place.text("err")), || {
        place.text("err").contains("restored image=000002") || run.has_ended()
    });
    finish(&place, &mut run);
}
