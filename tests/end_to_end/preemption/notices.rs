//! Notices: the last snapshot, its upload, the exit code, and the continuation.

use std::fs;
use std::os::unix::fs::PermissionsExt;

use nix::sys::signal::Signal;
use serde_json::Value;

use super::{MetadataServer, Service};
use crate::harness::{COUNT, ON_REQUEST, Place, Run, apply, as_root, as_root_and_user, lines};

/// Starts the counting job, or continues its run.
fn start(place: &Place, server: &MetadataServer, watch: &str, options: &[&str]) -> Run {
    let script = place.file("job.py");
    if !script.exists() {
        fs::write(&script, COUNT).unwrap();
    }
    let options = [&ON_REQUEST[..], options].concat();
    place.start_with(&options, &["python3", "-u", "job.py"], |command| {
        server.is_asked_by(command, watch);
    })
}

/// Returns the run's event of this name.
fn event(place: &Place, name: &str) -> Value {
    let log = place.text(".ckpt-run/events.ndjson");
    let mut events = log.lines().map(|line| serde_json::from_str(line).unwrap());
    let found = events.find(|event: &Value| event["event"] == name);
    found.unwrap_or_else(|| panic!("no event {name} in {log}"))
}

/// Announces the machine's end to a job with an image, and lets the same command line continue the run.
fn is_saved_and_continued(service: Service, watch: &str) {
    let (place, server) = (Place::new(), MetadataServer::start(service));
    let mut run = start(&place, &server, watch, &[]);
    place.wait_for("log", "5\n");
    place.snapshot();
    server.announce();
    assert_eq!(run.wait(), 75, "{}", place.text("err"));
    let said = place.text("err");
    let name = service.name();
    assert!(
        said.contains(&format!("{name} takes this machine back at ")),
        "{said}"
    );
    assert!(said.contains("Z: the last snapshot is taken"), "{said}");
    assert_eq!(said.matches("takes this machine back").count(), 1, "{said}");
    assert_eq!(event(&place, "preempted")["cloud"], service.as_str());
    assert_eq!(place.images().len(), 2, "{said}");

    // The next machine has no notice.
    let next = MetadataServer::start(service);
    let mut run = start(&place, &next, watch, &[]);
    place.go();
    assert_eq!(run.wait(), 0, "{}", place.text("err"));
    let said = place.text("err");
    assert!(said.contains("restored image=000002"), "{said}");
    assert_eq!(place.text("log"), lines(40));
    assert_eq!(place.text("out"), lines(40));
}

#[apply(as_root_and_user)]
fn aws_takes_the_machine_back() {
    is_saved_and_continued(Service::Aws, "aws");
}

#[apply(as_root)]
fn google_takes_the_machine_back() {
    is_saved_and_continued(Service::Gcp, "gcp");
}

#[apply(as_root)]
fn azure_takes_the_machine_back() {
    is_saved_and_continued(Service::Azure, "azure");
}

#[apply(as_root)]
fn auto_finds_each_cloud() {
    for service in [Service::Aws, Service::Gcp, Service::Azure] {
        is_saved_and_continued(service, "auto");
    }
}

#[apply(as_root)]
fn the_last_image_is_uploaded_before_the_end() {
    let (place, remote, other) = (Place::new(), Place::new(), Place::new());
    fs::set_permissions(remote.path(), fs::Permissions::from_mode(0o700)).unwrap();
    let url = format!("file://{}", remote.path().display());
    let server = MetadataServer::start(Service::Aws);
    let options = ["--remote", &url];
    let mut run = start(&place, &server, "aws", &options);
    place.wait_for("log", "5\n");
    server.announce();
    assert_eq!(run.wait(), 75, "{}", place.text("err"));
    let said = place.text("err");
    assert!(
        said.contains("the image is in the remote store image=000001"),
        "{said}"
    );

    let next = MetadataServer::start(Service::Aws);
    let mut run = start(&other, &next, "aws", &options);
    place.go();
    assert_eq!(run.wait(), 0, "{}", other.text("err"));
    let said = other.text("err");
    assert!(
        !said.contains("for the lease of"),
        "nobody holds it: {said}"
    );
    assert_eq!(place.text("log"), lines(40));
    let out = format!("{}{}", place.text("out"), other.text("out"));
    assert_eq!(out, lines(40));
}

#[apply(as_root)]
fn the_sigterm_of_the_shutdown_does_not_end_the_upload() {
    let (place, remote) = (Place::new(), Place::new());
    fs::set_permissions(remote.path(), fs::Permissions::from_mode(0o700)).unwrap();
    let url = format!("file://{}", remote.path().display());
    let server = MetadataServer::start(Service::Aws);
    let options = [&ON_REQUEST[..], &["--remote", &url]].concat();
    let mut run = place.start_python_with(&options, COUNT, |command| {
        server.is_asked_by(command, "aws");
        // The image of more than a megabyte takes some seconds.
        command.env("CKPT_RUN_REMOTE_BANDWIDTH", "256KiB");
    });
    place.wait_for("log", "5\n");
    server.announce();
    place.wait_for("err", "waiting for the upload of the newest image");
    run.signal(Signal::SIGTERM);
    assert_eq!(run.wait(), 75, "{}", place.text("err"));
    let said = place.text("err");
    assert!(
        said.contains("the image is in the remote store image=000001"),
        "{said}"
    );
    assert!(!said.contains("not waiting for the upload"), "{said}");
}

#[apply(as_root)]
fn status_names_the_notice_while_a_hook_delays_the_end() {
    let (place, server) = (Place::new(), MetadataServer::start(Service::Azure));
    let hook = "while [ ! -e hooked ]; do sleep 0.02; done";
    let mut run = place.start_python_with(&ON_REQUEST, COUNT, |command| {
        server.is_asked_by(command, "azure");
        command.env("CKPT_RUN_HOOKS_BEFORE_SNAPSHOT", hook);
    });
    place.wait_for("log", "5\n");
    assert_eq!(place.json(&["status"])["preemption"], Value::Null);
    server.announce();
    place.wait_for("err", "Azure takes this machine back at ");
    let status = place.json(&["status"]);
    assert_eq!(status["preemption"]["cloud"], "azure", "{status}");
    assert_eq!(status["preemption"]["action"], "preempt", "{status}");
    assert_eq!(
        status["preemption"]["deadline"],
        event(&place, "preempted")["deadline"]
    );
    let shown = String::from_utf8(place.verb(&["status"]).stdout).unwrap();
    assert!(
        shown.contains("Azure takes this machine back at "),
        "{shown}"
    );
    fs::write(place.file("hooked"), "").unwrap();
    assert_eq!(run.wait(), 75, "{}", place.text("err"));
}
