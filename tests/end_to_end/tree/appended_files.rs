//! Files that the job has open, only appends to, and takes away or changes after the snapshot, as a log that it rotates.

use std::fs;

use crate::harness::{ON_REQUEST, Place, apply, as_root_and_user, wait_until};

/// At each order, makes its logs longer, or takes them away in every way. At the end, each gets another line.
const JOB: &str = r#"
import os, time
logs = {name: open(name, "ab", 0) for name in ("removed", "empty", "shortened", "emptied", "replaced", "rotated", "changed", "long")}
for name, log in logs.items():
    if name != "empty": log.write(name.encode())
logs["changed"].write(os.urandom(400000))
logs["long"].write(os.urandom(5 << 20))
def change():
    with open("changed", "r+b") as file: file.seek(200000); file.write(os.urandom(1000))
def grow():
    for name, log in logs.items():
        if name != "empty": log.write(os.urandom(70000))
    change()
def take_away():
    for name in "removed", "empty", "long": os.remove(name)
    os.truncate("shortened", 3)
    os.truncate("emptied", 0); logs["emptied"].write(bytes(500000))
    with open("new", "wb") as file: file.write(bytes(500000))
    os.replace("new", "replaced")
    os.rename("rotated", "rotated.1")
    with open("rotated", "wb") as file: file.write(b"new")
    os.remove("rotated.1")
    change()
print("made", flush=True)
while not os.path.exists("end"):
    for order in grow, take_away:
        if os.path.exists(order.__name__):
            order()
            print(order.__name__, flush=True)
            while os.path.exists(order.__name__): time.sleep(0.005)
    time.sleep(0.005)
for log in logs.values(): log.write(b"the end")
"#;

const NAMES: [&str; 8] = [
    "removed",
    "empty",
    "shortened",
    "emptied",
    "replaced",
    "rotated",
    "changed",
    "long",
];

#[apply(as_root_and_user)]
fn logs_that_the_job_takes_away_come_back() {
    let place = Place::new();
    let mut run = place.start_python_with(&ON_REQUEST, JOB, |run| {
        run.env("CKPT_RUN_RESTART_BACKOFF", "0s");
    });
    place.wait_for("out", "made");
    let order = |name: &str| {
        let seen = || place.text("out").matches(name).count();
        let before = seen();
        fs::write(place.file(name), "").unwrap();
        wait_until("the order", || seen() > before);
    };
    place.snapshot();
    let mut logs = Vec::new();
    for restores in 1..=2 {
        order("grow");
        fs::remove_file(place.file("grow")).unwrap();
        place.snapshot();
        logs = NAMES.map(|name| fs::read(place.file(name)).unwrap()).into();
        order("take_away");
        fs::remove_file(place.file("take_away")).unwrap();
        run.crash();
        let restored = || place.text("err").matches("restored image=").count();
        wait_until("the restore", || restored() == restores);
        for (name, log) in NAMES.iter().zip(&logs) {
            let now = fs::read(place.file(name)).unwrap();
            assert!(now == *log, "{name}: {}", place.text("err"));
        }
        assert!(!place.file("rotated.1").exists());
    }
    fs::write(place.file("end"), "").unwrap();
    assert_eq!(run.wait(), 0, "{}", place.text("err"));
    for (name, log) in NAMES.iter().zip(&mut logs) {
        log.extend(b"the end");
        assert!(fs::read(place.file(name)).unwrap() == *log, "{name}");
    }
}
