//! Uploads of images: their end at a stop, failures, and the removal of old objects.

use std::fs;
use std::process::Stdio;

use super::{RemoteFolder, S3Server, StepsJob};
use crate::harness::{
    ON_REQUEST, Place, UNTIL_GO, apply, as_root, as_root_and_user, wait_until_or,
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
