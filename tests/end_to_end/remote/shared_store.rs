//! A store that several machines share: the lease in it, and the fence against a former holder.
//!
//! Another machine is a supervisor that sees another boot. The server of a file system that has not heard of a machine for
//! a while releases that machine's locks; here the locked files are replaced by copies.

use std::fs;
use std::process::Command;

use nix::sys::signal::Signal;

use super::{WAITS, seeing};
use crate::harness::{ON_REQUEST, Place, Run, apply, as_root, stderr, wait_until, wait_until_gone};

fn start(place: &Place, options: &[&str]) -> Run {
    let command = command(place, options);
    place.spawn(command, |_| {})
}

/// Starts a supervisor on another machine.
fn start_elsewhere(place: &Place, options: &[&str]) -> Run {
    let command = elsewhere(place, &command(place, options));
    place.spawn(command, |_| {})
}

fn command(place: &Place, options: &[&str]) -> Command {
    if !place.file("job.py").exists() {
        fs::write(place.file("job.py"), WAITS).unwrap();
    }
    let line = ["--", "python3", "-u", "job.py"];
    in_shared_store(place, &[&ON_REQUEST[..], options, &line].concat())
}

fn in_shared_store(place: &Place, words: &[&str]) -> Command {
    let mut command = place.command(words);
    command.env("CKPT_RUN_REMOTE_LEASE", "10s");
    command.env("CKPT_RUN_STORE_SHARED", "yes");
    command
}

fn elsewhere(place: &Place, command: &Command) -> Command {
    let boot = place.file("boot");
    fs::write(&boot, "another boot\n").unwrap();
    seeing(&boot, "/proc/sys/kernel/random/boot_id", command)
}

/// Releases the locks of all supervisors and watchers, which are on the files that they have opened.
fn release_locks(place: &Place) {
    for name in ["lock", "files.log"] {
        let file = place.file(&format!(".ckpt-run/{name}"));
        let unlocked = place.file("unlocked");
        fs::copy(&file, &unlocked).unwrap();
        fs::rename(unlocked, file).unwrap();
    }
}

#[apply(as_root)]
fn a_suspended_machine_changes_nothing_after_a_takeover() {
    let place = Place::new();
    let mut first = start(&place, &[]);
    place.wait_for("out", "ready\n");
    place.snapshot();
    let job = first.job();
    first.signal(Signal::SIGSTOP);
    // The former holder finds this request when it wakes.
    let mut late = place.command(&["snapshot"]).spawn().unwrap();
    release_locks(&place);

    let mut second = start_elsewhere(&place, &[]);
    place.wait_for("err", "for the lease of the store");
    place.wait_for("err", "restored image=000001");
    first.signal(Signal::SIGCONT);
    assert_eq!(first.wait(), 76, "{}", place.text("err"));
    wait_until_gone(&[job]);
    let holders = fs::read_dir(place.file(".ckpt-run/holders")).unwrap();
    let holders: Vec<_> = holders.map(|one| one.unwrap().file_name()).collect();
    assert_eq!(holders, ["2"]);

    assert!(!late.wait().unwrap().success());
    assert_eq!(place.images().len(), 1);
    // The socket is the second one's.
    assert_eq!(place.snapshot(), "000002");
    place.go();
    assert_eq!(second.wait(), 0, "{}", place.text("err"));
    assert_eq!(place.text("out"), "ready\ndone\n");
}

#[apply(as_root)]
fn a_released_or_own_lease_needs_no_wait() {
    let place = Place::new();
    let mut run = start(&place, &[]);
    place.wait_for("out", "ready\n");
    assert!(place.verb(&["stop"]).status.success());
    assert_eq!(run.wait(), 75, "{}", place.text("err"));

    // Another machine after the end.
    let mut run = start_elsewhere(&place, &[]);
    place.wait_for("err", "restored image=000001");
    run.signal(Signal::SIGKILL);
    run.wait();

    // The same machine after a kill.
    let mut run = start_elsewhere(&place, &[]);
    wait_until("the second restore", || {
        place.text("err").matches("restored image=000001").count() == 2
    });
    place.go();
    assert_eq!(run.wait(), 0, "{}", place.text("err"));
    let said = place.text("err");
    assert!(!said.contains("for the lease"), "{said}");
}

#[apply(as_root)]
fn a_second_machine_waits_while_the_first_one_has_the_lock() {
    let place = Place::new();
    let mut first = start(&place, &[]);
    place.wait_for("out", "ready\n");
    place.snapshot();
    let mut second = start_elsewhere(&place, &[]);
    place.wait_for("err", "waiting for the store");
    assert!(place.verb(&["stop"]).status.success());
    assert_eq!(first.wait(), 75, "{}", place.text("err"));
    place.wait_for("err", "restored image=000002");
    place.go();
    assert_eq!(second.wait(), 0, "{}", place.text("err"));
}

#[apply(as_root)]
fn take_over_does_not_wait() {
    let place = Place::new();
    let mut first = start(&place, &[]);
    place.wait_for("out", "ready\n");
    place.snapshot();
    release_locks(&place);
    let mut second = start_elsewhere(&place, &["--take-over"]);
    place.wait_for("err", "restored image=000001");
    assert_eq!(first.wait(), 76, "{}", place.text("err"));
    place.go();
    assert_eq!(second.wait(), 0, "{}", place.text("err"));
    assert!(!place.text("err").contains("for the lease of"));
}

#[apply(as_root)]
fn verbs_of_another_machine_leave_a_store_in_use_alone() {
    let place = Place::new();
    let mut run = start(&place, &[]);
    place.wait_for("out", "ready\n");
    place.snapshot();
    release_locks(&place);
    let verb = |words: &[&str]| {
        let command = in_shared_store(&place, words);
        elsewhere(&place, &command).output().unwrap()
    };
    let refused = verb(&["prune"]);
    let said = stderr(&refused);
    assert!(!refused.status.success());
    assert!(said.contains("is in use by the supervisor on "), "{said}");
    place.go();
    assert_eq!(run.wait(), 0, "{}", place.text("err"));
    assert!(verb(&["prune"]).status.success());
}

#[apply(as_root)]
fn a_lease_that_cannot_be_renewed_stops_the_job() {
    let place = Place::new();
    let mut run = start(&place, &[]);
    place.wait_for("out", "ready\n");
    let job = run.job();
    // A file system that does not let anybody create files there any more.
    let state = place.file(".ckpt-run/lease/state");
    fs::rename(&state, place.file("moved")).unwrap();
    fs::write(&state, "").unwrap();
    wait_until_gone(&[job]);
    assert_eq!(run.wait(), 76, "{}", place.text("err"));
    let said = place.text("err");
    assert!(
        said.contains("the lease of the run could not be renewed"),
        "{said}"
    );
}
