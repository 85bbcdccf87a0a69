//! Requests and signals at bad moments, and hostile clients.

use std::fs;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;

use nix::sys::signal::Signal;

use super::counter_job::{
    begin_snapshot, counting, crash_and_finish, finish_counter, said, send, start_counter,
    wait_for_criu, wait_for_progress,
};
use crate::harness::{Place, Run, apply, as_root, stderr, wait_until};

fn succeeds(client: std::process::Child) -> String {
    let output = client.wait_with_output().expect("the client ends");
    let error = stderr(&output);
    assert!(output.status.success(), "{error}");
    String::from_utf8(output.stdout).expect("an id")
}

#[apply(as_root)]
fn snapshots_asked_for_at_once_are_all_answered() {
    let (place, mut run) = counting();
    let clients: Vec<_> = (0..4).map(|_| begin_snapshot(&place)).collect();
    let ids: Vec<String> = clients.into_iter().map(succeeds).collect();
    let known = place.images().len();
    // Requests that arrived during the first snapshot share one.
    assert!((1..=4).contains(&known), "{ids:?}");
    assert!(place.verb(&["verify"]).status.success());
    crash_and_finish(&place, &mut run);
}

#[apply(as_root)]
fn a_snapshot_asked_for_during_a_restore_is_taken_after_it() {
    let (place, mut run) = counting();
    place.snapshot();
    wait_for_progress(&place);
    send(run.job(), Signal::SIGKILL);
    wait_for_criu(&run, "restore");
    let id = succeeds(begin_snapshot(&place));
    assert_eq!(id.trim(), "000002");
    let text = place.text("err");
    assert!(
        text.find("restored image=") < text.find("snapshot image=000002"),
        "{text}"
    );
    crash_and_finish(&place, &mut run);
}

#[apply(as_root)]
fn stop_during_a_snapshot_saves_again() {
    for signal in [Signal::SIGTERM, Signal::SIGUSR2] {
        let (place, mut run) = counting();
        let mut client = begin_snapshot(&place);
        wait_for_criu(&run, "dump");
        saved_and_stopped_by(signal, &place, &mut run);
        client.wait().expect("the client ends");
        continues_from_its_stop(&place);
    }
}

fn saved_and_stopped_by(signal: Signal, place: &Place, run: &mut Run) {
    run.signal(signal);
    assert_eq!(run.wait(), 75, "{}", place.text("err"));
}

fn continues_from_its_stop(place: &Place) {
    let mut again = start_counter(place);
    wait_for_progress(place);
    assert_eq!(
        said(place, "cut off"),
        0,
        "nothing was computed after the last image"
    );
    finish_counter(place, &mut again);
}

#[apply(as_root)]
fn a_stop_during_a_pause_needs_no_other_image() {
    let (place, mut run) = counting();
    let mut client = place.command(&["pause"]).spawn().expect("ckpt-run starts");
    wait_for_criu(&run, "dump");
    saved_and_stopped_by(Signal::SIGTERM, &place, &mut run);
    client.wait().expect("the client ends");
    continues_from_its_stop(&place);
}

#[apply(as_root)]
fn stop_during_a_restore_is_obeyed() {
    let (place, mut run) = counting();
    place.snapshot();
    wait_for_progress(&place);
    send(run.job(), Signal::SIGKILL);
    wait_for_criu(&run, "restore");
    run.signal(Signal::SIGTERM);
    assert_eq!(run.wait(), 75, "{}", place.text("err"));
    let mut again = start_counter(&place);
    wait_for_progress(&place);
    finish_counter(&place, &mut again);
}

#[apply(as_root)]
fn an_interrupt_during_a_snapshot_reaches_the_job() {
    let (place, mut run) = counting();
    let mut client = begin_snapshot(&place);
    wait_for_criu(&run, "dump");
    run.signal(Signal::SIGINT);
    // Python exits by its KeyboardInterrupt.
    assert_eq!(run.wait(), 130, "{}", place.text("err"));
    client.wait().expect("the client ends");
    assert_eq!(said(&place, "restoring"), 0);
}

#[apply(as_root)]
fn a_hostile_client_changes_nothing() {
    let (place, mut run) = counting();
    let connect = || UnixStream::connect(place.file(".ckpt-run/control.sock")).expect("connects");
    let huge = vec![b'x'; 1 << 20];
    let mut silent = Vec::new();
    for garbage in [
        &b"\n"[..],
        b"snapshot\n",
        b"\xff\xfe\0\n",
        b"{\"snapshot\":",
        b"[[[[[[[[\n",
        &huge,
    ] {
        let mut client = connect();
        // The supervisor may close the connection in the middle.
        let _ = client.write_all(garbage);
        let _ = client.shutdown(std::net::Shutdown::Write);
        let mut answer = String::new();
        let _ = client.read_to_string(&mut answer);
        assert!(!answer.contains("image"), "{answer}");
        silent.push(connect());
    }
    // Sends a request without waiting for the reply.
    connect().write_all(b"\"snapshot\"\n").expect("written");
    wait_until("the snapshot that nobody waits for", || {
        place.images().len() == 1
    });
    place.snapshot();
    assert_eq!(place.images().len(), 2);
    wait_for_progress(&place);
    run.crash();
    wait_for_progress(&place);
    drop(silent);
    finish_counter(&place, &mut run);
    assert!(fs::metadata(place.file(".ckpt-run/control.sock")).is_err());
}
