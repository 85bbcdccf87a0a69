//! Output of the job, redirected in every way, and its input, across a crash.

use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::process::{Command, Stdio};

use super::counter_job::{start_with, wait_for_the_first_line};
use crate::harness::{Place, Run, apply, as_root, lines, wait_until_gone, wait_until_or};

/// Writes numbers to stdout, the same with an `e` to stderr, and progress to `log`.
const TALK: &str = r#"
import os, sys, time
log = open("log", "w")
i = 0
while not os.path.exists("stop"):
    os.write(1, f"{i}\n".encode())
    os.write(2, f"e{i}\n".encode())
    log.write(f"{i}\n"); log.flush()
    i += 1
    time.sleep(0.01)
"#;

fn counted(place: &Place) -> usize {
    place.text("log").lines().count()
}

fn progress(place: &Place) {
    let before = counted(place);
    wait_until_or(
        || format!("progress; {}", place.text("err")),
        || counted(place) > before + 3,
    );
}

/// Takes a snapshot, crashes the job, repeats both, and ends it.
fn crash_twice(place: &Place, run: &mut Run) {
    wait_for_the_first_line(place);
    for _ in 0..2 {
        progress(place);
        place.snapshot();
        progress(place);
        let job = run.job();
        run.crash();
        wait_until_gone(&[job]);
        progress(place);
    }
    fs::write(place.file("stop"), "").expect("written");
    assert_eq!(run.wait(), 0, "{}", place.text("err"));
    assert_eq!(place.text("log"), lines(counted(place)));
}

fn errors(count: usize) -> String {
    (0..count).fold(String::new(), |text, i| text + &format!("e{i}\n"))
}

/// Returns the lines of the job without those of ckpt-run.
fn of_the_job(text: &str) -> String {
    text.lines()
        .filter(|line| !line.starts_with("ckpt-run:"))
        .map(|line| format!("{line}\n"))
        .collect()
}

/// Returns the expected content of one file or pipe for both streams.
fn both(count: usize) -> String {
    (0..count).fold(String::new(), |text, i| text + &format!("{i}\ne{i}\n"))
}

fn file(place: &Place, name: &str, append: bool) -> File {
    File::options()
        .create(true)
        .write(true)
        .append(append)
        .truncate(!append)
        .open(place.file(name))
        .expect("a file")
}

#[apply(as_root)]
fn output_into_new_files_is_as_of_an_uninterrupted_run() {
    let place = Place::new();
    let mut run = start_with(&place, TALK, |command| {
        command
            .stdout(file(&place, "o", false))
            .stderr(file(&place, "err", false));
    });
    crash_twice(&place, &mut run);
    assert_eq!(place.text("o"), lines(counted(&place)));
    assert_eq!(of_the_job(&place.text("err")), errors(counted(&place)));
}

#[apply(as_root)]
fn output_appended_to_one_file_is_as_of_an_uninterrupted_run() {
    let place = Place::new();
    fs::write(place.file("err"), "before\n").expect("written");
    let mut run = start_with(&place, TALK, |command| {
        let both = file(&place, "err", true);
        command
            .stdout(both.try_clone().expect("cloned"))
            .stderr(both);
    });
    crash_twice(&place, &mut run);
    let text = place.text("err");
    assert!(text.starts_with("before\n"));
    let text = text.trim_start_matches("before\n");
    assert_eq!(of_the_job(text), both(counted(&place)));
}

#[apply(as_root)]
fn output_into_one_pipe_is_as_of_an_uninterrupted_run() {
    let place = Place::new();
    let (mut heard, said) = std::io::pipe().expect("a pipe");
    let said = OwnedFd::from(said);
    let mut run = start_with(&place, TALK, |command| {
        command
            .stdout(said.try_clone().expect("cloned"))
            .stderr(said);
    });
    let listener = std::thread::spawn(move || {
        let mut text = String::new();
        heard.read_to_string(&mut text).expect("text");
        text
    });
    crash_twice(&place, &mut run);
    let text = listener.join().expect("heard");
    assert_eq!(of_the_job(&text), both(counted(&place)));
}

#[apply(as_root)]
fn output_into_nothing_disturbs_nothing() {
    let place = Place::new();
    let mut run = start_with(&place, TALK, |command| {
        command.stdout(Stdio::null()).stderr(Stdio::null());
    });
    crash_twice(&place, &mut run);
}

#[apply(as_root)]
fn input_from_a_pipe_is_read_again_to_the_byte() {
    let place = Place::new();
    let echo = r#"
import os, time
log = open("log", "w")
i = 0
while (line := os.read(0, 7)):
    os.write(1, line)
    log.write(f"{i}\n"); log.flush()
    i += 1
    if not os.path.exists("hurry"):
        time.sleep(0.05)
"#;
    let mut run = start_with(&place, echo, |command: &mut Command| {
        command.stdin(Stdio::piped());
    });
    let mut stdin = run.stdin();
    let text: String = (0..2000).map(|i| format!("line {i}\n")).collect();
    let (first, second) = text.split_at(12_500);
    stdin.write_all(first.as_bytes()).expect("written");
    wait_for_the_first_line(&place);
    for _ in 0..2 {
        progress(&place);
        place.snapshot();
        progress(&place);
        run.crash();
        progress(&place);
    }
    fs::write(place.file("hurry"), "").expect("written");
    stdin.write_all(second.as_bytes()).expect("written");
    drop(stdin);
    assert_eq!(run.wait(), 0, "{}", place.text("err"));
    assert_eq!(place.text("out"), text);
}

#[apply(as_root)]
fn run_continues_with_output_to_another_place() {
    let place = Place::new();
    // Separate, joined, and separate again: each time from the previous attempt's image.
    for joined in [false, true, false] {
        let mut run = start_with(&place, TALK, |command| {
            let err = file(&place, "err", true);
            let out = if joined {
                err.try_clone().expect("cloned")
            } else {
                file(&place, "o", true)
            };
            command.stdout(out).stderr(err);
        });
        wait_for_the_first_line(&place);
        progress(&place);
        place.snapshot();
        progress(&place);
        run.crash();
        progress(&place);
        place.snapshot();
        run.signal(nix::sys::signal::Signal::SIGKILL);
        assert_eq!(run.wait(), 137);
    }
    let mut run = start_with(&place, TALK, |command| {
        command.stdout(Stdio::null());
    });
    progress(&place);
    fs::write(place.file("stop"), "").expect("written");
    assert_eq!(run.wait(), 0, "{}", place.text("err"));
    assert_eq!(place.text("log"), lines(counted(&place)));
}
