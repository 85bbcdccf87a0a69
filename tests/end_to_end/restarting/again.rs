//! Repeated starts: the same command line, another one, another supervisor, another user's store, wrong lines and
//! settings.

use std::fs;
use std::os::unix::fs::{PermissionsExt, chown};

use crate::harness::{Place, apply, as_root, as_root_and_user, code, stderr, stdout, wait_until};

#[apply(as_root_and_user)]
fn finished_run_is_reported_and_not_repeated() {
    let place = Place::new();
    let line = ["--", "sh", "-c", "echo x >> ran"];
    assert_eq!(code(place.verb(&line).status), 0);
    let again = place.verb(&line);
    assert_eq!(code(again.status), 0);
    let said = stderr(&again);
    assert!(
        said.contains("finished already") && said.contains("--fresh"),
        "{said}"
    );
    assert_eq!(place.text("ran"), "x\n");
    let fresh = place.verb(&["--fresh", "--", "sh", "-c", "echo x >> ran"]);
    assert_eq!(code(fresh.status), 0, "{}", stderr(&fresh));
    assert_eq!(place.text("ran"), "x\nx\n");
}

#[apply(as_root_and_user)]
fn another_command_is_refused_with_both_lines() {
    let place = Place::new();
    assert_eq!(code(place.verb(&["--", "sh", "-c", "exit 3"]).status), 3);
    let other = place.verb(&["--", "sh", "-c", "touch ran"]);
    assert_eq!(code(other.status), 125);
    let said = stderr(&other);
    assert!(
        said.contains("sh -c exit 3") && said.contains("sh -c touch ran"),
        "{said}"
    );
    assert!(said.contains("--fresh"), "{said}");
    assert!(!place.file("ran").exists());
}

#[apply(as_root_and_user)]
fn failed_run_without_an_image_starts_from_the_beginning() {
    let place = Place::new();
    let line = ["--", "sh", "-c", "echo x >> ran; test -e go"];
    assert_eq!(code(place.verb(&line).status), 1);
    place.go();
    let again = place.verb(&line);
    assert_eq!(code(again.status), 0, "{}", stderr(&again));
    assert_eq!(place.text("ran"), "x\nx\n");
}

#[apply(as_root_and_user)]
fn a_fresh_run_never_restores_an_image_of_the_older_one() {
    let place = Place::new();
    let run = place.start_ready(&[]);
    place.snapshot();
    drop(run);
    let line = ["--fresh", "--", "sh", "-c", "kill -KILL $$"];
    let fresh = place.verb(&line);
    assert_eq!(code(fresh.status), 137, "{}", stderr(&fresh));
    assert!(
        stderr(&fresh).contains("there is no image yet"),
        "{}",
        stderr(&fresh)
    );
    let list = stdout(&place.verb(&["list"]));
    assert!(
        list.trim_end().ends_with("belongs to another run"),
        "{list}"
    );
    let again = place.verb(&line[1..]);
    assert_eq!(code(again.status), 137, "{}", stderr(&again));
}

#[apply(as_root_and_user)]
fn second_supervisor_is_refused_with_the_first_ones_pid() {
    let place = Place::new();
    let mut run = place.start_ready(&[]);
    for fresh in [&["--fresh"][..], &[]] {
        let second = place.verb(&[fresh, &["--", "python3", "-u", "job.py"]].concat());
        assert_eq!(code(second.status), 125);
        let said = stderr(&second);
        assert!(said.contains(&run.pid().to_string()), "{said}");
    }
    place.go();
    assert_eq!(run.wait(), 0);
}

#[apply(as_root)]
fn a_store_that_others_can_read_or_own_is_refused() {
    let place = Place::new();
    let line = ["--", "touch", "ran"];
    fs::create_dir(place.file(".ckpt-run")).unwrap();
    fs::set_permissions(place.file(".ckpt-run"), fs::Permissions::from_mode(0o750)).unwrap();
    let refused = place.verb(&line);
    assert_eq!(code(refused.status), 125);
    assert!(
        stderr(&refused).contains(".ckpt-run"),
        "{}",
        stderr(&refused)
    );
    assert!(stderr(&refused).contains("chmod"), "{}", stderr(&refused));

    fs::set_permissions(place.file(".ckpt-run"), fs::Permissions::from_mode(0o700)).unwrap();
    chown(place.file(".ckpt-run"), Some(4321), None).unwrap();
    let refused = place.verb(&line);
    assert_eq!(code(refused.status), 125);
    assert!(stderr(&refused).contains("4321"), "{}", stderr(&refused));
    assert!(!place.file("ran").exists());
}

#[apply(as_root_and_user)]
fn a_new_store_is_private() {
    let place = Place::new();
    assert_eq!(code(place.verb(&["--", "true"]).status), 0);
    let mode = fs::metadata(place.file(".ckpt-run"))
        .unwrap()
        .permissions()
        .mode();
    assert_eq!(mode & 0o7777, 0o700);
}

#[test]
fn a_forgotten_double_dash_is_answered_with_the_right_line() {
    let place = Place::new();
    for (line, right) in [
        (&["touch", "ran"][..], "ckpt-run -- touch ran"),
        (&["run", "touch", "ran"], "ckpt-run run -- touch ran"),
        (
            &["--interval", "5m", "touch", "ran"],
            "ckpt-run --interval 5m -- touch ran",
        ),
        (
            &["run", "--interval", "5m", "touch", "ran"],
            "ckpt-run run --interval 5m -- touch ran",
        ),
    ] {
        let output = place.verb(line);
        assert_eq!(code(output.status), 125);
        assert!(
            stderr(&output).contains(&format!("{right}\n")),
            "{}",
            stderr(&output)
        );
    }
    let option = place.verb(&["--no-such", "--", "touch", "ran"]);
    assert_eq!(code(option.status), 125);
    let said = stderr(&option);
    assert!(
        said.starts_with("ckpt-run: error: unexpected argument '--no-such'"),
        "{said}"
    );
    assert!(!said.contains("put --"), "{said}");
    let nothing = place.verb(&[]);
    assert_eq!(code(nothing.status), 125);
    assert!(stderr(&nothing).contains("--"), "{}", stderr(&nothing));
    assert!(!place.file("ran").exists());
}

#[test]
fn wrong_settings_name_their_place_and_nothing_is_started() {
    let place = Place::new();
    for (text, expected) in [
        (
            "[snapshot]\nintervall = \"5m\"\n",
            &[
                "ckpt-run.toml:2",
                "snapshot.intervall",
                "did you mean `interval`?",
            ][..],
        ),
        (
            "\n[snapshot]\ninterval = 5\n",
            &["ckpt-run.toml:3", "snapshot.interval", "unit"],
        ),
        ("[restart\n", &["ckpt-run.toml:1"]),
    ] {
        fs::write(place.file("ckpt-run.toml"), text).unwrap();
        let output = place.verb(&["--", "touch", "ran"]);
        assert_eq!(code(output.status), 125);
        for part in expected {
            assert!(
                stderr(&output).contains(part),
                "{part}: {}",
                stderr(&output)
            );
        }
    }
    fs::remove_file(place.file("ckpt-run.toml")).unwrap();
    let output = place.verb(&["--grace", "soon", "--", "touch", "ran"]);
    assert_eq!(code(output.status), 125);
    assert!(
        stderr(&output).contains("--grace: snapshot.grace"),
        "{}",
        stderr(&output)
    );
    assert!(!place.file("ran").exists());
}

/// Reads one number after another from `next`, as far as the test has written it, and records each.
const FOLLOWER: &str = r"
import time
print('ready', flush=True)
done = 0
while done < 4:
    try: wanted = int(open('next').read() or 0)
    except FileNotFoundError: wanted = 0
    while done < wanted:
        done += 1
        print('step', done, flush=True)
    time.sleep(0.005)
";

#[apply(as_root)]
fn run_returned_to_an_older_image_ignores_abandoned_ones() {
    let place = Place::new();
    let step = |number: u32| {
        fs::write(place.file("next.new"), number.to_string()).unwrap();
        fs::rename(place.file("next.new"), place.file("next")).unwrap();
        place.wait_for("out", &format!("step {number}\n"));
    };
    let mut run = place.start_python(&[], FOLLOWER);
    place.wait_for("out", "ready");
    step(1);
    assert_eq!(place.snapshot(), "000001");
    step(2);
    assert_eq!(place.snapshot(), "000002");
    run.signal(nix::sys::signal::Signal::SIGKILL);
    run.wait();

    let missing = place.verb(&["restore", "000007"]);
    assert_eq!(code(missing.status), 125);
    assert!(stderr(&missing).contains("000007"), "{}", stderr(&missing));

    fs::write(place.file("next"), "1").unwrap();
    let mut run = place.start(&["restore", "000001"], &[]);
    for restores in 1..=2 {
        let restored = || place.text("err").matches("restored image=000001").count();
        wait_until("the restore", || restored() == restores);
        if restores == 1 {
            run.crash();
        }
    }
    run.signal(nix::sys::signal::Signal::SIGKILL);
    run.wait();
    let lives: Vec<_> = place
        .images()
        .iter()
        .map(|image| image["life"].clone())
        .collect();
    assert_eq!(lives, ["present", "given-up"]);
    let list = stdout(&place.verb(&["list"]));
    let remark = list.lines().last().unwrap();
    assert!(
        remark.ends_with("abandoned: the run continued from an older image"),
        "{list}"
    );
    // The newest good image is an abandoned one; the image from which the run continues stays, too.
    let named = place.verb(&["forget", "000001"]);
    assert!(
        stderr(&named).contains("run continues from"),
        "{}",
        stderr(&named)
    );
    let kept = place.verb(&["forget", "--keep-last", "1"]);
    let kept = stdout(&kept);
    assert_eq!(kept.matches("kept").count(), 2, "{kept}");

    // Its number is not reused for a future image.
    fs::write(place.file(".ckpt-run/images/000002.damaged"), "torn").unwrap();
    assert_eq!(code(place.verb(&["forget", "000002"]).status), 0);

    let mut run = place.start_python(&[], FOLLOWER);
    place.wait_for("err", "job.py was changed after the image was taken");
    step(3);
    assert_eq!(place.snapshot(), "000003");
    run.crash();
    place.wait_for("err", "restored image=000003");
    step(4);
    assert_eq!(run.wait(), 0, "{}", place.text("err"));
    assert!(!place.text("err").contains("restored image=000002"));
    assert_eq!(place.text("out"), "ready\nstep 1\nstep 2\nstep 3\nstep 4\n");
}

#[apply(as_root_and_user)]
fn there_is_nothing_to_restore_where_there_was_no_run() {
    let place = Place::new();
    let none = place.verb(&["restore"]);
    assert_eq!(code(none.status), 125);
    let said = stderr(&none);
    assert!(
        said.contains("store") && said.contains(".ckpt-run"),
        "{said}"
    );
}

#[apply(as_root_and_user)]
fn a_run_that_cannot_begin_leaves_the_store_as_it_was() {
    let place = Place::new();
    assert_eq!(place.start(&[], &["true"]).wait(), 0);
    // Blocks the place of ckpt-run's own files; a full disk has the same effect.
    fs::remove_dir_all(place.file(".ckpt-run/bin")).unwrap();
    fs::write(place.file(".ckpt-run/bin"), "").unwrap();
    let refused = place.verb(&["--fresh", "--", "sleep", "100"]);
    assert_eq!(code(refused.status), 125);
    assert!(
        stderr(&refused).contains("cannot prepare the work folder"),
        "{}",
        stderr(&refused)
    );
    let told = stdout(&place.verb(&["status"]));
    assert!(told.starts_with("not running: finished"), "{told}");
    assert!(told.contains(": true\n"), "{told}");
}
