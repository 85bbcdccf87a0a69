//! Verbs with the address of a remote store, beside the supervisor of its run.

use std::process::{Command, Output};

use super::{RemoteFolder, S3Server, StepsJob};
use crate::harness::{
    ON_REQUEST, Place, UNTIL_GO, apply, as_root, as_root_and_user, stderr, stdout,
};

/// Verbs on the remote store of a place's run.
struct Verbs<'a> {
    place: &'a Place,
    url: &'a str,
    environment: &'a dyn Fn(&mut Command),
}

impl<'a> Verbs<'a> {
    fn new(place: &'a Place, url: &'a str) -> Self {
        Self {
            place,
            url,
            environment: &|_| {},
        }
    }

    fn run(&self, arguments: &[&str]) -> Output {
        let arguments = [&["--store", self.url], arguments].concat();
        let mut command = self.place.command(&arguments);
        (self.environment)(&mut command);
        command.output().unwrap()
    }

    /// Returns the output of a verb that succeeds.
    fn succeeds(&self, arguments: &[&str]) -> String {
        let output = self.run(arguments);
        assert!(
            output.status.success(),
            "{arguments:?}: {}",
            stderr(&output)
        );
        stdout(&output)
    }

    /// Returns the message of a verb that is refused.
    fn is_refused(&self, arguments: &[&str]) -> String {
        let output = self.run(arguments);
        assert_eq!(output.status.code(), Some(125), "{arguments:?}");
        assert_eq!(stdout(&output), "", "{arguments:?}");
        stderr(&output)
    }

    fn list(&self) -> Vec<serde_json::Value> {
        serde_json::from_str(&self.succeeds(&["list", "--json"])).unwrap()
    }
}

#[apply(as_root_and_user)]
fn verbs_work_beside_the_supervisor() {
    let Some(server) = S3Server::start() else {
        return;
    };
    let (place, url) = (Place::new(), server.url());
    let environment = |command: &mut Command| {
        server.is_used_by(command);
        command.env("CKPT_RUN_REMOTE_LEASE", "10s");
    };
    let job = StepsJob {
        place: &place,
        url: &url,
        environment: &environment,
    };
    let verbs = Verbs {
        place: &place,
        url: &url,
        environment: &environment,
    };
    let mut run = job.start_with_image();
    place.snapshot();
    place.wait_for("err", "the image is in the remote store image=000002");

    let (here, there) = (place.images(), verbs.list());
    assert_eq!(there.len(), 2);
    for (here, there) in here.iter().zip(&there) {
        for what in ["id", "created", "trigger", "freeze_ms", "damaged", "pinned"] {
            assert_eq!(here[what], there[what], "{what}");
        }
    }
    let shown = verbs.succeeds(&["show"]);
    assert!(shown.contains("image      000002"), "{shown}");
    assert!(shown.contains("command    python3 -u job.py"), "{shown}");
    let changed = verbs.succeeds(&["diff", "1"]);
    assert!(changed.contains("images     000001 to 000002"), "{changed}");
    assert_eq!(server.gate().pack_reads(), 0, "only manifests were read");

    let verified = verbs.succeeds(&["verify"]);
    assert!(verified.contains("000001 good"), "{verified}");
    assert!(verified.contains("000002 good"), "{verified}");
    assert!(server.gate().pack_reads() > 0);

    verbs.succeeds(&["pin", "1", "--note", "before"]);
    assert_eq!(verbs.list()[0]["note"], "before");
    let refused = verbs.is_refused(&["forget", "1"]);
    assert!(
        refused.contains("cannot forget pinned images: 000001"),
        "{refused}"
    );
    let refused = verbs.is_refused(&["forget", "latest"]);
    assert!(refused.contains("it is the newest good image"), "{refused}");
    let refused = verbs.is_refused(&["prune"]);
    assert!(
        refused.contains("removes what no image needs after each upload"),
        "{refused}"
    );

    let copies = place.file("copies");
    let copies = copies.to_str().unwrap();
    assert_eq!(
        verbs.succeeds(&["copy", "--all", "--to", copies]),
        "000001\n000002\n"
    );
    let verified = place.verb(&["--store", copies, "verify"]);
    assert_eq!(
        stdout(&verified).matches(" good ").count(),
        2,
        "{}",
        stderr(&verified)
    );

    verbs.succeeds(&["unpin", "1"]);
    verbs.succeeds(&["forget", "1"]);
    assert_eq!(verbs.list().len(), 1);
    place.go();
    assert_eq!(run.wait(), 0, "{}", place.text("err"));
    let said = place.text("err");
    assert!(!said.contains("lease"), "{said}");
    // The supervisor has uploaded nothing since.
    let pruned: serde_json::Value =
        serde_json::from_str(&verbs.succeeds(&["prune", "--json"])).unwrap();
    assert_eq!(pruned["manifests"], 1, "{pruned}");
    verbs.succeeds(&["verify"]);
}

#[apply(as_root)]
fn a_pinned_image_outlives_remote_keep() {
    let (place, remote) = (Place::new(), RemoteFolder::new());
    let url = remote.url();
    let verbs = Verbs::new(&place, &url);
    let options = [&ON_REQUEST[..], &["--remote", &url]].concat();
    let mut run = place.start_python_with(&options, UNTIL_GO, |command| {
        command.env("CKPT_RUN_REMOTE_KEEP", "1");
    });
    place.wait_for("out", "ready");
    for number in 1..=3 {
        place.snapshot();
        let done = format!("the image is in the remote store image={number:06}");
        place.wait_for("err", &done);
        if number == 1 {
            verbs.succeeds(&["pin", "latest"]);
        }
    }
    place.go();
    assert_eq!(run.wait(), 0, "{}", place.text("err"));
    let ids: Vec<_> = verbs
        .list()
        .iter()
        .map(|image| image["id"].clone())
        .collect();
    assert_eq!(ids, ["000001", "000003"]);
    verbs.succeeds(&["verify"]);
}

#[apply(as_root)]
fn verbs_need_the_key_of_encrypted_images() {
    let (place, remote) = (Place::new(), RemoteFolder::new());
    let made = place.verb(&["key", "generate", "key"]);
    assert!(made.status.success(), "{}", stderr(&made));
    let (url, key) = (remote.url(), place.file("key"));
    let with_key = |command: &mut Command| {
        command.env("CKPT_RUN_ENCRYPTION_KEY_FILE", &key);
    };
    let verbs = Verbs {
        place: &place,
        url: &url,
        environment: &with_key,
    };
    let job = StepsJob {
        place: &place,
        url: &url,
        environment: &with_key,
    };
    let _run = job.start_with_image();
    let without = Verbs {
        environment: &|_| {},
        ..verbs
    };
    for verb in [
        &["list"][..],
        &["show"],
        &["verify"],
        &["copy", "1", "--to", "copy"],
    ] {
        let refused = without.is_refused(verb);
        assert!(
            refused.contains("encryption.key_file"),
            "{verb:?}: {refused}"
        );
    }
    verbs.succeeds(&["show"]);
    verbs.succeeds(&["verify"]);
    verbs.succeeds(&["copy", "1", "--to", "copy"]);
    let mut verify = place.command(&["--store", "copy", "verify"]);
    with_key(&mut verify);
    let verified = verify.output().unwrap();
    assert!(verified.status.success(), "{}", stderr(&verified));
}

#[apply(as_root)]
fn verbs_that_need_a_folder_refuse_an_address() {
    let (place, remote) = (Place::new(), RemoteFolder::new());
    let url = remote.url();
    let verbs = Verbs::new(&place, &url);
    for verb in [
        &["repair"][..],
        &["export", "latest", "file"],
        &["import", "file"],
        &["snapshot"],
        &["status"],
        &["restore"],
        &["--", "true"],
    ] {
        let refused = verbs.is_refused(verb);
        let remedy = format!("ckpt-run --store {url} copy latest --to FOLDER");
        assert!(refused.contains(&remedy), "{verb:?}: {refused}");
    }
    let refused = verbs.is_refused(&["list"]);
    assert!(refused.contains("no run has its images there"), "{refused}");
    let refused = place.verb(&["copy", "1", "--to", &url]);
    assert!(stderr(&refused).contains("only a run uploads its images"));
    let with_secret = place.verb(&["--store", "s3://key:secret@bucket/x", "list"]);
    assert_eq!(with_secret.status.code(), Some(125));
    let said = stderr(&with_secret);
    assert!(said.contains("must not contain credentials"), "{said}");
    assert!(!said.contains("secret"), "{said}");
}
