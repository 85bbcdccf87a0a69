//! The watch itself: what is asked and when, expired tokens, garbage, a cloud that does not answer.

use nix::sys::signal::Signal;

use super::{MetadataServer, Service};
use crate::harness::{ON_REQUEST, Place, UNTIL_GO, apply, as_root};

/// Address at which nobody listens.
const NOBODY: &str = "http://127.0.0.1:1";

#[apply(as_root)]
fn an_expired_token_is_replaced_while_the_job_runs() {
    let (place, server) = (Place::new(), MetadataServer::start(Service::Aws));
    let mut run = place.start_python_with(&ON_REQUEST, UNTIL_GO, |command| {
        server.is_asked_by(command, "aws");
    });
    place.wait_for("out", "ready");
    server.wait_for_questions(1);
    server.expire_token();
    // The refused question, and its repetition.
    server.wait_for_questions(2);
    server.announce();
    assert_eq!(run.wait(), 75, "{}", place.text("err"));
    let said = place.text("err");
    assert!(!said.contains("cannot ask"), "{said}");
    assert!(!said.contains("token-"), "a token is secret: {said}");
    let requests = server.requests();
    let tokens = requests.iter().filter(|line| line.starts_with("put "));
    assert_eq!(tokens.count(), 2, "{requests:?}");
}

#[apply(as_root)]
fn garbage_is_ignored_and_warned_about_once() {
    let (place, server) = (Place::new(), MetadataServer::start(Service::Gcp));
    let mut run = place.start_python_with(&ON_REQUEST, UNTIL_GO, |command| {
        server.is_asked_by(command, "gcp");
    });
    place.wait_for("out", "ready");
    server.wait_for_questions(1);
    server.answer_garbage(true);
    server.wait_for_questions(3);
    server.answer_garbage(false);
    server.announce();
    assert_eq!(run.wait(), 75, "{}", place.text("err"));
    let said = place.text("err");
    let warning = "cannot ask Google Cloud for preemption notices, the job continues";
    assert_eq!(said.matches(warning).count(), 1, "{said}");
}

#[apply(as_root)]
fn nothing_is_asked_without_the_setting() {
    let (place, server) = (Place::new(), MetadataServer::start(Service::Aws));
    server.announce();
    let mut run = place.start_python_with(&ON_REQUEST, UNTIL_GO, |command| {
        server.is_asked_by(command, "off");
    });
    place.wait_for("out", "ready");
    place.snapshot();
    place.go();
    assert_eq!(run.wait(), 0, "{}", place.text("err"));
    assert_eq!(server.requests(), Vec::<String>::new());
}

#[apply(as_root)]
fn a_service_that_refuses_connections_is_reported_once() {
    for (watch, message) in [
        (
            "auto",
            "no cloud answers, so no preemption notice can arrive",
        ),
        (
            "azure",
            "no preemption notice can arrive, because the metadata service of Azure",
        ),
    ] {
        let place = Place::new();
        let mut run = place.start_python_with(&ON_REQUEST, UNTIL_GO, |command| {
            command
                .env("CKPT_RUN_PREEMPTION_WATCH", watch)
                .env("CKPT_RUN_PREEMPTION_ENDPOINT", NOBODY);
        });
        place.wait_for("err", message);
        place.wait_for("out", "ready");
        place.go();
        assert_eq!(run.wait(), 0, "{}", place.text("err"));
        let said = place.text("err");
        assert_eq!(said.matches(message).count(), 1, "{said}");
    }
}

#[apply(as_root)]
fn the_sigterm_of_the_shutdown_does_not_cancel_the_snapshot() {
    let (place, server) = (Place::new(), MetadataServer::start(Service::Gcp));
    let hook = "while [ ! -e hooked ]; do sleep 0.02; done";
    let mut run = place.start_python_with(&ON_REQUEST, UNTIL_GO, |command| {
        server.is_asked_by(command, "gcp");
        command.env("CKPT_RUN_HOOKS_BEFORE_SNAPSHOT", hook);
    });
    place.wait_for("out", "ready");
    server.announce();
    place.wait_for("err", "Google Cloud takes this machine back at ");
    run.signal(Signal::SIGTERM);
    // A verb is answered after the signal.
    place.json(&["status"]);
    std::fs::write(place.file("hooked"), "").unwrap();
    assert_eq!(run.wait(), 75, "{}", place.text("err"));
    assert_eq!(place.images().len(), 1, "{}", place.text("err"));
}
