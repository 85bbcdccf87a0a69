//! Attacks by jobs of another user on a ckpt-run of root, with an accomplice outside of the job that creates links to
//! root's files. `tests/escalations/run` defines and repeats the cases; here each runs once.

use std::process::Command;

use crate::harness::{Place, apply, as_root, criu_prefix, installed, program, stderr, stdout};

/// Runs all cases with an accomplice that acts in these ways.
fn nothing_is_gained(ways: &str) {
    if !installed("setpriv") || !installed("python3") {
        return;
    }
    let place = Place::new();
    // The job's user needs access to its folder.
    let opened = Command::new("chmod").arg("755").arg(place.path()).status();
    assert!(opened.is_ok_and(|status| status.success()));
    let mut run = Command::new("python3");
    run.arg(concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/tests/escalations/run"
    ))
    .args(["--ways", ways, "--bin", program(), "--work"])
    .arg(place.path())
    .env("XDG_CONFIG_HOME", place.path())
    .env_remove("CKPT_RUN_STORE");
    if let Some(criu) = criu_prefix() {
        run.arg("--criu").arg(criu);
    }
    let output = run.output().expect("python3 starts");
    let said = stdout(&output);
    assert!(output.status.success(), "{said}\n{}", stderr(&output));
    for way in ways.split(',') {
        let line = format!("| read | {way} | 1 ");
        assert!(said.contains(&line), "not all cases ran: {said}");
    }
}

#[apply(as_root)]
fn jobs_of_another_user_are_restored() {
    nothing_is_gained("calm");
}

#[apply(as_root)]
fn jobs_of_root_in_the_folder_of_another_are_restored() {
    nothing_is_gained("root");
}

#[apply(as_root)]
fn a_folder_turned_into_a_link_gains_nothing() {
    nothing_is_gained("turned");
}

#[apply(as_root)]
fn a_folder_turned_all_the_time_gains_nothing() {
    nothing_is_gained("racing");
}
