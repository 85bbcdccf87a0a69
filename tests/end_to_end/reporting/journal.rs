//! Event log, and the summary at a run's end.

use std::fs;
use std::os::unix::fs::PermissionsExt;

use nix::sys::signal::Signal;
use serde_json::Value;

use crate::harness::{ON_REQUEST, Place, UNTIL_GO, apply, as_root, wait_until};

fn events(place: &Place) -> Vec<Value> {
    let text = place.text(".ckpt-run/events.ndjson");
    text.lines()
        .map(|line| serde_json::from_str(line).unwrap_or_else(|error| panic!("{error}: {line}")))
        .collect()
}

fn names(place: &Place) -> Vec<String> {
    let name = |event: &Value| event["event"].as_str().unwrap().to_owned();
    events(place).iter().map(name).collect()
}

fn one(place: &Place, name: &str) -> Value {
    let mut events = events(place).into_iter();
    let found = events.find(|event| event["event"] == name);
    found.unwrap_or_else(|| panic!("no {name} in {:?}", names(place)))
}

/// Returns the summary at the end of the last run.
fn said(place: &Place) -> String {
    let err = place.text("err");
    let last = err.lines().rfind(|line| line.starts_with("ckpt-run: ran "));
    last.unwrap_or_else(|| panic!("nothing was said: {err}"))
        .to_owned()
}

#[apply(as_root)]
fn crash_and_restore_are_logged_and_summarized() {
    let place = Place::new();
    fs::write(
        place.file("ckpt-run.toml"),
        "[log]\nevents = 'copy.log'\n[restart]\nbackoff = '50ms'\n",
    )
    .unwrap();
    let mut run = place.start_ready(&ON_REQUEST);
    let job = run.job();
    place.snapshot();
    run.crash();
    place.wait_for("err", "ckpt-run: restored");
    place.go();
    assert_eq!(run.wait(), 0, "{}", place.text("err"));

    let expected = [
        "opened",
        "started",
        "snapshot-began",
        "computing",
        "snapshot",
        "crashed",
        "restore-began",
        "restored",
        "ended",
    ];
    assert_eq!(names(&place), expected);
    assert_eq!(
        place.text("copy.log"),
        place.text(".ckpt-run/events.ndjson")
    );
    let metadata = fs::metadata(place.file(".ckpt-run/events.ndjson")).unwrap();
    assert_eq!(metadata.permissions().mode() & 0o777, 0o600);
    assert_eq!(one(&place, "opened")["command"][0], "python3");
    assert_eq!(one(&place, "started")["pid"], job);
    let snapshot = one(&place, "snapshot");
    assert_eq!(
        (&snapshot["image"], &snapshot["trigger"]),
        (&"000001".into(), &"request".into())
    );
    assert_eq!(
        snapshot["freeze_seconds"],
        one(&place, "computing")["freeze_seconds"]
    );
    assert!(snapshot["phases"].as_array().unwrap().len() > 1);
    let crashed = one(&place, "crashed");
    assert_eq!(
        (&crashed["code"], &crashed["how"]),
        (&137.into(), &"SIGKILL".into())
    );
    assert!(crashed["lost_seconds"].as_f64().unwrap() >= 0.0);
    assert!(one(&place, "restored")["seconds"].as_f64().unwrap() > 0.0);
    let ended = one(&place, "ended");
    assert_eq!(
        (&ended["how"], &ended["code"]),
        (&"finished".into(), &0.into())
    );
    let run = &ended["run"];
    assert!(events(&place).iter().all(|event| event["run"] == *run));

    let said = said(&place);
    assert!(said.contains(": 1 snapshot (frozen "), "{said}");
    assert!(
        said.contains("survived 1 crash, lost ") && said.contains(" of work, saved "),
        "{said}"
    );
}

#[apply(as_root)]
fn saved_and_continued_run_is_one_run() {
    let place = Place::new();
    let mut run = place.start_ready(&ON_REQUEST);
    run.signal(Signal::SIGUSR2);
    assert_eq!(run.wait(), 75, "{}", place.text("err"));
    assert_eq!(one(&place, "ended")["how"], "saved");
    let mut again = place.start_python(&ON_REQUEST, UNTIL_GO);
    place.wait_for("err", "ckpt-run: restored");
    place.go();
    assert_eq!(again.wait(), 0, "{}", place.text("err"));
    let said = said(&place);
    assert!(said.contains("1 snapshot, saved "), "{said}");
    assert!(
        !said.contains("survived") && !said.contains("lost"),
        "{said}"
    );
}

#[apply(as_root)]
fn run_without_snapshots_has_a_short_summary() {
    let place = Place::new();
    assert_eq!(place.start(&[], &["true"]).wait(), 0);
    assert!(said(&place).ends_with(", no snapshot"), "{}", said(&place));
    let quiet = Place::new();
    assert_eq!(quiet.start(&["--quiet"], &["true"]).wait(), 0);
    assert_eq!(quiet.text("err"), "");
}

#[apply(as_root)]
fn unwritable_event_log_is_reported_once() {
    let place = Place::new();
    fs::write(place.file("ckpt-run.toml"), "[log]\nevents = '.'\n").unwrap();
    let mut run = place.start_ready(&ON_REQUEST);
    place.snapshot();
    place.go();
    assert_eq!(run.wait(), 0, "{}", place.text("err"));
    let err = place.text("err");
    assert_eq!(err.matches("this log lacks events").count(), 1, "{err}");
    assert_eq!(names(&place).last().unwrap(), "ended");
}

#[apply(as_root)]
fn pauses_and_failures_are_written_down() {
    let place = Place::new();
    let mut run = place.start_ready(&ON_REQUEST);
    assert!(place.verb(&["pause"]).status.success());
    assert!(place.verb(&["unpause", "--wait"]).status.success());
    wait_until("it goes on", || {
        names(&place).last().is_some_and(|name| name == "unpaused")
    });
    assert_eq!(
        one(&place, "paused")["image"],
        one(&place, "snapshot")["image"]
    );
    place.go();
    assert_eq!(run.wait(), 0, "{}", place.text("err"));

    let full = Place::new();
    fs::write(
        full.file("ckpt-run.toml"),
        "[snapshot]\nmin_free = '1023TiB'\n",
    )
    .unwrap();
    let mut run = full.start_ready(&ON_REQUEST);
    assert!(!full.verb(&["snapshot"]).status.success());
    full.go();
    assert_eq!(run.wait(), 0, "{}", full.text("err"));
    let failed = one(&full, "snapshot-failed");
    assert_eq!(
        (&failed["kind"], &failed["job_goes_on"]),
        (&"disk".into(), &true.into())
    );
    assert!(
        said(&full).contains(": 1 snapshot failed"),
        "{}",
        said(&full)
    );
}

/// Fills memory, and records the times at which it computes.
const STEPS: &str = r#"
import os, time
ballast = os.urandom(256 << 20)
steps = open("steps", "a")
print("ready", flush=True)
while not os.path.exists("go"):
    steps.write(f"{time.time()}\n"); steps.flush()
    time.sleep(0.005)
"#;

#[apply(as_root)]
fn restore_is_reported_when_the_job_computes_again() {
    /// Tolerance for clocks that are read one after the other.
    const SLACK_SECONDS: f64 = 0.1;
    let place = Place::new();
    let mut run = place.start_python(&ON_REQUEST, STEPS);
    place.wait_for("out", "ready");
    place.snapshot();
    run.crash();
    place.wait_for("err", "ckpt-run: restored");
    place.go();
    assert_eq!(run.wait(), 0, "{}", place.text("err"));

    let (crashed, restored) = (one(&place, "crashed"), one(&place, "restored"));
    let time = |event: &Value| -> f64 {
        let time: jiff::Timestamp = event["time"].as_str().unwrap().parse().unwrap();
        time.as_duration().as_secs_f64()
    };
    let steps = place.text("steps");
    let steps = steps.lines().map(|line| line.parse::<f64>().unwrap());
    let first = steps
        .filter(|step| *step > time(&crashed))
        .fold(f64::INFINITY, f64::min);
    let (crashed, told) = (time(&crashed), time(&restored));
    let took = restored["seconds"].as_f64().unwrap();
    assert!(took > 0.0);
    // The preceding pause of a second is not included.
    assert!(told > crashed + 1.0 + took - SLACK_SECONDS, "{told}");
    // The job computed before this was reported, or soon after, and not before the restore began.
    assert!(first > told - took - SLACK_SECONDS, "{first} {told}");
    assert!(first < told + 10.0, "{first} {told}");
}
