//! Files that other programs change while a stopped job does not run.

use std::fs::{self, File};
use std::io::Write;

use nix::sys::signal::Signal;

use crate::harness::{ON_REQUEST, Place, apply, as_root_and_user};

/// Appends to a log, and has another file open; in the end it prints what is in its files.
const WRITER: &str = r#"
import os, time
log = open("log", "a", buffering=1)
table = open("table", "w+", buffering=1)
print("the job's", file=table)
with open("state", "w") as state:
    state.write("the job's")
number = 0
while not os.path.exists("go"):
    print(f"line {number}", file=log)
    number += 1
    if number == 5:
        print("ready", flush=True)
    time.sleep(0.01)
table.seek(0)
print("table:", table.read().strip())
print("state:", open("state").read())
print("lines:", number)
"#;

#[apply(as_root_and_user)]
fn what_others_change_while_a_job_is_stopped_stays() {
    let place = Place::new();
    fs::write(place.file("job.py"), WRITER).unwrap();
    let start = || place.start(&ON_REQUEST, &["python3", "-u", "job.py"]);
    let mut run = start();
    place.wait_for("out", "ready");
    run.signal(Signal::SIGTERM);
    assert_eq!(run.wait(), 75, "{}", place.text("err"));
    for name in ["log", "table"] {
        let file = File::options().append(true).open(place.file(name));
        writeln!(file.unwrap(), "another program's").unwrap();
    }
    fs::write(place.file("state"), "another program's").unwrap();
    fs::write(place.file("new"), "another program's").unwrap();

    place.go();
    assert_eq!(start().wait(), 0, "{}", place.text("err"));
    assert!(place.text("err").contains("restored image"));
    let out = place.text("out");
    assert!(
        out.contains("table: the job's\nanother program's\nstate: another program's\n"),
        "{out}"
    );
    let log = place.text("log");
    let lines: Vec<&str> = log.lines().collect();
    let (others, jobs): (Vec<&str>, Vec<&str>) = lines
        .iter()
        .copied()
        .partition(|line| *line == "another program's");
    assert_eq!(others.len(), 1, "{log}");
    let expected = (0..jobs.len()).map(|number| format!("line {number}"));
    assert!(jobs.iter().copied().eq(expected), "{log}");
    assert!(out.contains(&format!("lines: {}\n", jobs.len())), "{out}");
    assert_eq!(place.text("new"), "another program's");
}
