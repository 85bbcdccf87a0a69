//! Modes of the caller's terminal, which are restored however a run ends.

use std::fs;

use nix::sys::signal::Signal;

use super::screen::{COUNT, Screen, at_terminal};
use crate::harness::{Place, apply, as_root};

#[apply(as_root)]
fn terminal_modes_are_restored_after_a_normal_end() {
    let place = Place::new();
    let screen = Screen::new(24, 80);
    let mut run = screen.start(&place, &["--", "sh", "-c", "echo ready; read line"]);
    screen.wait_for("ready");
    screen.wait_until_raw();
    screen.types("\r");
    assert_eq!(run.wait(), 0, "{}", screen.text());
    screen.assert_modes_are_back();
}

#[apply(as_root)]
fn terminal_modes_are_restored_after_a_final_crash() {
    let place = Place::new();
    let screen = Screen::new(24, 80);
    let script = "echo ready; read line; kill -KILL $$";
    let mut run = screen.start(&place, &["--", "sh", "-c", script]);
    screen.wait_for("ready");
    screen.wait_until_raw();
    screen.types("\r");
    assert_eq!(run.wait(), 137, "{}", screen.text());
    screen.wait_for("giving up");
    screen.assert_modes_are_back();
}

#[apply(as_root)]
fn terminal_modes_are_restored_after_sigterm() {
    let (_place, screen, mut run) = at_terminal(COUNT, "count 3");
    run.signal(Signal::SIGTERM);
    assert_eq!(run.wait(), 75, "{}", screen.text());
    screen.assert_modes_are_back();
}

#[apply(as_root)]
fn between_a_crash_and_the_restore_ctrl_c_ends_the_run() {
    let place = Place::new();
    fs::write(place.file("ckpt-run.toml"), "restart.backoff = '30s'\n").unwrap();
    let screen = Screen::new(24, 80);
    fs::write(place.file("job.py"), COUNT).unwrap();
    let mut run = screen.start(&place, &["--", "python3", "job.py"]);
    screen.wait_for("count 3");
    screen.wait_until_raw();
    place.snapshot();
    run.crash();
    screen.wait_for("the job crashed");
    screen.wait_until("the caller's modes", |_| !screen.is_raw());
    screen.types("\x03");
    assert_eq!(run.wait(), 130, "{}", screen.text());
    screen.assert_modes_are_back();
}

#[apply(as_root)]
fn a_paused_job_leaves_the_terminal_to_the_caller() {
    let (place, screen, mut run) = at_terminal(COUNT, "count 3");
    assert!(place.verb(&["pause"]).status.success());
    screen.wait_until("the caller's modes", |_| !screen.is_raw());
    assert!(place.verb(&["unpause"]).status.success());
    screen.wait_until_raw();
    screen.types("\x03");
    assert_eq!(run.wait(), 130, "{}", screen.text());
}
