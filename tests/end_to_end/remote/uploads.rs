//! Uploads of images: their end at a stop, failures, and the removal of old objects.

use std::fs;
use std::path::Path;
use std::process::{Child, Stdio};

use nix::sys::signal::Signal;

use super::{RemoteFolder, S3Server, StepsJob};
use crate::harness::{
    ON_REQUEST, Place, Run, UNTIL_GO, apply, as_root, as_root_and_user, skip, stderr, stdout,
    wait_until_or,
};

#[apply(as_root_and_user)]
fn a_stop_waits_for_the_upload() {
    let Some(server) = S3Server::start() else {
        return;
    };
    let (place, other, url) = (Place::new(), Place::new(), server.url());
    let first = StepsJob {
        place: &place,
        url: &url,
        environment: &|command| server.is_used_by(command),
    };
    let second = StepsJob {
        place: &other,
        ..first
    };
    let mut run = first.start_with_image();
    server.gate().close();
    let mut stop = place.command(&["stop"]);
    let mut stop = stop.stdout(Stdio::null()).spawn().unwrap();
    place.wait_for("err", "waiting for the upload of the newest image");
    server.gate().open();
    assert_eq!(run.wait(), 75, "{}", place.text("err"));
    assert!(stop.wait().unwrap().success());
    place.wait_for("err", "the image is in the remote store image=000002");

    // It continues after step 40, where the run was stopped, and waits for nobody.
    let mut run = second.start(&[]);
    second.assert_result(&mut run, &place, &first.checksum());
    assert!(!other.text("out").contains("step"), "{}", other.text("out"));
    let said = other.text("err");
    assert!(
        said.contains("restored image=000002"),
        "the same number: {said}"
    );
    assert!(!said.contains("for the lease of"), "{said}");
}

#[apply(as_root)]
fn a_failed_upload_is_retried() {
    let (place, remote) = (Place::new(), RemoteFolder::new());
    fs::write(remote.file("packs"), "not a folder").unwrap();
    let url = remote.url();
    let options = [&ON_REQUEST[..], &["--remote", &url]].concat();
    let mut run = place.start_ready(&options);
    place.snapshot();
    place.wait_for("err", "cannot upload the image, it is tried again");
    assert_eq!(remote.images(), Vec::<String>::new());
    fs::remove_file(remote.file("packs")).unwrap();
    place.wait_for("err", "the image is in the remote store image=000001");
    assert_eq!(remote.images().len(), 1);
    place.go();
    assert_eq!(run.wait(), 0, "{}", place.text("err"));
    let said = place.text("err");
    assert_eq!(said.matches("cannot upload the image").count(), 1, "{said}");
}

#[apply(as_root)]
fn a_profile_of_the_aws_program_supplies_the_key() {
    if !Path::new("/usr/bin/aws").exists() {
        skip("no AWS CLI 2 here (scripts/setup-tests installs it)");
        return;
    }
    let Some(server) = S3Server::start() else {
        return;
    };
    let (place, url) = (Place::new(), server.url());
    let profile = "[profile work]\naws_access_key_id = of-work\naws_secret_access_key = y\nregion = us-east-1\n";
    let file = place.file("aws-config");
    fs::write(&file, profile).unwrap();
    let options = [&ON_REQUEST[..], &["--remote", &url]].concat();
    let mut run = place.start_python_with(&options, UNTIL_GO, |command| {
        server.is_used_with(command, &file, "work");
    });
    place.wait_for("out", "ready");
    place.snapshot();
    place.wait_for("err", "the image is in the remote store image=000001");
    place.go();
    assert_eq!(run.wait(), 0, "{}", place.text("err"));
    assert_eq!(server.gate().keys(), ["of-work"]);

    let mut unknown = place.command(&["--store", &url, "list"]);
    server.is_used_with(&mut unknown, &file, "other");
    let done = unknown.output().unwrap();
    assert!(!done.status.success());
    let said = stderr(&done);
    assert!(said.contains("aws configure export-credentials"), "{said}");
    assert!(said.contains("(other)"), "{said}");
}

/// Starts a run with `remote.sync` whose uploads fail, and requests a snapshot.
fn start_synchronous(place: &Place, server: &S3Server) -> (Run, Child) {
    let url = server.url();
    let options = [&ON_REQUEST[..], &["--remote", &url, "--grace", "60s"]].concat();
    let run = place.start_python_with(&options, UNTIL_GO, |command| {
        server.is_used_by(command);
        command.env("CKPT_RUN_REMOTE_SYNC", "true");
    });
    place.wait_for("out", "ready");
    server.gate().refuse_packs();
    let mut snapshot = place.command(&["snapshot"]);
    let snapshot = snapshot.stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut snapshot = snapshot.spawn().unwrap();
    place.wait_for("err", "cannot upload the image, it is tried again");
    assert!(snapshot.try_wait().unwrap().is_none());
    assert_eq!(place.images().len(), 1);
    (run, snapshot)
}

#[apply(as_root)]
fn a_synchronous_snapshot_waits_for_its_upload() {
    let Some(server) = S3Server::start() else {
        return;
    };
    let place = Place::new();
    let (mut run, snapshot) = start_synchronous(&place, &server);
    server.gate().open();
    let done = snapshot.wait_with_output().unwrap();
    let said = place.text("err");
    assert_eq!(stdout(&done), "000001\n", "{}", stderr(&done));
    let uploaded = "the image is in the remote store image=";
    assert_eq!(said.matches(uploaded).count(), 1, "{said}");
    place.snapshot();
    place.go();
    assert_eq!(run.wait(), 0, "{}", place.text("err"));
    assert_eq!(place.text("err").matches(uploaded).count(), 2);
}

#[apply(as_root)]
fn a_stop_ends_the_wait_of_a_synchronous_snapshot() {
    let Some(server) = S3Server::start() else {
        return;
    };
    let place = Place::new();
    let (mut run, snapshot) = start_synchronous(&place, &server);
    run.signal(Signal::SIGTERM);
    let done = snapshot.wait_with_output().unwrap();
    assert!(!done.status.success());
    let said = stderr(&done);
    assert!(said.contains("but not in the remote store yet"), "{said}");
    place.wait_for("err", "waiting for the upload of the newest image");
    server.gate().open();
    assert_eq!(run.wait(), 75, "{}", place.text("err"));
    place.wait_for("err", "the image is in the remote store image=000002");
}

#[apply(as_root)]
fn old_images_and_packs_are_removed() {
    let (place, remote) = (Place::new(), RemoteFolder::new());
    // What an interrupted upload leaves.
    let leftover = format!("packs/000001-{}", "0".repeat(32));
    fs::create_dir(remote.file("packs")).unwrap();
    fs::write(remote.file(&leftover), "chunks").unwrap();
    let url = remote.url();
    let options = [&ON_REQUEST[..], &["--remote", &url]].concat();
    let mut run = place.start_python_with(&options, UNTIL_GO, |command| {
        command.env("CKPT_RUN_REMOTE_KEEP", "1");
    });
    place.wait_for("out", "ready");
    let mut earlier = Vec::new();
    for number in 1..=3 {
        let id = place.snapshot();
        assert_eq!(id, format!("{number:06}"));
        place.wait_for(
            "err",
            &format!("the image is in the remote store image={id}"),
        );
        let newest = remote.images().pop().unwrap();
        let needed = remote.packs_of(&newest);
        wait_until_or(
            || {
                format!(
                    "no objects but {newest} and {needed:?}: {}",
                    place.text("err")
                )
            },
            || remote.objects("images").len() == 1 && remote.objects("packs") == needed,
        );
        assert!(remote.file(&newest).exists());
        assert!(!earlier.contains(&newest));
        earlier.push(newest);
    }
    assert_eq!(remote.images(), earlier[2..]);
    place.go();
    assert_eq!(run.wait(), 0, "{}", place.text("err"));
}
