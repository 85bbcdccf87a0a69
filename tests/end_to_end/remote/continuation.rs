//! Continuation of a run from the remote store by a supervisor with an empty store.

use std::fs;
use std::path::Path;
use std::process::Command;

use nix::sys::signal::Signal;

use super::{RemoteFolder, S3Server, StepsJob};
use crate::harness::{
    ON_REQUEST, Ordinary, Place, Run, UNTIL_GO, apply, as_root, as_root_and_user, holds, stderr,
    wait_until_gone,
};

const KEY_FILE: &str = "CKPT_RUN_ENCRYPTION_KEY_FILE";

/// Kills a supervisor and waits for the end of its job.
fn kill(mut run: Run) {
    let job = run.job();
    run.signal(Signal::SIGKILL);
    run.wait();
    wait_until_gone(&[job]);
}

/// Moves the folder of a place away and makes an empty one at its path, as on another machine.
fn empty(place: &Place, away: &Path) {
    fs::rename(place.path(), away).unwrap();
    fs::create_dir(place.path()).unwrap();
    if let Some(user) = Ordinary::of_test() {
        user.owns(place.path());
    }
}

/// Kills a run, empties its folder and runs the same line there, after something else.
fn continue_in_an_empty_folder(job: &StepsJob<'_>, before: impl FnOnce()) {
    let away = tempfile::tempdir().unwrap();
    let run = job.start_with_image();
    let checksum = job.checksum();
    kill(run);
    empty(job.place, &away.path().join("gone"));
    before();
    let mut run = job.start(&["--take-over"]);
    job.assert_result(&mut run, job.place, &checksum);
}

#[apply(as_root_and_user)]
fn a_run_continues_in_an_empty_folder() {
    let Some(server) = S3Server::start() else {
        return;
    };
    let job = StepsJob {
        place: &Place::new(),
        url: &server.url(),
        environment: &|command| server.is_used_by(command),
    };
    continue_in_an_empty_folder(&job, || {});
}

#[apply(as_root_and_user)]
fn an_encrypted_run_continues_in_an_empty_folder() {
    let (place, keys, remote) = (Place::new(), Place::new(), RemoteFolder::new());
    let made = keys.verb(&["key", "generate", "key"]);
    assert!(made.status.success(), "{}", stderr(&made));
    let key = keys.file("key");
    let url = remote.url();
    let job = StepsJob {
        place: &place,
        url: &url,
        environment: &|command: &mut Command| {
            command.env(KEY_FILE, &key);
        },
    };
    let other = Place::new();
    let without_key = StepsJob {
        place: &other,
        environment: &|_| {},
        ..job
    };
    continue_in_an_empty_folder(&job, || {
        let code = without_key.start(&["--take-over"]).wait();
        let said = other.text("err");
        assert_eq!((code, other.text("out").as_str()), (125, ""), "{said}");
        assert!(
            said.contains("the image is encrypted, but the store is not"),
            "{said}"
        );
        assert_eq!(remote.state()["released"], true, "{said}");
    });
    // The program of the job contains this word, so an image without encryption does.
    assert!(!holds(&remote.file("."), b"hashlib"));
}

#[apply(as_root)]
fn a_supervisor_that_cannot_begin_gives_the_lease_back() {
    let (place, other, remote) = (Place::new(), Place::new(), RemoteFolder::new());
    let made = other.verb(&["key", "generate", "key"]);
    assert!(made.status.success(), "{}", stderr(&made));
    let key = other.file("key");
    let url = remote.url();
    let first = StepsJob::new(&place, &url);
    let with_a_key = StepsJob {
        place: &other,
        environment: &|command: &mut Command| {
            command.env(KEY_FILE, &key);
        },
        ..first
    };
    let run = first.start_with_image();
    let checksum = first.checksum();
    kill(run);
    let before = remote.state();
    assert_eq!(with_a_key.start(&["--take-over"]).wait(), 125);
    let said = other.text("err");
    assert!(said.contains("encryption.key_file"), "{said}");
    let after = remote.state();
    assert_eq!(after["released"], true);
    for what in ["holder", "tenure", "images"] {
        assert_eq!(after[what], before[what], "{what}");
    }
    let mut run = first.start(&[]);
    first.assert_result(&mut run, &place, &checksum);
}

#[apply(as_root_and_user)]
fn a_second_supervisor_waits_for_the_lease() {
    let Some(server) = S3Server::start() else {
        return;
    };
    let (place, other) = (Place::new(), Place::new());
    let environment = |command: &mut Command| {
        server.is_used_by(command);
        command.env("CKPT_RUN_REMOTE_LEASE", "10s");
    };
    let url = server.url();
    let first = StepsJob {
        place: &place,
        url: &url,
        environment: &environment,
    };
    let second = StepsJob {
        place: &other,
        ..first
    };
    let run = first.start_with_image();
    let mut waiting = second.start(&[]);
    other.wait_for("err", "for the lease of s3://");
    assert_eq!(other.text("out"), "");
    kill(run);
    other.wait_for("err", "the run continues from its images in");
    second.assert_result(&mut waiting, &place, &first.checksum());
    let said = other.text("err");
    assert_eq!(said.matches("for the lease of").count(), 1, "{said}");
}

#[apply(as_root)]
fn a_finished_run_is_not_started_elsewhere() {
    let (place, other, remote) = (Place::new(), Place::new(), RemoteFolder::new());
    let url = remote.url();
    let start = |place: &Place| {
        let options = [&ON_REQUEST[..], &["--remote", &url]].concat();
        place.start_python(&options, "print('done')\n")
    };
    assert_eq!(start(&place).wait(), 0, "{}", place.text("err"));
    assert_eq!(place.text("out"), "done\n");
    assert_eq!(remote.state()["finished"], true);
    // Twice each, also where a lease was taken only to find that out.
    for place in [&other, &place, &other] {
        assert_eq!(start(place).wait(), 0, "{}", place.text("err"));
        place.wait_for("err", "finished already");
        let state = remote.state();
        assert_eq!(
            (&state["finished"], &state["released"]),
            (&true.into(), &true.into())
        );
    }
    assert_eq!(other.text("out"), "");
    assert_eq!(place.text("out"), "done\n");
}

#[apply(as_root)]
fn an_end_that_was_not_recorded_is_recorded_by_the_next_start() {
    let Some(server) = S3Server::start() else {
        return;
    };
    let (place, other, url) = (Place::new(), Place::new(), server.url());
    let start = |place: &Place| {
        let options = [&ON_REQUEST[..], &["--remote", &url]].concat();
        place.start_python_with(&options, UNTIL_GO, |command| {
            server.is_used_by(command);
            command.env("CKPT_RUN_REMOTE_LEASE", "10s");
        })
    };
    let mut run = start(&place);
    place.wait_for("out", "ready");
    server.gate().close();
    place.go();
    assert_eq!(run.wait(), 0, "{}", place.text("err"));
    let said = place.text("err");
    assert!(said.contains("was not released"), "{said}");
    server.gate().open();
    for place in [&place, &other] {
        assert_eq!(start(place).wait(), 0, "{}", place.text("err"));
        place.wait_for("err", "finished already");
    }
    let said = other.text("err");
    assert!(!said.contains("for the lease of"), "{said}");
    assert_eq!(other.text("out"), "");
}

#[apply(as_root)]
fn a_damaged_pack_refuses_the_restore_by_name() {
    let (place, other, remote) = (Place::new(), Place::new(), RemoteFolder::new());
    let url = remote.url();
    let job = StepsJob::new(&place, &url);
    kill(job.start_with_image());
    // That with the memory of the job; smaller ones have what accompanies the image.
    let bytes = |pack: &String| fs::metadata(remote.file(pack)).unwrap().len();
    let pack = remote.objects("packs").into_iter().max_by_key(bytes);
    let pack = pack.unwrap();
    let mut content = fs::read(remote.file(&pack)).unwrap();
    let place_of_damage = 2 << 20;
    content[place_of_damage] ^= 1;
    fs::write(remote.file(&pack), &content).unwrap();
    let (log, state) = (place.text("log"), place.text("state"));

    let second = StepsJob {
        place: &other,
        ..job
    };
    let code = second.start(&["--take-over"]).wait();
    let said = other.text("err");
    assert_eq!(code, 125, "{said}");
    let reason = format!("the object {pack} is damaged: a chunk has changed");
    assert!(said.contains(&reason), "{said}");
    assert_eq!(other.text("out"), "", "{said}");
    assert_eq!((place.text("log"), place.text("state")), (log, state));

    // The run continues as soon as the object is as it was.
    content[place_of_damage] ^= 1;
    fs::write(remote.file(&pack), &content).unwrap();
    let mut run = second.start(&[]);
    second.assert_result(&mut run, &place, &job.checksum());
}
