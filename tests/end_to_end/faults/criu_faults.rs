//! Faults of CRIU, killed or hanging at work: the job continues, or is restored.

use std::fs;
use std::process::Child;
use std::thread;
use std::time::{Duration, Instant};

use ckpt_run::job::is_alive;
use nix::sys::signal::Signal;

use super::counter_job::{
    Random, begin_snapshot, counted, counting, counting_with, crash_and_finish, finish_counter,
    processes_with, said, send, snapshot_at_last, wait_for_criu, wait_for_progress,
};
use crate::harness::{
    ON_REQUEST, Place, Run, apply, as_root, criu_script, descendants, skip, stderr, wait_until,
    wait_until_or, write_script,
};

/// Range of the random delay before a kill: a dump of the counter takes about 100 ms.
const KILL_WITHIN_MS: u64 = 100;

#[apply(as_root)]
fn job_computes_after_criu_was_killed_in_a_dump() {
    let mut random = Random::new("killed criu");
    let (place, mut run) = counting();
    // A job that executes CRIU's code when CRIU is killed dies, and is restored.
    place.snapshot();
    for _ in 0..8 {
        let mut client = begin_snapshot(&place);
        let criu = wait_for_criu(&run, "dump");
        thread::sleep(Duration::from_millis(random.below(KILL_WITHIN_MS)));
        send(criu, Signal::SIGKILL);
        client.wait().expect("the client ends");
        wait_for_progress(&place);
        snapshot_at_last(&place);
    }
    finish_counter(&place, &mut run);
}

/// State of a job whose CRIU was killed.
#[derive(Debug, PartialEq, Eq)]
enum Fate {
    /// CRIU was too fast, or had not begun with the job.
    Untouched,
    /// The job contains remains of CRIU, and this was detected.
    Doubtful,
    /// The job executed CRIU's code and died.
    Died,
}

/// Kills CRIU while its code is mapped in the job.
fn kill_criu_inside_the_job(place: &Place, run: &Run) -> Fate {
    let job = run.job();
    let ends = || said(place, "cancelled: the job ended");
    let (dead, words) = (ends(), place.text("err").lines().count());
    let mut client = begin_snapshot(place);
    let criu = wait_for_criu(run, "dump");
    let remains = || {
        fs::read_to_string(format!("/proc/{job}/maps")).is_ok_and(|maps| maps.contains("CRIUMFD"))
    };
    let deadline = Instant::now() + Duration::from_secs(2);
    while !remains() && Instant::now() < deadline && !processes_with(run, "dump").is_empty() {}
    send(criu, Signal::SIGKILL);
    client.wait().expect("the client ends");
    wait_until("the snapshot's end", || {
        place.text("err").lines().count() > words
    });
    if said(place, "may be damaged: CRIU was killed") > 0 {
        Fate::Doubtful
    } else if ends() > dead {
        Fate::Died
    } else {
        Fate::Untouched
    }
}

#[apply(as_root)]
fn job_damaged_by_a_killed_criu_is_restored() {
    let (place, mut run) = counting();
    place.snapshot();
    let restored = || said(&place, "restored image=");
    wait_until("a CRIU killed inside the job", || {
        let before = restored();
        let fate = kill_criu_inside_the_job(&place, &run);
        if fate != Fate::Untouched {
            let about = || format!("the restore after {fate:?}: {}", place.text("err"));
            wait_until_or(about, || restored() > before);
        }
        // The job may still die.
        wait_for_progress(&place);
        if fate != Fate::Doubtful {
            // Three deaths without a new image would end the run.
            snapshot_at_last(&place);
        }
        fate == Fate::Doubtful
    });
    assert_eq!(said(&place, "may be damaged: CRIU was killed"), 1);
    wait_for_progress(&place);
    place.snapshot();
    finish_counter(&place, &mut run);
}

/// Creates a job with remains of CRIU and without an image; `None` if CRIU was always too fast, or a process died.
fn with_remains_and_no_image() -> Option<(Place, Run)> {
    const TRIES: u32 = 10;
    for _ in 0..TRIES {
        let (place, run) = counting();
        let processes = descendants(run.pid());
        let all_live = || processes.iter().all(|pid| is_alive(*pid));
        while place.images().is_empty() {
            match kill_criu_inside_the_job(&place, &run) {
                Fate::Untouched => {}
                Fate::Doubtful if all_live() => return Some((place, run)),
                // Without its dead child the job waits for ever.
                Fate::Doubtful | Fate::Died => break,
            }
        }
    }
    None
}

#[apply(as_root)]
fn job_damaged_by_a_killed_criu_continues_without_image() {
    let Some((place, mut run)) = with_remains_and_no_image() else {
        skip("CRIU was too fast to be killed");
        return;
    };
    assert_eq!(
        said(&place, "may be damaged: CRIU was killed"),
        1,
        "{}",
        place.text("err")
    );
    wait_for_progress(&place);
    place.snapshot();
    crash_and_finish(&place, &mut run);
}

/// Creates a counting job with one image, and a second snapshot in which CRIU is stopped; returns also the client and
/// CRIU's pid.
fn with_a_stopped_dump() -> (Place, Run, Child, i32) {
    let (place, run) = counting_with(|command| {
        command.env("CKPT_RUN_SNAPSHOT_TIMEOUT", "4s");
    });
    place.snapshot();
    let client = begin_snapshot(&place);
    let criu = wait_for_criu(&run, "dump");
    send(criu, Signal::SIGSTOP);
    (place, run, client, criu)
}

#[apply(as_root)]
fn a_criu_that_is_stuck_in_a_dump_is_killed_after_the_timeout() {
    let (place, mut run, client, _criu) = with_a_stopped_dump();
    let output = client.wait_with_output().expect("the client ends");
    let text = stderr(&output);
    assert!(text.contains("snapshot.timeout"), "{text}");
    wait_for_progress(&place);
    place.snapshot();
    finish_counter(&place, &mut run);
}

#[apply(as_root)]
fn criu_hanging_after_its_dump_is_killed() {
    let stuck = "CRIU \"$@\"; code=$?\n\
        [ \"$1\" != dump ] || [ ! -e HERE/stuck ] || kill -STOP $$\n\
        exit $code";
    let (place, mut run) = counting_with(|command| {
        let criu = criu_script(command.get_current_dir().expect("a folder"), stuck);
        command.env("CKPT_RUN_CRIU_PATH", criu);
        command.env("CKPT_RUN_SNAPSHOT_TIMEOUT", "4s");
    });
    place.snapshot();
    fs::write(place.file("stuck"), "").expect("written");
    let refused = place.verb(&["snapshot"]);
    let text = stderr(&refused);
    assert!(text.contains("snapshot.timeout"), "{text}");
    assert!(said(&place, "kept the job frozen for") >= 1);
    fs::remove_file(place.file("stuck")).expect("removed");
    wait_for_progress(&place);
    place.snapshot();
    finish_counter(&place, &mut run);
}

#[apply(as_root)]
fn slow_dump_is_cancelled_and_the_job_continues() {
    let (place, mut run, client, criu) = with_a_stopped_dump();
    // CRIU is slow but not blocked; 10 s after its time limit it would be killed.
    thread::sleep(Duration::from_secs(6));
    send(criu, Signal::SIGCONT);
    let output = client.wait_with_output().expect("the client ends");
    let text = stderr(&output);
    assert!(text.contains("snapshot.timeout"), "{text}");
    wait_for_progress(&place);
    assert_eq!(said(&place, "may be damaged: CRIU was killed"), 0);
    assert_eq!(said(&place, "restoring"), 0);
    assert_eq!(place.images().len(), 1);
    place.snapshot();
    finish_counter(&place, &mut run);
}

#[apply(as_root)]
fn a_criu_killed_in_a_restore_spoils_no_image() {
    let (place, mut run) = counting();
    place.snapshot();
    wait_for_progress(&place);
    place.snapshot();
    wait_for_progress(&place);
    send(run.job(), Signal::SIGKILL);
    send(wait_for_criu(&run, "restore"), Signal::SIGKILL);
    // The same image is restored at the second attempt.
    wait_until("the second restore", || {
        said(&place, "restored image=000002") == 1
    });
    assert_eq!(said(&place, "CRIU was killed by signal 9"), 1);
    assert!(
        place
            .images()
            .iter()
            .all(|image| image["damaged"].is_null())
    );
    wait_for_progress(&place);
    finish_counter(&place, &mut run);
}

#[apply(as_root)]
fn criu_killed_in_each_restore_ends_the_run_with_125() {
    let (place, mut run) = counting();
    place.snapshot();
    wait_for_progress(&place);
    let written = counted(&place);
    send(run.job(), Signal::SIGKILL);
    for restores in 1..=2 {
        wait_until("the restore", || {
            said(&place, "restoring image=") == restores
        });
        send(wait_for_criu(&run, "restore"), Signal::SIGKILL);
    }
    assert_eq!(run.wait(), 125, "{}", place.text("err"));
    // The files are as at the image, so a later image contains everything.
    let kept = counted(&place);
    assert!(kept <= written, "{kept} lines of {written}");
    let mut again = place.start_with(&ON_REQUEST, &["python3", "-u", "job.py"], |_| {});
    wait_for_progress(&place);
    finish_counter(&place, &mut again);
}

/// CRIU substitute that prints its version, and fails otherwise like a program without its libraries.
const BROKEN_CRIU: &str = r#"#!/bin/sh
if [ "$1" = --version ]; then echo "Version: 4.2.1"; exit 0; fi
echo "criu: error while loading shared libraries: libnet.so.1" >&2
exit 127
"#;

#[apply(as_root)]
fn early_exit_of_criu_is_reported_with_its_output() {
    let (place, mut run) = counting_with(|command| {
        // Beside the job's script, which exists by now.
        let folder = command.get_current_dir().expect("a folder").to_owned();
        let broken = folder.join("broken-criu");
        write_script(&broken, BROKEN_CRIU);
        command.env("CKPT_RUN_CRIU_PATH", broken);
    });
    let refused = place.verb(&["snapshot"]);
    assert_eq!(refused.status.code(), Some(125));
    let text = stderr(&refused);
    assert!(
        text.contains("exit code 127 before it opened its log, and printed: criu: error while loading shared libraries: libnet.so.1; "),
        "{text}"
    );
    assert!(!text.contains("(log: "), "{text}");
    wait_for_progress(&place);
    finish_counter(&place, &mut run);
}
