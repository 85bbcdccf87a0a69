//! Status of a run from its supervisor, and from its store without one.

use std::fs;
use std::process::Stdio;
use std::thread;

use nix::sys::signal::Signal;
use serde_json::Value;

use crate::harness::{
    ON_REQUEST, Place, UNTIL_GO, apply, as_root, code, name_of, stderr, stdout,
    wait_for_descendant, wait_until,
};

fn status(place: &Place) -> (Value, i32) {
    let output = place.verb(&["status", "--json"]);
    let json = serde_json::from_slice(&output.stdout);
    let json = json.unwrap_or_else(|error| panic!("{error}: {}", stderr(&output)));
    (json, code(output.status))
}

fn state(place: &Place) -> String {
    status(place).0["state"].as_str().unwrap().to_owned()
}

#[apply(as_root)]
fn status_shows_snapshots_schedule_and_work_at_risk() {
    let place = Place::new();
    let mut run = place.start_ready(&["--interval", "1h"]);
    wait_until("its start", || state(&place) == "running");
    let (before, code_before) = status(&place);
    assert_eq!((&before["state"], code_before), (&"running".into(), 0));
    assert_eq!(before["pid"], run.pid());
    assert_eq!(before["job_pid"], run.job());
    assert_eq!(before["command"][0], "python3");
    assert_eq!(before["interval_seconds"], 3600.0);
    assert_eq!(
        (&before["snapshots"], &before["usage"]["images"]),
        (&Value::Array(vec![]), &0.into())
    );
    assert_eq!(
        (&before["restarts_used"], &before["restarts_left"]),
        (&0.into(), &3.into())
    );
    let next = before["next_snapshot_seconds"].as_f64().unwrap();
    assert!(next > 3000.0 && next <= 3600.0, "{next}");
    wait_until("work is at risk", || {
        status(&place).0["work_at_risk_seconds"].as_f64().unwrap() > 0.5
    });

    let image = place.snapshot();
    let (after, _) = status(&place);
    assert_eq!(after["snapshots"][0]["image"], image);
    assert!(after["snapshots"][0]["freeze_seconds"].as_f64().unwrap() > 0.0);
    assert!(after["usage"]["bytes"].as_u64().unwrap() > 0);
    assert_eq!(after["summary"]["snapshots"], 1);
    let [risk, uptime] =
        ["work_at_risk_seconds", "uptime_seconds"].map(|key| after[key].as_f64().unwrap());
    assert!(risk < uptime - 0.5, "{risk} {uptime}");

    let text = stdout(&place.verb(&["status"]));
    // The state was renewed at the end of the snapshot; the run was not.
    assert!(after["since_seconds"].as_f64().unwrap() < uptime - 0.5);
    assert_eq!(after["restored_seconds"], Value::Null);
    assert!(text.starts_with("running, up "), "{text}");
    assert!(!text.contains("restored"), "{text}");
    for line in [
        "  pids      supervisor ",
        "  last      000001 at ",
        "  next      snapshot in ",
        "  restarts  0 since the newest image, 2 left",
        "  store     1 image, ",
    ] {
        assert!(text.contains(line), "{line}: {text}");
    }

    assert!(place.verb(&["pause"]).status.success());
    assert_eq!(state(&place), "paused");
    assert_eq!(status(&place).0["next_snapshot"], Value::Null);
    assert!(place.verb(&["unpause", "--wait"]).status.success());
    run.crash();
    place.wait_for("err", "ckpt-run: restored");
    wait_until("it computes", || state(&place) == "running");
    let (back, _) = status(&place);
    assert_eq!(
        (&back["restarts_used"], &back["restarts_left"]),
        (&1.into(), &1.into())
    );
    assert_eq!(back["summary"]["survived"], 1);
    assert_eq!(back["restored_image"], back["snapshots"][1]["image"]);
    let restored = back["restored_seconds"].as_f64().unwrap();
    assert!(restored < back["uptime_seconds"].as_f64().unwrap() - 0.5);
    let text = stdout(&place.verb(&["status"]));
    assert!(text.starts_with("running, up "), "{text}");
    assert!(text.contains("\n  restored  000002 at "), "{text}");
    place.go();
    assert_eq!(run.wait(), 0);
}

#[apply(as_root)]
fn status_and_signals_do_not_list_the_images() {
    let place = Place::new();
    let mut run = place.start_ready(&["--interval", "1h"]);
    let image = place.snapshot();
    let [images, away] = ["images", "away"].map(|name| place.file(".ckpt-run").join(name));
    fs::rename(&images, &away).unwrap();
    for signal in [Signal::SIGWINCH, Signal::SIGCONT] {
        run.signal(signal);
        let (status, _) = status(&place);
        assert_eq!(status["state"], "running");
        assert_eq!(status["snapshots"][0]["image"], image);
        assert_eq!(status["restarts_left"], 2);
        assert_eq!(status["usage"], Value::Null);
    }
    fs::rename(&away, &images).unwrap();
    assert_eq!(status(&place).0["usage"]["images"], 1);
    place.go();
    assert_eq!(run.wait(), 0);
    let log = place.text("err");
    assert!(!log.contains("cannot list the images"), "{log}");
}

#[apply(as_root)]
fn wait_before_a_restart_is_reported() {
    let place = Place::new();
    fs::write(
        place.file("ckpt-run.toml"),
        "[restart]\nbackoff = '1h'\nbackoff_max = '1h'\n",
    )
    .unwrap();
    let run = place.start_ready(&[]);
    place.snapshot();
    run.crash();
    wait_until("it waits", || state(&place) == "waiting");
    let wait = status(&place).0["next_restart_seconds"].as_f64().unwrap();
    assert!(wait > 3000.0 && wait <= 3600.0, "{wait}");
}

#[apply(as_root)]
fn store_reports_the_runs_end_without_a_supervisor() {
    let place = Place::new();
    let nothing = place.verb(&["status"]);
    assert_eq!(
        (code(nothing.status), stdout(&nothing).as_str()),
        (3, "no run\n")
    );

    let mut run = place.start_ready(&[]);
    run.signal(Signal::SIGUSR2);
    assert_eq!(run.wait(), 75);
    let (saved, exit) = status(&place);
    assert_eq!(
        (&saved["state"], &saved["exit_code"], exit),
        (&"saved".into(), &75.into(), 3)
    );
    assert_eq!(saved["snapshots"][0]["trigger"], "stop");
    assert_eq!(
        (&saved["pid"], &saved["work_at_risk_seconds"]),
        (&Value::Null, &Value::Null)
    );

    let text = stdout(&place.verb(&["status"]));
    assert!(
        text.contains("stopped at 2")
            && text.contains("; the same command line continues the run: python3"),
        "{text}"
    );

    let again = place.start_python(&[], UNTIL_GO);
    place.wait_for("err", "ckpt-run: restored");
    wait_until("it computes", || state(&place) == "running");
    let (next, _) = status(&place);
    let [run_seconds, uptime] = [&next["summary"]["run_seconds"], &next["uptime_seconds"]];
    let before = saved["summary"]["run_seconds"].as_f64().unwrap();
    // The run's time includes both of its supervisors.
    assert!(run_seconds.as_f64().unwrap() > uptime.as_f64().unwrap() + before - 0.01);
    assert_eq!(next["restored_image"], "000001");
    again.signal(Signal::SIGKILL);
    drop(again);
    assert_eq!(state(&place), "killed");

    let mut last = place.start_python(&[], UNTIL_GO);
    place.go();
    assert_eq!(last.wait(), 0, "{}", place.text("err"));
    let (finished, exit) = status(&place);
    assert_eq!((&finished["state"], exit), (&"finished".into(), 3));
    assert_eq!(finished["summary"]["outages"], 1);
    let text = stdout(&place.verb(&["status"]));
    assert!(text.starts_with("not running: finished at 2"), "{text}");
}

#[apply(as_root)]
fn stopped_supervisor_is_reported_as_silent() {
    let place = Place::new();
    let mut run = place.start_ready(&[]);
    run.signal(Signal::SIGSTOP);
    let outputs = thread::scope(|scope| {
        let verbs = ["status", "snapshot", "stop"].map(|verb| scope.spawn(|| place.verb(&[verb])));
        verbs.map(|verb| verb.join().unwrap())
    });
    run.signal(Signal::SIGCONT);
    for output in outputs {
        assert_eq!(code(output.status), 125);
        assert!(
            stderr(&output).contains("may be stopped"),
            "{}",
            stderr(&output)
        );
    }
    place.go();
    assert_eq!(run.wait(), 0, "{}", place.text("err"));
    assert_eq!(place.images().len(), 0, "no snapshot was asked for");
}

#[apply(as_root)]
fn watch_without_terminal_prints_a_line_per_change() {
    let place = Place::new();
    let mut run = place.start_ready(&[]);
    let watch = |arguments: &[&str], to: &str| {
        let file = fs::File::create(place.file(to)).unwrap();
        place
            .command(arguments)
            .stdin(Stdio::null())
            .stdout(file)
            .spawn()
            .unwrap()
    };
    let mut text = watch(&["status", "-w"], "text");
    let mut json = watch(&["status", "-w", "--json"], "json");
    place.wait_for("text", "running, up ");
    place.wait_for("json", "\"running\"");
    place.snapshot();
    place.wait_for("text", "newest image 000001");
    place.wait_for("json", "000001");
    place.go();
    assert_eq!(run.wait(), 0);
    assert_eq!(code(text.wait().unwrap()), 3, "no supervisor runs any more");
    assert_eq!(code(json.wait().unwrap()), 3);
    let said = place.text("text");
    assert!(
        said.lines()
            .last()
            .unwrap()
            .starts_with("not running: finished"),
        "{said}"
    );
    assert!(!said.contains('\u{1b}'));
    for line in place.text("json").lines() {
        serde_json::from_str::<Value>(line).unwrap();
    }
}

#[apply(as_root)]
fn run_interrupted_before_its_first_image_is_not_saved() {
    let place = Place::new();
    let mut run = place.start(&ON_REQUEST, &["sh", "-c", "echo ready\nsleep 1000"]);
    place.wait_for("out", "ready");
    // A shell can miss a signal while it starts a program.
    wait_for_descendant(run.pid(), "the sleep", |pid| name_of(pid) == "sleep");
    run.signal(Signal::SIGINT);
    assert_eq!(run.wait(), 130, "{}", place.text("err"));
    let text = stdout(&place.verb(&["status"]));
    let head = text.lines().next().unwrap();
    assert!(
        head.contains("there is no image: the same command line starts the job"),
        "{text}"
    );
    // The command line is on one line, whatever its arguments contain.
    assert!(head.ends_with(": sh -c echo ready sleep 1000"), "{text}");
}
