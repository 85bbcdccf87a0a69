//! Files that the job changes by another name (hard link) than the one that they have at the snapshot.

use std::fs;
use std::os::unix::fs::PermissionsExt;

use crate::harness::{ON_REQUEST, Place, Run, apply, as_root, wait_until};

/// Writes a file for each way, and after the order changes it by a name that has gone by the end.
const JOB: &str = r#"
import mmap, os, subprocess, sys, time
def write(name):
    with open(name, "r+b") as file: file.write(b"new")
def ways():
    os.link("remove", "a"); write("a"); os.remove("a")
    os.link("rename", "b"); write("b"); os.rename("b", "b2"); os.rename("b2", "b3"); os.remove("b3")
    os.link("replace", "c"); write("c"); open("c.tmp", "wb").write(b"x"); os.replace("c.tmp", "c")
    os.link("late", "d"); file = open("d", "r+b", buffering=0); os.remove("d"); file.write(b"new"); file.close()
    os.link("mode", "e"); os.chmod("e", 0o604); os.remove("e")
    os.link("map", "f"); file = open("f", "r+b"); os.remove("f")
    mmap.mmap(file.fileno(), 3)[:3] = b"new"; file.close()
    os.makedirs("g"); os.link("folder", "g/x"); write("g/x"); subprocess.run(["rm", "-r", "g"], check=True)
names = "remove", "rename", "replace", "late", "mode", "map", "folder", "again"
for name in names: open(name, "w").write("old")
time.sleep(0.1) # the files are older than the image
print("made", flush=True)
while not os.path.exists("order"): time.sleep(0.005)
ways()
if open("order").read() == "first": os.remove("again")
else: os.link("again", "h"); write("h"); os.remove("h"); os.remove("folder")
print("changed", flush=True)
while not os.path.exists("end"): time.sleep(0.005)
"#;

/// Files of the job.
const NAMES: [&str; 8] = [
    "remove", "rename", "replace", "late", "mode", "map", "folder", "again",
];

fn start(place: &Place, script: &str) -> Run {
    place.start_python_with(&ON_REQUEST, script, |run| {
        run.env("CKPT_RUN_RESTART_BACKOFF", "0s");
    })
}

#[apply(as_root)]
fn a_file_changed_by_a_name_that_is_gone_is_restored() {
    let place = Place::new();
    let mut run = start(&place, JOB);
    place.wait_for("out", "made");
    let files = || {
        NAMES.map(|name| {
            let about = fs::metadata(place.file(name)).ok();
            let content = fs::read_to_string(place.file(name)).unwrap_or_default();
            (content, about.map(|about| about.permissions().mode()))
        })
    };
    let kept = files();
    place.snapshot();
    // The second restore begins with a file that the first one has created.
    for order in ["first", "second"] {
        let restored = || place.text("err").matches("restored image=").count();
        let before = restored();
        fs::write(place.file("draft"), order).unwrap();
        fs::rename(place.file("draft"), place.file("order")).unwrap();
        place.wait_for("out", "changed");
        let changed = files()
            .iter()
            .filter(|(content, _)| content == "new")
            .count();
        assert_eq!(changed, 6);
        fs::remove_file(place.file("order")).unwrap();
        run.crash();
        wait_until("the restore", || restored() > before);
        assert_eq!(files(), kept, "{}", place.text("err"));
    }
    fs::write(place.file("order"), "first").unwrap();
    place.wait_for("out", "changed");
    fs::write(place.file("end"), "").unwrap();
    assert_eq!(run.wait(), 0, "{}", place.text("err"));
}

/// At each order, changes a file by the second of its names, a file by a name that is gone afterwards, and a file that it
/// has created just before.
const IN_ROUNDS: &str = r#"
import os, time
def write(name, text):
    with open(name, "w") as file: file.write(text)
for name in "a", "gone": write(name, "round 0")
os.link("a", "b")
time.sleep(0.1) # the files are older than the image
for number in range(1, 4):
    print("round", number, flush=True)
    while not os.path.exists("order-%d" % number): time.sleep(0.005)
    text = "round %d" % number
    write("b", text)
    os.link("gone", "name"); write("name", text); os.remove("name")
    write("new", "young"); os.link("new", "name"); write("name", text); os.remove("name")
print("end", flush=True)
while not os.path.exists("end"): time.sleep(0.005)
"#;

#[apply(as_root)]
fn an_image_has_what_was_written_by_another_name() {
    let place = Place::new();
    let mut run = start(&place, IN_ROUNDS);
    let contents = || ["a", "b", "gone", "new"].map(|name| place.text(name));
    for round in 1..3 {
        place.wait_for("out", &format!("round {round}"));
        place.snapshot();
        fs::write(place.file(&format!("order-{round}")), "").unwrap();
    }
    place.wait_for("out", "round 3");
    place.snapshot();
    let kept = contents();
    assert_eq!(kept, ["round 2"; 4]);
    fs::write(place.file("order-3"), "").unwrap();
    place.wait_for("out", "end");
    assert_eq!(contents(), ["round 3"; 4]);
    fs::remove_file(place.file("order-3")).unwrap();
    run.crash();
    wait_until("the restore", || {
        place.text("err").contains("restored image=")
    });
    assert_eq!(contents(), kept, "{}", place.text("err"));
    fs::write(place.file("order-3"), "").unwrap();
    fs::write(place.file("end"), "").unwrap();
    assert_eq!(run.wait(), 0, "{}", place.text("err"));
    assert_eq!(contents(), ["round 3"; 4]);
}

/// Changes a file by a mapping, which the kernel does not report, and later by a write.
const MAPPED: &str = r#"
import mmap, os, time
def wait(order):
    print(order, flush=True)
    while not os.path.exists(order): time.sleep(0.005)
open("state", "w").write("old"); os.link("state", "other")
time.sleep(0.1) # older than the image
wait("map")
file = open("state", "r+b", buffering=0); mapped = mmap.mmap(file.fileno(), 3); mapped[:] = b"new"
wait("write")
file.write(b"newer")
wait("end")
"#;

#[apply(as_root)]
fn an_image_has_what_was_mapped_by_another_name() {
    let place = Place::new();
    let mut run = start(&place, MAPPED);
    let order = |order: &str| {
        place.wait_for("out", order);
        place.snapshot();
        fs::write(place.file(order), "").unwrap();
    };
    order("map");
    order("write");
    place.wait_for("out", "end");
    fs::remove_file(place.file("write")).unwrap();
    run.crash();
    wait_until("the restore", || {
        place.text("err").contains("restored image=")
    });
    let contents = || ["state", "other"].map(|name| place.text(name));
    assert_eq!(contents(), ["new"; 2], "{}", place.text("err"));
    fs::write(place.file("write"), "").unwrap();
    fs::write(place.file("end"), "").unwrap();
    assert_eq!(run.wait(), 0, "{}", place.text("err"));
    assert_eq!(contents(), ["newer"; 2]);
}
