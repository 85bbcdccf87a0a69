//! Kills (SIGKILL) of the job and of the supervisor at every critical moment.

use std::thread;
use std::time::Duration;

use nix::sys::signal::Signal;

use super::counter_job::{
    Random, begin_snapshot, counting, finish_counter, processes_with, said, send, snapshot_at_last,
    start, start_counter, wait_for_criu, wait_for_progress,
};
use crate::harness::{Place, Run, apply, as_root, descendants, wait_until, wait_until_gone};

/// Kills of the job in each of two parallel runs.
const ROUNDS: usize = 25;
/// Range of the random delay before a kill: a snapshot of the counter takes about 300 ms, so kills hit before, during and
/// after it.
const KILL_WITHIN_MS: u64 = 450;

fn kill_the_job_again_and_again(mut random: Random) {
    let (place, mut run) = counting();
    for _ in 0..ROUNDS {
        snapshot_at_last(&place);
        let mut another = begin_snapshot(&place);
        thread::sleep(Duration::from_millis(random.below(KILL_WITHIN_MS)));
        run.crash();
        another.wait().expect("the client ends");
        // A restored job continues to write.
        wait_for_progress(&place);
    }
    finish_counter(&place, &mut run);
    assert_eq!(said(&place, "giving up"), 0);
}

#[apply(as_root)]
fn fifty_random_kills_change_neither_output_nor_files() {
    let (one, other) = (Random::new("first run"), Random::new("second run"));
    thread::scope(|scope| {
        scope.spawn(|| kill_the_job_again_and_again(one));
        scope.spawn(|| kill_the_job_again_and_again(other));
    });
}

/// Kills the supervisor at a moment that `when` waits for, and runs the same command line again.
fn kill_the_supervisor(when: impl FnOnce(&Place, &Run)) {
    let (place, mut run) = counting();
    place.snapshot();
    wait_for_progress(&place);
    when(&place, &run);
    let everything = descendants(run.pid());
    assert!(!everything.is_empty());
    run.signal(Signal::SIGKILL);
    assert_eq!(run.wait(), 137);
    wait_until_gone(&everything);
    let work = std::fs::read_link(place.file(".ckpt-run/work")).expect("the store links to it");
    assert!(work.is_dir());

    let mut again = start_counter(&place);
    wait_for_progress(&place);
    assert!(!work.exists(), "{}", work.display());
    finish_counter(&place, &mut again);
}

#[apply(as_root)]
fn killed_supervisor_ends_the_job_and_a_rerun_continues() {
    kill_the_supervisor(|_, _| {});
}

/// Job whose processes fork others, which stay, as fast as they can. Ends after its orphans do, if it is not killed.
const FORKS: &str = r#"
import os, time
for _ in range(3):
    if os.fork() == 0:
        for _ in range(1000):
            if os.fork() == 0:
                time.sleep(1000)
        time.sleep(1000)
open("forking", "w").write("y")
time.sleep(1000)
"#;

#[apply(as_root)]
fn killed_supervisor_ends_a_job_that_forks() {
    for _ in 0..6 {
        let place = Place::new();
        let mut run = start(&place, FORKS);
        place.wait_for("forking", "y");
        assert_eq!(run.kill_supervisor(), 137);
    }
}

#[apply(as_root)]
fn kill_during_a_snapshot_continues_from_the_previous_image() {
    kill_the_supervisor(|place, run| {
        let mut client = begin_snapshot(place);
        wait_for_criu(run, "dump");
        thread::spawn(move || client.wait());
    });
}

#[apply(as_root)]
fn a_supervisor_killed_during_a_restore_restores_when_run_again() {
    kill_the_supervisor(|_, run| {
        send(run.job(), Signal::SIGKILL);
        wait_for_criu(run, "restore");
    });
}

#[apply(as_root)]
fn appended_output_is_truncated_to_the_snapshot() {
    let place = Place::new();
    std::fs::write(place.file("out"), "from before\n").expect("written");
    let quiet_then_loud = r#"
import os, time
open("ready", "w").write("y")
while not os.path.exists("go"): time.sleep(0.01)
print("said", flush=True)
while not os.path.exists("stop"): time.sleep(0.01)
"#;
    let mut run = start(&place, quiet_then_loud);
    place.wait_for("ready", "y");
    // Nothing was written yet: ckpt-run's own offset in the file is still 0.
    place.snapshot();
    place.go();
    place.wait_for("out", "said\n");
    std::fs::remove_file(place.file("go")).expect("removed");
    run.signal(Signal::SIGKILL);
    run.wait();
    let mut again = start(&place, quiet_then_loud);
    wait_until("the restored job", || {
        !processes_with(&again, "job.py").is_empty() && said(&place, "restored") == 1
    });
    assert_eq!(place.text("out"), "from before\n");
    place.go();
    std::fs::write(place.file("stop"), "").expect("written");
    assert_eq!(again.wait(), 0, "{}", place.text("err"));
    assert_eq!(place.text("out"), "from before\nsaid\n");
}

/// The job first changes a file after the first snapshot, so that its content then is unknown.
#[apply(as_root)]
fn a_failing_job_with_a_refused_older_image_ends() {
    let place = Place::new();
    std::fs::write(place.file("kept"), vec![b'x'; 3 << 20]).expect("written");
    let mut run = start(
        &place,
        r#"
import os, sys, time
open("ready", "w").write("y")
while not os.path.exists("go"): time.sleep(0.01)
open("kept", "a").write("more")
open("changed", "w").write("y")
while not os.path.exists("fail"): time.sleep(0.01)
sys.exit(41)
"#,
    );
    place.wait_for("ready", "y");
    place.snapshot();
    place.go();
    place.wait_for("changed", "y");
    place.snapshot();
    std::fs::write(place.file("fail"), "").expect("written");
    assert_eq!(run.wait(), 41, "{}", place.text("err"));
    assert_eq!(said(&place, "restored image=000002"), 2);
    assert_eq!(said(&place, "restored image=000001"), 0);
    assert_eq!(said(&place, "restore failed: "), 1);
}

#[apply(as_root)]
fn job_crashing_after_every_restore_ends_with_its_code() {
    let place = Place::new();
    let mut run = start(
        &place,
        r#"
import os, sys, time
open("ready", "w").write("y")
while not os.path.exists("fail"): time.sleep(0.01)
sys.exit(41)
"#,
    );
    place.wait_for("ready", "y");
    place.snapshot();
    place.snapshot();
    std::fs::write(place.file("fail"), "").expect("written");
    assert_eq!(run.wait(), 41, "{}", place.text("err"));
    // The newest image, then the one before it, then no other.
    assert_eq!(said(&place, "restoring image=000002"), 1);
    assert_eq!(said(&place, "restoring image=000001"), 1);
    assert_eq!(said(&place, "giving up"), 1);
    assert_eq!(place.images().len(), 2);
    assert!(
        place
            .images()
            .iter()
            .all(|image| image["damaged"].is_null())
    );
}
