//! The main job: a supervised job is snapshotted, killed, and comes back as if nothing had happened.

use std::fs;
use std::time::SystemTime;

use super::common::{Place, Run, can_run};
use super::{COUNT, lines};

/// Starts the job that counts, and waits until it does.
fn counting(place: &Place) -> Run {
    let run = place.start_python(&["--interval", "never"], COUNT);
    place.wait_for("log", "5\n");
    run
}

#[test]
fn a_killed_job_comes_back_and_ends_as_if_nothing_had_happened() {
    if !can_run() {
        return;
    }
    let place = Place::new();
    let mut run = counting(&place);
    place.snapshot();
    place.wait_for("log", "15\n");
    run.crash();
    place.go();
    assert_eq!(run.wait(), 0, "{}", place.text("err"));
    assert_eq!(place.text("log"), lines(40));
    assert_eq!(place.text("out"), lines(40));
}

#[test]
fn a_store_is_looked_for_again_when_it_was_away_at_a_crash() {
    if !can_run() {
        return;
    }
    let place = Place::new();
    let settings = "[restart]\nbackoff = '10s'\n";
    fs::write(place.file("ckpt-run.toml"), settings).unwrap();
    let mut run = counting(&place);
    place.snapshot();
    let (there, away) = (place.file(".ckpt-run/images"), place.file("away"));
    fs::rename(&there, &away).unwrap();
    run.crash();
    place.wait_for("err", "the job crashed");
    fs::rename(&away, &there).unwrap();
    place.go();
    assert_eq!(run.wait(), 0, "{}", place.text("err"));
    assert_eq!(place.text("log"), lines(40));
    assert_eq!(place.text("out"), lines(40));
}

#[test]
fn a_cleaned_temporary_folder_and_files_with_new_times_end_no_run() {
    if !can_run() {
        return;
    }
    let place = Place::new();
    let mut run = counting(&place);
    place.snapshot();
    // As an age-based cleaner does, and a copy of the store as a folder.
    fs::remove_dir_all(fs::read_link(place.file(".ckpt-run/work")).unwrap()).unwrap();
    for copy in fs::read_dir(place.file(".ckpt-run/bin")).unwrap() {
        let copy = fs::File::open(copy.unwrap().path()).unwrap();
        copy.set_modified(SystemTime::now()).unwrap();
    }
    run.crash();
    place.wait_for("err", "restored image=000001");
    place.snapshot();
    place.go();
    assert_eq!(run.wait(), 0, "{}", place.text("err"));
    assert_eq!(place.text("log"), lines(40));
}

#[test]
fn a_supervisor_has_as_many_descriptors_as_it_may() {
    if !can_run() {
        return;
    }
    let place = Place::new();
    let mut run = counting(&place);
    let limits = |pid: i32| {
        let text = fs::read_to_string(format!("/proc/{pid}/limits")).unwrap();
        let line = text.lines().find(|line| line.starts_with("Max open files"));
        let words: Vec<String> = line
            .unwrap()
            .split_whitespace()
            .map(str::to_owned)
            .collect();
        (words[3].clone(), words[4].clone())
    };
    let own = limits(i32::try_from(std::process::id()).unwrap());
    let (soft, hard) = limits(run.pid());
    assert!(soft == hard || soft == "1048576", "{soft} of {hard}");
    assert_eq!(limits(run.job()), own);
    place.go();
    assert_eq!(run.wait(), 0, "{}", place.text("err"));
}

#[test]
fn an_eventfd_that_criu_would_restore_wrongly_fails_the_snapshot_and_the_job_goes_on() {
    if !can_run() {
        return;
    }
    let place = Place::new();
    let job = r#"
import os, time
fd = os.eventfd(3, os.EFD_SEMAPHORE)
print("ready", flush=True)
while not os.path.exists("go"):
    time.sleep(0.02)
print(os.eventfd_read(fd), flush=True)
"#;
    let mut run = place.start_python(&["--interval", "never"], job);
    place.wait_for("out", "ready");
    let refused = place.verb(&["snapshot"]);
    assert_eq!(refused.status.code(), Some(125));
    let reason = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(reason.contains("EFD_SEMAPHORE"), "{reason}");
    place.go();
    assert_eq!(run.wait(), 0);
    assert_eq!(place.text("out"), "ready\n1\n");
}
