//! Files that the job has open, only appends to, and takes away or changes after the snapshot, as a log that it rotates.

use std::fs;

use crate::harness::{ON_REQUEST, Place, Run, apply, as_root, as_root_and_user, wait_until};

/// Beginning of the jobs: `obey` carries out orders, each as long as there is a file of its name.
const OBEY: &str = r#"
import os, time
def obey(*orders):
    print("made", flush=True)
    while not os.path.exists("end"):
        for order in orders:
            if os.path.exists(order.__name__):
                order()
                print(order.__name__, flush=True)
                while os.path.exists(order.__name__): time.sleep(0.005)
        time.sleep(0.005)
"#;

/// At each order, makes its logs longer, or takes them away in every way. At the end, each gets another line.
const JOB: &str = r#"
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
obey(grow, take_away)
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
    let mut run = start(&place, JOB);
    let mut logs = Vec::new();
    for _ in 0..2 {
        order(&place, "grow");
        place.snapshot();
        logs = NAMES.map(|name| fs::read(place.file(name)).unwrap()).into();
        order(&place, "take_away");
        crash(&place, &run);
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

/// Takes away and rotates its log, which is not in its working folder.
const ELSEWHERE: &str = r#"
log = open("FOLDER/log", "ab", 0); log.write(b"first")
def take_away(): os.remove("FOLDER/log")
def rotate():
    os.rename("FOLDER/log", "FOLDER/log.1"); log.write(b"more"); open("FOLDER/log", "wb").close()
obey(take_away, rotate)
"#;

#[apply(as_root)]
fn a_log_elsewhere_is_rotated_after_a_restore() {
    let (place, folder) = (Place::new(), tempfile::tempdir_in("/var/tmp").unwrap());
    let script = ELSEWHERE.replace("FOLDER", folder.path().to_str().unwrap());
    let mut run = start(&place, &script);
    for name in ["take_away", "rotate"] {
        order(&place, name);
        crash(&place, &run);
        let log = fs::read_to_string(folder.path().join("log")).unwrap();
        assert_eq!(log, "first", "{name}");
        assert!(!folder.path().join("log.1").exists());
    }
    fs::write(place.file("end"), "").unwrap();
    assert_eq!(run.wait(), 0, "{}", place.text("err"));
}

/// Starts a job, and takes a snapshot when it has made its logs.
fn start(place: &Place, script: &str) -> Run {
    let run = place.start_python_with(&ON_REQUEST, &format!("{OBEY}{script}"), |run| {
        run.env("CKPT_RUN_RESTART_BACKOFF", "0s");
    });
    place.wait_for("out", "made");
    place.snapshot();
    run
}

/// Gives an order to the job, and waits until it is carried out.
fn order(place: &Place, name: &str) {
    let seen = || place.text("out").matches(name).count();
    let before = seen();
    fs::write(place.file(name), "").unwrap();
    wait_until("the order", || seen() > before);
    fs::remove_file(place.file(name)).unwrap();
}

/// Kills the job, and waits until it is restored.
fn crash(place: &Place, run: &Run) {
    let restored = || place.text("err").matches("restored image=").count();
    let before = restored();
    run.crash();
    wait_until("the restore", || restored() > before);
}
