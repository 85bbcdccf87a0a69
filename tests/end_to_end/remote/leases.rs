//! The lease of a run: a supervisor that loses it kills its job and uploads nothing more.

use std::fs;
use std::process::Command;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;

use super::{RemoteFolder, S3Server, WAITS};
use crate::harness::{
    ON_REQUEST, Place, Run, apply, as_root, inner_pid, wait_for_descendant, wait_until_gone,
};

/// Lease of the runs, the shortest.
const LEASE: Duration = Duration::from_secs(10);
/// Time for which a job runs at least after its last renewal of the lease.
const RUNS_AT_LEAST: Duration = Duration::from_secs(2);
/// Time in addition to the lease in which a loaded machine kills a job.
const SLACK: Duration = Duration::from_secs(10);

fn start(place: &Place, url: &str, options: &[&str], change: impl FnOnce(&mut Command)) -> Run {
    let options = [&ON_REQUEST[..], &["--remote", url], options].concat();
    if !place.file("job.py").exists() {
        fs::write(place.file("job.py"), WAITS).unwrap();
    }
    place.start_with(&options, &["python3", "-u", "job.py"], |command| {
        command.env("CKPT_RUN_REMOTE_LEASE", "10s");
        change(command);
    })
}

/// Starts a run with two images. The first one is in the remote store. The upload of the second one fails from the call
/// of `refuse_packs` on.
fn start_with_failing_upload(
    place: &Place,
    url: &str,
    refuse_packs: impl FnOnce(),
    change: impl FnOnce(&mut Command),
) -> (Run, i32) {
    let run = start(place, url, &[], change);
    place.wait_for("out", "ready\n");
    place.snapshot();
    place.wait_for("err", "the image is in the remote store image=000001");
    refuse_packs();
    place.snapshot();
    let job = run.job();
    (run, job)
}

/// Checks that the second supervisor's image is the only one after the takeover, and that no entry of the state after
/// it is the first one's.
fn assert_taken(remote: &RemoteFolder, first_image: &str, second: &Place) {
    let record: Value = serde_json::from_str(&second.text(".ckpt-run/remote.json")).unwrap();
    let entries = remote.entries();
    let taken = entries.iter().position(|entry| entry["epoch"] == 2);
    for entry in &entries[taken.expect("a takeover")..] {
        assert_eq!(entry["epoch"], 2);
        assert_eq!(entry["holder"]["store"], record["identity"]);
    }
    let images = remote.images();
    assert_eq!((images.len(), images[0].as_str()), (2, first_image));
    let objects = remote.objects("images");
    assert_eq!(objects, images.into_iter().collect());
}

#[apply(as_root)]
fn take_over_stops_the_other_job() {
    let (place, other, remote) = (Place::new(), Place::new(), RemoteFolder::new());
    let (url, view) = (remote.url(), remote.view());
    let refuse_packs = || view.refuse_packs();
    let (mut first, job) = start_with_failing_upload(&place, &view.url(), refuse_packs, |_| {});
    let images = remote.images();
    let mut second = start(&other, &url, &["--take-over"], |_| {});
    other.wait_for("err", "restored image=000001");
    assert_eq!(first.wait(), 76, "{}", place.text("err"));
    wait_until_gone(&[job]);
    let said = place.text("err");
    assert!(
        said.contains("the job was stopped: the supervisor on "),
        "{said}"
    );
    assert!(!said.contains("waiting for the upload"), "{said}");
    other.snapshot();
    other.wait_for("err", "the image is in the remote store image=000002");
    assert_taken(&remote, &images[0], &other);

    let mut again = start(&place, &url, &[], |_| {});
    place.wait_for("err", "for the lease of file://");
    again.signal(Signal::SIGTERM);
    assert_eq!(again.wait(), 143);
    assert_eq!(place.text("out"), "ready\n");
    assert_taken(&remote, &images[0], &other);
    place.go();
    assert_eq!(second.wait(), 0, "{}", other.text("err"));
    assert_eq!(other.text("out"), "done\n");
}

#[apply(as_root)]
fn the_job_of_a_stopped_supervisor_ends_with_its_lease() {
    let (place, other, remote) = (Place::new(), Place::new(), RemoteFolder::new());
    let url = remote.url();
    let mut first = start(&place, &url, &[], |_| {});
    place.wait_for("out", "ready\n");
    place.snapshot();
    place.wait_for("err", "the image is in the remote store image=000001");
    let job = first.job();
    let _second = start(&other, &url, &[], |_| {});
    other.wait_for("err", "for the lease of file://");
    first.signal(Signal::SIGSTOP);
    wait_until_gone(&[job]);
    assert!(!other.text("err").contains("restored image"));
    other.wait_for("err", "restored image=000001");
    first.signal(Signal::SIGCONT);
    assert_eq!(first.wait(), 76, "{}", place.text("err"));
    assert!(!place.text("err").contains("crashed"));
}

/// Also pid 1 of the sandbox is stopped, as on a machine that is suspended.
#[apply(as_root)]
fn a_suspended_supervisor_stops_its_job_when_it_wakes() {
    let (place, other, remote) = (Place::new(), Place::new(), RemoteFolder::new());
    let (url, view) = (remote.url(), remote.view());
    let refuse_packs = || view.refuse_packs();
    let (mut first, job) = start_with_failing_upload(&place, &view.url(), refuse_packs, |_| {});
    let images = remote.images();
    let is_pid_1 = |pid| inner_pid(pid) == Some(1);
    let pid_1 = Pid::from_raw(wait_for_descendant(first.pid(), "pid 1", is_pid_1));
    first.signal(Signal::SIGSTOP);
    kill(pid_1, Signal::SIGSTOP).unwrap();
    let _second = start(&other, &url, &[], |_| {});
    other.wait_for("err", "for the lease of file://");
    other.wait_for("err", "restored image=000001");
    first.signal(Signal::SIGCONT);
    // The supervisor may have ended it already.
    let _ = kill(pid_1, Signal::SIGCONT);
    assert_eq!(first.wait(), 76, "{}", place.text("err"));
    wait_until_gone(&[job]);
    other.snapshot();
    other.wait_for("err", "the image is in the remote store image=000002");
    assert_taken(&remote, &images[0], &other);
}

/// Makes the server unreachable and reachable again. The job ends in time, and the same line continues from the newest
/// image, which only the local store has.
fn outlast_the_lease(disconnect: impl FnOnce(&S3Server), reconnect: impl FnOnce(&S3Server)) {
    let Some(server) = S3Server::start() else {
        return;
    };
    let (place, url) = (Place::new(), server.url());
    let (mut run, job) = start_with_failing_upload(
        &place,
        &url,
        || server.gate().refuse_packs(),
        |command| server.is_used_by(command),
    );
    disconnect(&server);
    let disconnected = Instant::now();
    wait_until_gone(&[job]);
    let ran = disconnected.elapsed();
    assert!(ran > RUNS_AT_LEAST, "{ran:?}: {}", place.text("err"));
    assert!(ran < LEASE + SLACK, "{ran:?}: {}", place.text("err"));
    assert_eq!(run.wait(), 76, "{}", place.text("err"));
    let said = place.text("err");
    assert!(said.contains("cannot renew the lease"), "{said}");
    assert!(
        said.matches("cannot upload the image").count() <= 1,
        "{said}"
    );
    assert!(
        said.contains("the lease of the run could not be renewed"),
        "{said}"
    );
    assert_eq!(place.images().len(), 2);

    reconnect(&server);
    let mut again = start(&place, &url, &[], |command| server.is_used_by(command));
    place.wait_for("err", "restored image=000002");
    place.wait_for("err", "the image is in the remote store image=000002");
    place.go();
    assert_eq!(again.wait(), 0, "{}", place.text("err"));
    let said = place.text("err");
    assert!(!said.contains("for the lease of s3://"), "{said}");
    assert_eq!(place.text("out"), "ready\ndone\n");
}

#[apply(as_root)]
fn an_unreachable_server_stops_the_job_in_time() {
    outlast_the_lease(
        |server| server.gate().close(),
        |server| server.gate().open(),
    );
}

#[apply(as_root)]
fn a_server_that_does_not_answer_stops_the_job_in_time() {
    outlast_the_lease(
        |server| server.signal(Signal::SIGSTOP),
        |server| {
            server.signal(Signal::SIGCONT);
            server.gate().open();
        },
    );
}

#[apply(as_root)]
fn a_short_outage_does_not_stop_the_job() {
    let Some(server) = S3Server::start() else {
        return;
    };
    let (place, url) = (Place::new(), server.url());
    let mut run = start(&place, &url, &[], |command| {
        server.is_used_by(command);
        // Half of it is left when the first renewal has failed.
        command.env("CKPT_RUN_REMOTE_LEASE", "40s");
    });
    place.wait_for("out", "ready\n");
    server.gate().close();
    place.snapshot();
    place.wait_for("err", "cannot renew the lease of the run");
    server.gate().open();
    place.wait_for("err", "the lease of the run is renewed again");
    place.wait_for("err", "the image is in the remote store image=000001");
    place.go();
    assert_eq!(run.wait(), 0, "{}", place.text("err"));
    let said = place.text("err");
    assert_eq!(said.matches("cannot renew the lease").count(), 1, "{said}");
    assert_eq!(place.text("out"), "ready\ndone\n");
}
