//! Files of the job: written in every way, and changed by others before the restore.

use std::fs;
use std::process::Command;

use super::counter_job::{
    COUNTER, counted, finish_counter, said, start, start_with, wait_for_progress,
    wait_for_the_first_line,
};
use crate::harness::{
    ON_REQUEST, Place, Run, apply, as_root, criu_script, lines, stderr, wait_until, wait_until_or,
};

/// Writes each number in all possible ways.
const WRITE: &str = r#"
import os, time
open("start-a", "w").write("kept\n"); open("start-a+", "w").write("kept\n")
open("r+", "w").write("x" * 65536 + "\n")
w, a, rp, ap = open("log", "w"), open("start-a", "a"), open("r+", "r+"), open("start-a+", "a+")
raw = os.open("raw", os.O_WRONLY | os.O_CREAT, 0o644)
i = 0
open("number", "w").write("0")
number = open("number", "r+")
while not os.path.exists("stop"):
    number.seek(0); value = int(number.read())
    assert value == i
    number.seek(0); number.write(str(value + 1)); number.flush()
    for file in (a, rp, ap):
        file.write(f"{i}\n"); file.flush()
    os.write(raw, f"{i}\n".encode())
    print(i, flush=True)
    w.write(f"{i}\n"); w.flush()
    i += 1
    time.sleep(0.01)
"#;

/// Crashes the job so many times, each time after a snapshot and some progress, and has it stop after the last restore.
fn crash_after_snapshots(place: &Place, run: &Run, times: usize) {
    wait_for_the_first_line(place);
    for _ in 0..times {
        wait_for_progress(place);
        place.snapshot();
        wait_for_progress(place);
        run.crash();
        wait_for_progress(place);
    }
    fs::write(place.file("stop"), "").expect("written");
}

#[apply(as_root)]
fn files_written_in_every_mode_are_as_of_an_uninterrupted_run() {
    let place = Place::new();
    let mut run = start(&place, WRITE);
    crash_after_snapshots(&place, &run, 2);
    assert_eq!(run.wait(), 0, "{}", place.text("err"));
    let count = counted(&place);
    let all = lines(count);
    for name in ["log", "raw", "out"] {
        assert_eq!(place.text(name), all, "{name}");
    }
    for name in ["start-a", "start-a+"] {
        assert_eq!(place.text(name), format!("kept\n{all}"), "{name}");
    }
    assert_eq!(place.text("number"), count.to_string());
    let overwritten = place.text("r+");
    assert!(overwritten.starts_with(&all));
    let rest = 65_537 - all.len();
    assert_eq!(overwritten.len(), 65_537);
    assert!(overwritten[all.len()..].starts_with(&"x".repeat(rest - 1)));
}

/// Has written a file, and keeps another one open and writes to it at any position.
const CLOSED_AND_OPEN: &str = r#"
import os, time
with open("a-closed", "wb") as closed: closed.write(os.urandom(700_000))
state = open("b-open", "w+b", buffering=0); state.write(os.urandom(700_000))
log = open("log", "w")
i = 0
while not os.path.exists("stop"):
    state.seek(0); state.write(i.to_bytes(8, "little"))
    log.write(f"{i}\n"); log.flush()
    i += 1
    time.sleep(0.01)
"#;

#[apply(as_root)]
fn an_open_file_is_kept_before_a_closed_one() {
    let place = Place::new();
    let mut run = start_with(&place, CLOSED_AND_OPEN, |command| {
        command.env("CKPT_RUN_FILES_KEEP_TOTAL", "1MiB");
    });
    wait_for_the_first_line(&place);
    place.snapshot();
    wait_for_progress(&place);
    run.crash();
    wait_for_progress(&place);
    fs::write(place.file("stop"), "").expect("written");
    assert_eq!(run.wait(), 0, "{}", place.text("err"));
    assert_eq!(place.text("log"), lines(counted(&place)));
    let said = place.text("err");
    let closed = "/a-closed (beyond files.keep_content or files.keep_total";
    assert!(said.contains(closed) && !said.contains("/b-open"), "{said}");
}

/// Writes a log and reads an input file.
const READ_AND_WRITE: &str = r#"
import os, time
log, data = open("log", "a"), open("input")
data.read(10)
i = 0
while not os.path.exists("stop"):
    log.write(f"{i}\n"); log.flush()
    print(i, flush=True)
    i += 1
    time.sleep(0.01)
"#;

/// Creates a run whose supervisor was killed some time after its only snapshot, at which its log had at least this
/// size.
fn killed(script: &str, bytes_min: usize) -> Place {
    let place = Place::new();
    fs::write(place.file("input"), "a".repeat(100)).expect("written");
    let mut run = start(&place, script);
    wait_until("its log", || place.text("log").len() > bytes_min);
    place.snapshot();
    wait_for_progress(&place);
    run.kill_supervisor();
    place
}

/// Applies `change` to the files of a killed run and expects the same command line to refuse with these words; after
/// `undo`, it must work.
fn refused_until_undone(change: impl Fn(&Place), undo: impl Fn(&Place), words: &[&str]) {
    let place = killed(READ_AND_WRITE, 8);
    change(&place);
    let files = ["log", "input", "out"].map(|name| place.text(name));
    let before = place.text("err").len();
    assert_eq!(start_again(&place).wait(), 125, "{}", place.text("err"));
    let told = place.text("err").split_off(before);
    for word in words {
        assert!(told.contains(word), "{word:?} is not in {told}");
    }
    assert_eq!(files, ["log", "input", "out"].map(|name| place.text(name)));
    let images = place.images();
    assert_eq!(images.len(), 1);
    assert!(images[0]["damaged"].is_null(), "{images:?}");

    undo(&place);
    goes_on(&place);
}

/// Restores the job by the same command line and checks that its run equals an uninterrupted one.
fn goes_on(place: &Place) {
    let mut again = start_again(place);
    wait_until_or(
        || format!("the restore; {}", place.text("err")),
        || said(place, "restored image=") == 1,
    );
    wait_for_progress(place);
    fs::write(place.file("stop"), "").expect("written");
    assert_eq!(again.wait(), 0, "{}", place.text("err"));
    let count = counted(place);
    assert_eq!(place.text("log"), lines(count));
    assert_eq!(place.text("out"), lines(count));
}

fn start_again(place: &Place) -> Run {
    start(place, READ_AND_WRITE)
}

fn rename(place: &Place, from: &str, to: &str) {
    fs::rename(place.file(from), place.file(to)).expect("renamed");
}

#[apply(as_root)]
fn removed_file_is_named_and_its_return_allows_a_restore() {
    refused_until_undone(
        |place| rename(place, "input", "elsewhere"),
        |place| rename(place, "elsewhere", "input"),
        &["cannot find", "/input", "put it back"],
    );
}

#[apply(as_root)]
fn a_removed_log_is_made_again() {
    let place = killed(READ_AND_WRITE, 8);
    fs::remove_file(place.file("log")).expect("removed");
    goes_on(&place);
}

#[apply(as_root)]
fn replaced_file_is_named_until_the_old_one_is_back() {
    refused_until_undone(
        |place| {
            rename(place, "log", "elsewhere");
            fs::write(place.file("log"), place.text("elsewhere")).expect("written");
        },
        |place| rename(place, "elsewhere", "log"),
        &["/log", "replaced by another file"],
    );
}

#[apply(as_root)]
fn a_log_of_which_a_copy_is_in_its_place_is_gone_on_with() {
    // A log of a few lines might be confused with another.
    let place = killed(&READ_AND_WRITE.replace("0.01", "0.001"), 4096);
    rename(&place, "log", "elsewhere");
    fs::copy(place.file("elsewhere"), place.file("log")).expect("copied");
    goes_on(&place);
}

#[apply(as_root)]
fn shrunk_file_is_named_until_it_is_complete_again() {
    refused_until_undone(
        |place| {
            let copied = Command::new("cp")
                .arg("--preserve")
                .args([place.file("log"), place.file("copy")])
                .status();
            assert!(copied.expect("cp runs").success());
            fs::OpenOptions::new()
                .write(true)
                .open(place.file("log"))
                .and_then(|log| log.set_len(2))
                .expect("cut");
        },
        // In place: the file keeps its identity. With its time, because a later one is that of another program's lines.
        |place| {
            fs::write(place.file("log"), place.text("copy")).expect("written");
            let copied = Command::new("touch")
                .arg("--reference")
                .args([place.file("copy"), place.file("log")])
                .status();
            assert!(copied.expect("touch runs").success());
        },
        &["/log", "shrank"],
    );
}

#[apply(as_root)]
fn changed_input_file_is_named_until_it_is_unchanged() {
    refused_until_undone(
        |place| fs::write(place.file("input"), "b".repeat(101)).expect("written"),
        |place| fs::write(place.file("input"), "a".repeat(100)).expect("written"),
        &["/input", "changed"],
    );
}

#[apply(as_root)]
fn only_the_requested_image_is_restored() {
    let place = Place::new();
    // The job has a file open as long as it exists.
    let keep_open = "i += 1\n    extra = open('extra') if os.path.exists('extra') else None\n";
    let script = COUNTER.replace("i += 1\n", keep_open);
    let mut run = start(&place, &script);
    wait_for_the_first_line(&place);
    for there in [false, true, false] {
        if there {
            fs::write(place.file("extra"), "x").expect("written");
        } else {
            let _ = fs::remove_file(place.file("extra"));
        }
        wait_for_progress(&place);
        place.snapshot();
    }
    run.kill_supervisor();

    let count = counted(&place);
    let asked = place.verb(&["restore", "000002"]);
    assert_eq!(asked.status.code(), Some(125));
    let text = stderr(&asked);
    for part in [
        "cannot continue from image 000002",
        "/extra",
        "ckpt-run list",
    ] {
        assert!(text.contains(part), "{part}: {text}");
    }
    assert!(!text.contains("restored"), "{text}");
    assert_eq!(counted(&place), count);
    // The newest image was not abandoned because of it.
    let mut again = start(&place, &script);
    wait_until_or(
        || format!("the restore; {}", place.text("err")),
        || said(&place, "restored image=000003") == 1,
    );
    finish_counter(&place, &mut again);
}

/// Rewrites closed and mapped files all the time, and compares each with what it has in memory.
const REWRITES: &str = r#"
import mmap, os, random, sys
names = [f"state-{i}" for i in range(300)]
chosen, known, maps, log = random.Random(1), {}, {}, open("log", "a")
def write(name, value):
    how = chosen.randrange(5)
    if name in maps and how < 4:
        maps[name][:] = value
        if how == 0: maps.pop(name).close()
    elif how == 0:
        maps.pop(name, None)
        with open(name + ".new", "wb") as file: file.write(value)
        os.rename(name + ".new", name)
    elif how < 3 or name not in known:
        with open(name, "r+b" if name in known else "wb") as file: file.write(value)
    else:
        with open(name, "r+b") as file: maps[name] = mmap.mmap(file.fileno(), 8)
        maps[name][:] = value
def check(name):
    with open(name, "rb") as file: found = file.read()
    if found != known[name]: sys.exit(f"{name} has {found}, not {known[name]}")
i = 0
while not os.path.exists("stop"):
    name = chosen.choice(names)
    if name in known: check(name)
    value = i.to_bytes(8, "little")
    write(name, value)
    known[name] = value
    i += 1
    if i % 100 == 0: log.write(f"{i}\n"); log.flush()
for name in known: check(name)
"#;

#[apply(as_root)]
fn files_that_change_while_they_are_copied_are_as_at_the_freeze() {
    let place = Place::new();
    let mut run = start(&place, REWRITES);
    crash_after_snapshots(&place, &run, 4);
    assert_eq!(run.wait(), 0, "{}{}", place.text("err"), place.text("out"));
}

/// Changes a file by a mapping, which the kernel does not report before the file is closed.
const MAPS: &str = r#"
import mmap, os, sys, time
def wait(order):
    print(order, flush=True)
    while not os.path.exists(sys.argv[1] + "/" + order): time.sleep(0.005)
open("state", "w").write("old")
time.sleep(0.1) # older than the image
wait("map")
with open("state", "r+b") as file, mmap.mmap(file.fileno(), 3) as mapped:
    mapped[:] = b"new"; mapped.flush()
    time.sleep(0.1) # older than the next image
    wait("close")
wait("end")
"#;

#[apply(as_root)]
fn what_was_mapped_before_a_failed_image_is_undone() {
    let (place, orders) = (Place::new(), Place::new());
    fs::write(place.file("job.py"), MAPS).unwrap();
    let fails =
        "if [ \"$1\" = dump ] && [ -e HERE/fail ]; then CRIU \"$@\"; exit 1; fi; exec CRIU \"$@\"";
    let criu = criu_script(orders.path(), fails);
    let job = ["python3", "-u", "job.py", orders.path().to_str().unwrap()];
    let mut run = place.start_with(&ON_REQUEST, &job, |run| {
        run.env("CKPT_RUN_RESTART_BACKOFF", "0s");
        run.env("CKPT_RUN_CRIU_PATH", criu);
    });
    let order = |order: &str| {
        place.wait_for("out", order);
        fs::write(orders.file(order), "").unwrap();
    };
    place.wait_for("out", "map");
    place.snapshot();
    order("map");
    place.wait_for("out", "close");
    fs::write(orders.file("fail"), "").unwrap();
    let failed = place.verb(&["snapshot"]);
    assert!(!failed.status.success(), "{}", stderr(&failed));
    order("close");
    place.wait_for("out", "end");
    fs::remove_file(orders.file("map")).unwrap();
    run.crash();
    wait_until("the restore", || {
        place.text("err").contains("restored image=")
    });
    assert_eq!(place.text("state"), "old", "{}", place.text("err"));
    order("map");
    order("end");
    assert_eq!(run.wait(), 0, "{}", place.text("err"));
    assert_eq!(place.text("state"), "new");
}
