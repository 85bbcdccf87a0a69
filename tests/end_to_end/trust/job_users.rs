//! Jobs that run as another user, by `--user`.

use std::fs;
use std::os::unix::fs::{MetadataExt, chown};
use std::process::Command;

use nix::unistd::User;

use crate::harness::{ON_REQUEST, Place, apply, as_root, stderr, wait_until};

/// User that exists on every Debian, with its own groups and home.
const USER: &str = "mail";

fn user() -> User {
    User::from_name(USER).expect("asked").expect("a user")
}

/// Creates a place that the user may write to.
fn place() -> Place {
    let place = Place::new();
    // The store belongs to root, beside the job's folder.
    fs::set_permissions(
        place.path(),
        std::os::unix::fs::PermissionsExt::from_mode(0o755),
    )
    .expect("opened");
    fs::create_dir(place.file("theirs")).expect("created");
    chown(
        place.file("theirs"),
        Some(user().uid.as_raw()),
        Some(user().gid.as_raw()),
    )
    .expect("given away");
    place
}

#[apply(as_root)]
fn the_job_has_the_ids_groups_and_variables_of_its_user() {
    let place = place();
    let script = "id; echo $HOME,$USER,$LOGNAME,$SHELL,$CKPT_RUN_SOCKET; grep Cap[EP] /proc/self/status; \
                  touch theirs/made; echo again > /dev/stdout";
    let mut run = place.start(&["--user", USER], &["sh", "-c", script]);
    assert_eq!(run.wait(), 0, "{}", place.text("err"));
    let said = place.text("out");
    let ids = Command::new("id").arg(USER).output().expect("id runs");
    let ids = String::from_utf8_lossy(&ids.stdout).into_owned();
    let home = user().dir.display().to_string();
    let shell = user().shell.display().to_string();
    let no_rights = "CapPrm:\t0000000000000000\nCapEff:\t0000000000000000\n";
    assert_eq!(
        said,
        format!("{ids}{home},{USER},{USER},{shell},\n{no_rights}again\n")
    );
    let made = fs::metadata(place.file("theirs/made")).expect("made");
    assert_eq!(
        (made.uid(), made.gid()),
        (user().uid.as_raw(), user().gid.as_raw())
    );
    let store = fs::metadata(place.file(".ckpt-run")).expect("a store");
    assert_eq!((store.uid(), store.mode() & 0o777), (0, 0o700));
}

#[apply(as_root)]
fn a_user_that_is_none_is_refused_before_anything_is_made() {
    let place = place();
    for name in ["no-such-user", "0", "mail\n"] {
        let output = place.verb(&["--user", name, "--", "touch", "job-ran"]);
        assert_eq!(output.status.code(), Some(125), "{name}");
        let said = stderr(&output);
        assert!(said.contains("there is no user"), "{said}");
        assert!(!place.file(".ckpt-run").exists() && !place.file("job-ran").exists());
    }
}

#[apply(as_root)]
fn job_of_another_user_is_restored_as_that_user() {
    let place = place();
    let script =
        "echo ready; while ! [ -e go ]; do sleep 0.05; done; id -u; echo again > /dev/stdout";
    let options = [&ON_REQUEST[..], &["--user", USER]].concat();
    let mut run = place.start(&options, &["sh", "-c", script]);
    place.wait_for("out", "ready");
    place.snapshot();
    run.crash();
    wait_until("a restore", || place.text("err").contains("restored image"));
    place.go();
    assert_eq!(run.wait(), 0, "{}", place.text("err"));
    let uid = user().uid;
    assert_eq!(place.text("out"), format!("ready\n{uid}\nagain\n"));
}
