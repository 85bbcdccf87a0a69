//! Restart policy: the ends of a job that lead to a restart, the image used, and the number of restarts.

use std::fs;

use crate::harness::{Place, Run, UNTIL_GO, apply, as_root_and_user, wait_until};

/// Starts a job that computes until there is a file `go`, then runs `end`; takes a snapshot of it.
fn start_saved(place: &Place, options: &[&str], end: &str) -> Run {
    fs::write(place.file("job.py"), format!("{UNTIL_GO}{end}\n")).unwrap();
    let run = start(place, options, &["python3", "-u", "job.py"]);
    place.wait_for("out", "ready");
    place.snapshot();
    run
}

fn start(place: &Place, options: &[&str], job: &[&str]) -> Run {
    place.start_with(options, job, |command| {
        command.env("CKPT_RUN_RESTART_BACKOFF", "50ms");
    })
}

fn restored(place: &Place) -> usize {
    place.text("err").matches("ckpt-run: restored").count()
}

/// Returns the numbers of the restored images, in order.
fn restoring(place: &Place) -> Vec<String> {
    let err = place.text("err");
    let images = err
        .lines()
        .filter_map(|line| line.strip_prefix("ckpt-run: restoring image="));
    images.map(str::to_owned).collect()
}

#[apply(as_root_and_user)]
fn policy_no_ends_with_the_first_crash() {
    let place = Place::new();
    let mut run = start_saved(&place, &["--restart", "no"], "");
    run.crash();
    assert_eq!(run.wait(), 137, "{}", place.text("err"));
    assert_eq!(restored(&place), 0);
}

#[apply(as_root_and_user)]
fn on_abnormal_restores_after_signals_only() {
    let place = Place::new();
    let mut run = start_saved(&place, &["--restart", "on-abnormal"], "sys.exit(9)");
    run.crash();
    place.wait_for("err", "ckpt-run: restored");
    place.go();
    assert_eq!(run.wait(), 9, "{}", place.text("err"));
    assert_eq!(restored(&place), 1);
    assert!(
        place.text("err").contains("restart.policy"),
        "{}",
        place.text("err")
    );
}

#[apply(as_root_and_user)]
fn policy_always_starts_again_after_a_success() {
    let place = Place::new();
    let options = ["--restart", "always", "--max-restarts", "2"];
    let mut run = start(&place, &options, &["sh", "-c", "echo x >> ran"]);
    assert_eq!(run.wait(), 0, "{}", place.text("err"));
    assert_eq!(place.text("ran"), "x\nx\nx\n");
}

#[apply(as_root_and_user)]
fn a_prevented_exit_code_without_an_image_is_not_restarted() {
    let place = Place::new();
    let mut run = start(&place, &[], &["sh", "-c", "echo x >> ran; exit 2"]);
    assert_eq!(run.wait(), 2, "{}", place.text("err"));
    assert_eq!(place.text("ran"), "x\n");
    assert!(
        place.text("err").contains("restart.prevent"),
        "{}",
        place.text("err")
    );
}

#[apply(as_root_and_user)]
fn a_prevented_exit_code_of_a_job_with_an_image_is_a_crash() {
    let place = Place::new();
    let mut run = start_saved(&place, &[], "sys.exit(2)");
    place.snapshot();
    place.go();
    assert_eq!(run.wait(), 2, "{}", place.text("err"));
    assert_eq!(restoring(&place), ["000002", "000001"]);
}

#[apply(as_root_and_user)]
fn restarts_without_a_new_image_are_counted() {
    let place = Place::new();
    let mut run = place.start_with(
        &["--max-restarts", "2"],
        &["sh", "-c", "echo x >> ran; exit 4"],
        |command| {
            command
                .env("CKPT_RUN_RESTART_BACKOFF", "10ms")
                .env("CKPT_RUN_RESTART_WITHOUT_IMAGE", "start");
        },
    );
    assert_eq!(run.wait(), 4, "{}", place.text("err"));
    assert_eq!(place.text("ran"), "x\nx\nx\n");
}

#[apply(as_root_and_user)]
fn repeated_crash_ends_the_run_with_the_jobs_code() {
    let place = Place::new();
    let mut run = start_saved(&place, &[], "sys.exit(9)");
    place.go();
    assert_eq!(run.wait(), 9, "{}", place.text("err"));
    assert_eq!(restored(&place), 2);
    assert!(
        place.text("err").contains("crashed 3 times"),
        "{}",
        place.text("err")
    );
}

#[apply(as_root_and_user)]
fn crashes_without_progress_try_each_older_image_once() {
    let place = Place::new();
    let mut run = start_saved(&place, &[], "sys.exit(9)");
    for _ in 0..4 {
        place.snapshot();
    }
    place.go();
    assert_eq!(run.wait(), 9, "{}", place.text("err"));
    let all = ["000005", "000004", "000003", "000002", "000001"];
    assert_eq!(restoring(&place), all, "{}", place.text("err"));
    let said = place.text("err");
    assert!(said.contains("crashed 6 times"), "{said}");
}

#[apply(as_root_and_user)]
fn an_explicit_limit_on_restarts_is_the_bound() {
    let place = Place::new();
    let mut run = start_saved(&place, &["--max-restarts", "5"], "sys.exit(9)");
    place.snapshot();
    place.snapshot();
    place.go();
    assert_eq!(run.wait(), 9, "{}", place.text("err"));
    let expected = ["000003", "000002", "000001", "000001", "000001"];
    assert_eq!(restoring(&place), expected, "{}", place.text("err"));
    let said = place.text("err");
    assert!(said.contains("restart.max"), "{said}");
}

#[apply(as_root_and_user)]
fn abandoned_images_are_not_restored_later() {
    let place = Place::new();
    let mut run = start_saved(&place, &[], "");
    place.snapshot();
    let mut restores = 0;
    let mut crash = |run: &Run| {
        run.crash();
        restores += 1;
        wait_until("the restore", || restored(&place) == restores);
    };
    crash(&run);
    crash(&run);
    // From the first image; the second one belongs to the attempt that failed.
    place.snapshot();
    crash(&run);
    crash(&run);
    place.go();
    assert_eq!(run.wait(), 0, "{}", place.text("err"));
    assert_eq!(restoring(&place), ["000002", "000001", "000003", "000001"]);
}

#[apply(as_root_and_user)]
fn job_failing_at_the_same_place_ends_despite_new_images() {
    let place = Place::new();
    // The second crash comes one image after its restore.
    let job = "import sys, time\nfor step in range(1, 37):\n    print(step, flush=True)\n    \
        time.sleep(0.1)\nsys.exit(7)";
    let mut run = start(&place, &["--interval", "1s"], &["python3", "-c", job]);
    assert_eq!(run.wait(), 7, "{}", place.text("err"));
    let said = place.text("err");
    assert!(said.contains("times without progress"), "{said}");
    let images = restoring(&place);
    // Only the oldest may be restored twice.
    assert!(images.is_sorted_by(|one, next| one >= next), "{said}");
    let (_, restored) = said.split_once("ckpt-run: restored").expect("a restore");
    assert!(restored.contains("ckpt-run: snapshot"), "{said}");
}
