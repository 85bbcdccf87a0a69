//! Separation of attempts: the choice of the image, the files and the output belong to one attempt.

use std::fs;
use std::process::Command;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::harness::{
    ON_REQUEST, Place, Run, apply, as_root, as_root_and_user, criu_script, wait_until,
    wait_until_or,
};

/// Writes lines that differ between attempts: each contains the random number of the previous line. Ends when the file
/// `stop` exists.
const CHAIN: &str = r#"
import os, time
log = open("log", "a")
last, i = "start", 0
while not os.path.exists("stop"):
    own = os.urandom(8).hex()
    line = f"{i} {last} {own}\n"
    os.write(1, line.encode())
    log.write(line); log.flush()
    last, i = own, i + 1
    time.sleep(0.01)
"#;

/// CRIU substitute that dies in as many restores as the file `failures` states, then waits forever if there is a file
/// `hold`. The files are in the store, because files elsewhere would count as the job's.
const FAULTY_CRIU: &str = r#"if [ "$1" = restore ]; then
    left=$(cat HERE/.ckpt-run/failures 2>/dev/null || echo 0)
    if [ "$left" -gt 0 ]; then echo $((left - 1)) > HERE/.ckpt-run/failures; kill -KILL $$; fi
    if [ -e HERE/.ckpt-run/hold ]; then touch HERE/.ckpt-run/held; exec sleep 1000; fi
fi
exec CRIU "$@""#;

fn faulty_criu(command: &mut Command) {
    let folder = command.get_current_dir().expect("a folder").to_owned();
    command.env("CKPT_RUN_CRIU_PATH", criu_script(&folder, FAULTY_CRIU));
    command.env("CKPT_RUN_RESTART_BACKOFF", "10ms");
}

fn start(place: &Place, script: &str) -> Run {
    place.start_python_with(&ON_REQUEST, script, faulty_criu)
}

fn length(place: &Place) -> usize {
    place.text("out").len()
}

fn wait_for_output_beyond(place: &Place, bytes: usize) {
    wait_until_or(
        || format!("output; {}", place.text("err")),
        || length(place) > bytes + 200,
    );
}

/// Creates a run of the script with this many images, and output beyond the newest one.
fn with_images(script: &str, images: usize) -> (Place, Run) {
    let place = Place::new();
    let run = start(&place, script);
    for _ in 0..images {
        wait_for_output_beyond(&place, length(&place));
        place.snapshot();
    }
    wait_for_output_beyond(&place, length(&place));
    (place, run)
}

fn restored(place: &Place) -> Vec<String> {
    let err = place.text("err");
    let lines = err.lines();
    let images = lines.filter_map(|line| line.strip_prefix("ckpt-run: restored image="));
    images.map(|rest| rest[..6].to_owned()).collect()
}

fn wait_for_restores(place: &Place, expected: &[&str]) {
    let what = format!("the restores {expected:?}; {}", place.text("err"));
    wait_until(&what, || restored(place).len() >= expected.len());
    assert_eq!(restored(place), expected, "{}", place.text("err"));
}

fn assert_one_attempt(place: &Place, name: &str) {
    let text = place.text(name);
    let mut last = "start";
    for (number, line) in text.lines().enumerate() {
        let words: Vec<&str> = line.split(' ').collect();
        let is_next = words.len() == 3 && words[0] == number.to_string() && words[1] == last;
        assert!(
            is_next,
            "{name}, line {number}: {line}\n{}",
            place.text("err")
        );
        last = words[2];
    }
}

/// Lets the job end and compares everything that it wrote.
fn finish(place: &Place, run: &mut Run) {
    wait_for_output_beyond(place, length(place));
    fs::write(place.file("stop"), "").expect("written");
    assert_eq!(run.wait(), 0, "{}", place.text("err"));
    assert_one_attempt(place, "out");
    if place.file("log").exists() {
        assert_eq!(place.text("log"), place.text("out"));
    }
}

fn set(place: &Place, name: &str, text: &str) {
    fs::write(place.file(name), text).expect("written");
}

#[apply(as_root)]
fn an_image_passed_over_is_abandoned_before_the_older_one_runs() {
    let (place, mut run) = with_images(CHAIN, 2);
    run.crash();
    wait_for_restores(&place, &["000002"]);
    run.crash();
    wait_for_restores(&place, &["000002", "000001"]);
    wait_for_output_beyond(&place, 4 * length(&place));
    run.kill_supervisor();
    let mut again = start(&place, CHAIN);
    wait_for_restores(&place, &["000002", "000001", "000001"]);
    finish(&place, &mut again);
}

#[apply(as_root_and_user)]
fn an_older_image_does_not_run_if_the_newer_cannot_be_abandoned() {
    let (place, mut run) = with_images(CHAIN, 2);
    // A file cannot be renamed over a folder.
    fs::remove_file(place.file(".ckpt-run/run.json")).expect("removed");
    fs::create_dir(place.file(".ckpt-run/run.json")).expect("made");
    run.crash();
    wait_for_restores(&place, &["000002"]);
    run.crash();
    assert_eq!(run.wait(), 125, "{}", place.text("err"));
    assert_eq!(restored(&place), ["000002"]);
}

#[apply(as_root)]
fn restores_that_all_fail_leave_files_and_output_as_they_were() {
    let (place, mut run) = with_images(CHAIN, 3);
    run.kill_supervisor();
    let before = ["out", "log"].map(|name| place.text(name));
    set(&place, ".ckpt-run/failures", "99");
    assert_eq!(start(&place, CHAIN).wait(), 125, "{}", place.text("err"));
    assert_eq!(["out", "log"].map(|name| place.text(name)), before);
    set(&place, ".ckpt-run/failures", "0");
    let mut again = start(&place, CHAIN);
    // The newest image was not abandoned in favour of older ones that did not run.
    wait_for_restores(&place, &["000003"]);
    finish(&place, &mut again);
}

#[apply(as_root)]
fn output_is_whole_after_failed_restores_under_one_supervisor() {
    let (place, mut run) = with_images(CHAIN, 2);
    // The newest image fails twice and the older one once; then the older one works.
    set(&place, ".ckpt-run/failures", "3");
    run.crash();
    wait_for_restores(&place, &["000001"]);
    finish(&place, &mut run);
}

#[apply(as_root)]
fn killed_restore_of_an_older_image_continues_from_it() {
    let script = output_alone();
    let (place, mut run) = with_images(&script, 2);
    run.kill_supervisor();
    set(&place, ".ckpt-run/failures", "2");
    set(&place, ".ckpt-run/hold", "");
    let mut second = start(&place, &script);
    place.wait_for("err", "restoring image=000001");
    wait_until("CRIU", || place.file(".ckpt-run/held").exists());
    second.kill_supervisor();
    fs::remove_file(place.file(".ckpt-run/hold")).expect("removed");
    let mut again = start(&place, &script);
    wait_for_restores(&place, &["000001"]);
    finish(&place, &mut again);
}

#[apply(as_root)]
fn a_stop_in_the_restore_of_an_older_image_reverts_the_return() {
    let (place, mut run) = with_images(CHAIN, 2);
    run.kill_supervisor();
    let before = ["out", "log"].map(|name| place.text(name));
    set(&place, ".ckpt-run/failures", "2");
    set(&place, ".ckpt-run/hold", "");
    let mut second = start(&place, CHAIN);
    place.wait_for("err", "restoring image=000001");
    wait_until("CRIU", || place.file(".ckpt-run/held").exists());
    second.signal(Signal::SIGTERM);
    assert_eq!(second.wait(), 75, "{}", place.text("err"));
    assert_eq!(["out", "log"].map(|name| place.text(name)), before);
    fs::remove_file(place.file(".ckpt-run/hold")).expect("removed");
    let mut again = start(&place, CHAIN);
    wait_for_restores(&place, &["000002"]);
    finish(&place, &mut again);
}

#[apply(as_root)]
fn failed_restore_of_a_named_image_changes_nothing() {
    let (place, mut run) = with_images(CHAIN, 2);
    run.kill_supervisor();
    let before = ["out", "log"].map(|name| place.text(name));
    set(&place, ".ckpt-run/failures", "99");
    let mut named = place.start_with(&["restore", "000001"], &[], faulty_criu);
    assert_eq!(named.wait(), 125, "{}", place.text("err"));
    assert_eq!(["out", "log"].map(|name| place.text(name)), before);
    set(&place, ".ckpt-run/failures", "0");
    let mut again = start(&place, CHAIN);
    wait_for_restores(&place, &["000002"]);
    finish(&place, &mut again);
}

/// Returns [`CHAIN`] without a file.
fn output_alone() -> String {
    CHAIN
        .replace("log = open", "# ")
        .replace("log.write(line); log.flush()", "pass")
}

/// Creates a run whose output was truncated to its first image, and whose second image the user restores next.
fn cut_to_the_first_image() -> (Place, String) {
    let script = output_alone();
    let (place, mut run) = with_images(&script, 2);
    run.kill_supervisor();
    let before = place.text("out");
    set(&place, ".ckpt-run/hold", "");
    let mut cut = place.start_with(&["restore", "000001"], &[], faulty_criu);
    wait_until("CRIU", || place.file(".ckpt-run/held").exists());
    cut.kill_supervisor();
    assert!(place.text("out").len() < before.len());
    fs::remove_file(place.file(".ckpt-run/hold")).expect("removed");
    (place, before)
}

#[apply(as_root)]
fn short_output_is_completed_from_the_set_aside_data() {
    let (place, before) = cut_to_the_first_image();
    let mut run = place.start_with(&["restore", "000002"], &[], faulty_criu);
    wait_for_restores(&place, &["000002"]);
    wait_for_output_beyond(&place, before.len());
    finish(&place, &mut run);
}

#[apply(as_root)]
fn short_output_without_saved_data_is_refused_by_name() {
    let (place, _) = cut_to_the_first_image();
    fs::remove_dir_all(place.file(".ckpt-run/aside")).expect("removed");
    let short = place.text("out");
    let mut refused = place.start_with(&["restore", "000002"], &[], faulty_criu);
    assert_eq!(refused.wait(), 125, "{}", place.text("err"));
    let err = place.text("err");
    assert!(err.contains("/out") && err.contains("shrank"), "{err}");
    assert_eq!(place.text("out"), short);

    let mut accepted = place.start_with(&["restore", "000002"], &[], |command| {
        faulty_criu(command);
        command.env("CKPT_RUN_FILES_ON_LOST", "warn");
    });
    wait_for_restores(&place, &["000002"]);
    wait_for_output_beyond(&place, length(&place));
    set(&place, "stop", "");
    assert_eq!(accepted.wait(), 0, "{}", place.text("err"));
    assert!(place.text("out").starts_with(&short));
}

#[apply(as_root)]
fn an_output_of_other_bytes_is_refused_by_name() {
    let script = output_alone();
    let (place, mut run) = with_images(&script, 1);
    run.kill_supervisor();
    let text = place.text("out");
    set(&place, "out", &text.replace("start", "other"));
    let mut refused = start(&place, &script);
    assert_eq!(refused.wait(), 125, "{}", place.text("err"));
    let err = place.text("err");
    assert!(
        err.contains("/out") && err.contains("differ from the snapshot"),
        "{err}"
    );
    set(&place, "out", &text);
    let mut again = start(&place, &script);
    wait_for_restores(&place, &["000001"]);
    finish(&place, &mut again);
}

#[apply(as_root)]
fn emptied_output_starts_again_with_a_warning() {
    let script = output_alone();
    let (place, mut run) = with_images(&script, 1);
    run.kill_supervisor();
    set(&place, "out", "");
    let mut again = start(&place, &script);
    wait_for_restores(&place, &["000001"]);
    wait_for_output_beyond(&place, 0);
    set(&place, "stop", "");
    assert_eq!(again.wait(), 0, "{}", place.text("err"));
    let err = place.text("err");
    assert!(err.contains("was truncated after the snapshot"), "{err}");
}

#[apply(as_root_and_user)]
fn abandoned_images_take_no_place_of_keep_last() {
    let place = Place::new();
    set(&place, "ckpt-run.toml", "[retention]\nkeep_last = 3\n");
    let mut run = start(&place, CHAIN);
    for _ in 0..3 {
        wait_for_output_beyond(&place, length(&place));
        place.snapshot();
    }
    run.crash();
    wait_for_restores(&place, &["000003"]);
    run.crash();
    wait_for_restores(&place, &["000003", "000002"]);
    assert_eq!(place.snapshot(), "000004");
    let images = place.images();
    let ours = images.iter().filter(|image| image["life"] == "present");
    let ours: Vec<&str> = ours.filter_map(|image| image["id"].as_str()).collect();
    assert_eq!(ours, ["000001", "000002", "000004"], "{images:?}");
    finish(&place, &mut run);
}

#[apply(as_root_and_user)]
fn a_kill_from_outside_after_a_new_image_is_progress() {
    let (place, mut run) = with_images(CHAIN, 1);
    wait_for_output_beyond(&place, 4 * length(&place));
    kill(Pid::from_raw(run.job()), Signal::SIGTERM).expect("the job runs");
    wait_for_restores(&place, &["000001"]);
    // Before the point of that crash.
    assert_eq!(place.snapshot(), "000002");
    run.crash();
    wait_for_restores(&place, &["000001", "000002"]);
    finish(&place, &mut run);
}

#[apply(as_root)]
fn restore_is_retried_after_criu_was_killed() {
    let (place, mut run) = with_images(CHAIN, 2);
    set(&place, ".ckpt-run/failures", "1");
    run.crash();
    wait_for_restores(&place, &["000002"]);
    assert_eq!(place.text("err").matches("restoring image=").count(), 2);
    finish(&place, &mut run);
}
