//! Stores and settings in places that other users can change.

use std::fs::{self, Permissions};
use std::os::unix::fs::{PermissionsExt, chown, lchown, symlink};
use std::path::Path;
use std::process::Command;

use crate::harness::{ON_REQUEST, Place, apply, as_root, stderr};

const NOBODY: u32 = 65534;

/// Checks that a run with this store ends with this message before its job runs.
fn the_store_is_refused(place: &Place, store: &str, message: &str) {
    let output = place.verb(&["--store", store, "--", "touch", "job-ran"]);
    assert_eq!(output.status.code(), Some(125), "{}", stderr(&output));
    assert!(
        stderr(&output).contains(message),
        "no {message:?} in {}",
        stderr(&output)
    );
    assert!(!place.file("job-ran").exists());
}

#[apply(as_root)]
fn a_store_in_another_users_folder_is_refused() {
    let place = Place::new();
    fs::create_dir(place.file("theirs")).expect("created");
    chown(place.file("theirs"), Some(NOBODY), None).expect("given away");
    the_store_is_refused(&place, "theirs/deep/store", "theirs belongs to user 65534");
    let left = fs::read_dir(place.file("theirs"))
        .expect("a folder")
        .count();
    assert_eq!(left, 0, "root has made something there");
    // An existing store, created when the folder belonged to root.
    chown(place.file("theirs"), Some(0), None).expect("taken back");
    let made = place.verb(&["--store", "theirs/store", "--", "true"]);
    assert!(made.status.success(), "{}", stderr(&made));
    chown(place.file("theirs"), Some(NOBODY), None).expect("given away");
    the_store_is_refused(&place, "theirs/store", "theirs belongs to user 65534");
}

#[apply(as_root)]
fn a_store_in_a_folder_for_all_wants_its_sticky_bit() {
    let place = Place::new();
    let all = place.file("all");
    fs::create_dir(&all).expect("created");
    fs::set_permissions(&all, Permissions::from_mode(0o777)).expect("opened");
    the_store_is_refused(
        &place,
        "all/store",
        &format!("`chmod +t {}`", all.display()),
    );
    fs::set_permissions(&all, Permissions::from_mode(0o1777)).expect("sticky");
    let made = place.verb(&["--store", "all/store", "--", "true"]);
    assert!(made.status.success(), "{}", stderr(&made));
}

#[apply(as_root)]
fn a_link_of_another_user_is_no_store() {
    let place = Place::new();
    let made = place.verb(&["--store", "mine", "--", "true"]);
    assert!(made.status.success(), "{}", stderr(&made));
    fs::create_dir(place.file("all")).expect("created");
    fs::set_permissions(place.file("all"), Permissions::from_mode(0o1777)).expect("sticky");
    let link = place.file("all/.ckpt-run");
    symlink(place.file("mine"), &link).expect("a link");
    lchown(&link, Some(NOBODY), None).expect("given away");
    let mut command = place.command(&["--", "touch", "job-ran"]);
    let output = command
        .current_dir(place.file("all"))
        .output()
        .expect("starts");
    assert_eq!(output.status.code(), Some(125), "{}", stderr(&output));
    assert!(
        stderr(&output).contains(".ckpt-run belongs to user 65534"),
        "{}",
        stderr(&output)
    );
    assert!(!place.file("all/job-ran").exists());
}

#[apply(as_root)]
fn settings_that_a_group_can_write_are_refused() {
    let place = Place::new();
    let settings = place.file("ckpt-run.toml");
    fs::write(&settings, "snapshot.interval = \"never\"\n").expect("written");
    fs::set_permissions(&settings, Permissions::from_mode(0o664)).expect("mode");
    // The user's private group is harmless.
    let output = place.verb(&["--", "true"]);
    assert!(output.status.success(), "{}", stderr(&output));
    chown(&settings, None, Some(NOBODY)).expect("given away");
    let output = place.verb(&["--", "touch", "job-ran"]);
    assert!(
        stderr(&output).contains("its group may write to it"),
        "{}",
        stderr(&output)
    );
    assert!(!place.file("job-ran").exists());
}

/// Renames by another program, as an administrator would.
fn rename(from: &Path, to: &Path) {
    fs::rename(from, to).expect("renamed");
}

#[apply(as_root)]
fn a_store_swapped_at_run_time_is_neither_written_nor_restored() {
    let place = Place::new();
    let mut run = place.start_ready(&ON_REQUEST);
    place.snapshot();
    let (store, away, theirs) = (
        place.file(".ckpt-run"),
        place.file("away"),
        place.file("theirs"),
    );
    let copied = Command::new("cp")
        .arg("-a")
        .args([&store, &theirs])
        .status();
    assert!(copied.expect("cp runs").success());
    let given = Command::new("chown")
        .args(["-R", "65534"])
        .arg(&theirs)
        .status();
    assert!(given.expect("chown runs").success());
    rename(&store, &away);
    rename(&theirs, &store);
    run.crash();
    assert_eq!(run.wait(), 125, "{}", place.text("err"));
    let said = place.text("err");
    assert!(
        said.contains("moved, replaced or removed while it is in use"),
        "{said}"
    );
    assert!(!said.contains("restored image"), "{said}");
}

#[apply(as_root)]
fn no_image_is_written_to_a_store_put_in_place_of_the_runs() {
    let place = Place::new();
    let mut run = place.start_ready(&ON_REQUEST);
    let first = place.snapshot();
    let (store, away) = (place.file(".ckpt-run"), place.file("away"));
    rename(&store, &away);
    let copied = Command::new("cp").arg("-a").args([&away, &store]).status();
    assert!(copied.expect("cp runs").success());
    // The socket's name still leads to the supervisor.
    fs::remove_file(store.join("control.sock")).expect("removed");
    fs::hard_link(away.join("control.sock"), store.join("control.sock")).expect("linked");
    let output = place.verb(&["snapshot"]);
    assert!(!output.status.success());
    assert!(
        stderr(&output).contains("moved, replaced or removed while it is in use"),
        "{}",
        stderr(&output)
    );
    // After its return, the store is used again, and the job has continued.
    fs::remove_dir_all(&store).expect("removed");
    rename(&away, &store);
    assert_ne!(place.snapshot(), first);
    place.go();
    assert_eq!(run.wait(), 0, "{}", place.text("err"));
}
