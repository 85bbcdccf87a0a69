//! Pauses: the job is stopped, continues, or is stopped or killed meanwhile.

use std::fs;

use nix::sys::signal::Signal;

use crate::harness::{
    ON_REQUEST, Place, Run, apply, as_root, as_root_and_user, code, descendants, state, stderr,
    stdout, wait_until,
};

/// Two processes that count, the child's numbers in a file; ends when the file `end` exists.
const COUNTERS: &str = r#"
import os, time
child = os.fork()
n = 0
while not os.path.exists("end"):
    n += 1
    if child == 0:
        open("child.new", "w").write(str(n)); os.rename("child.new", "child")
    else:
        print(n, flush=True)
    time.sleep(0.005)
if child:
    os.waitpid(child, 0)
    print("end", flush=True)
"#;

fn counting() -> (Place, Run) {
    let place = Place::new();
    let run = place.start_python(&ON_REQUEST, COUNTERS);
    place.wait_for("out", "\n3\n");
    wait_until("the child counts", || !place.text("child").is_empty());
    (place, run)
}

fn pause(place: &Place) -> String {
    let paused = place.verb(&["pause"]);
    assert_eq!(code(paused.status), 0, "{}", stderr(&paused));
    String::from_utf8(paused.stdout).unwrap().trim().to_owned()
}

/// Returns the states of the job's processes, from the kernel.
fn states(run: &Run) -> Vec<char> {
    let root = run.job();
    let mut pids = descendants(root);
    pids.push(root);
    pids.iter().map(|pid| state(*pid).unwrap_or('?')).collect()
}

fn numbers(place: &Place) -> Vec<u64> {
    let out = place.text("out");
    out.lines().filter_map(|line| line.parse().ok()).collect()
}

#[apply(as_root_and_user)]
fn paused_job_is_stopped_until_unpaused() {
    let (place, mut run) = counting();
    assert_eq!(pause(&place), "000001");
    // The kernel stops a task on its return to user mode.
    wait_until("every process is stopped", || states(&run) == ['T', 'T']);
    let before = (place.text("out"), place.text("child"));
    // The image already contains the stopped job.
    assert_eq!(place.snapshot(), "000001");
    assert_eq!(pause(&place), "000001");
    assert_eq!((place.text("out"), place.text("child")), before);

    let unpaused = place.verb(&["unpause", "--wait", "--json"]);
    assert_eq!(code(unpaused.status), 0, "{}", stderr(&unpaused));
    let answer: serde_json::Value = serde_json::from_slice(&unpaused.stdout).unwrap();
    assert_eq!(answer["unpaused"], true);
    wait_until("both go on", || {
        place.text("out") != before.0 && place.text("child") != before.1
    });
    assert_eq!(place.snapshot(), "000002");
    fs::write(place.file("end"), "").unwrap();
    assert_eq!(run.wait(), 0, "{}", place.text("err"));
    let numbers = numbers(&place);
    assert!(numbers.iter().copied().eq(1..=numbers.len() as u64));
}

#[apply(as_root_and_user)]
fn a_job_that_is_not_paused_cannot_be_unpaused() {
    let (place, _run) = counting();
    let unpaused = place.verb(&["unpause"]);
    assert_eq!(code(unpaused.status), 125);
    assert!(
        stderr(&unpaused).contains("not paused"),
        "{}",
        stderr(&unpaused)
    );
}

#[apply(as_root)]
fn stopped_paused_job_continues_when_rerun() {
    for signal in [Signal::SIGTERM, Signal::SIGUSR2, Signal::SIGINT] {
        let (place, mut run) = counting();
        pause(&place);
        run.signal(signal);
        assert_eq!(run.wait(), 75, "{}", place.text("err"));
        assert_eq!(place.images().len(), 1, "nothing has changed since");
        let counted = numbers(&place).len();
        let mut again = place.start_python(&ON_REQUEST, COUNTERS);
        wait_until("it goes on", || numbers(&place).len() > counted);
        fs::write(place.file("end"), "").unwrap();
        assert_eq!(again.wait(), 0, "{}", place.text("err"));
        let numbers = numbers(&place);
        assert!(numbers.iter().copied().eq(1..=numbers.len() as u64));
    }
}

#[apply(as_root_and_user)]
fn a_paused_job_that_is_killed_is_restored_when_it_is_unpaused() {
    let (place, mut run) = counting();
    let image = pause(&place);
    let (counted, job) = (numbers(&place).len(), run.job());
    run.crash();
    place.wait_for("err", "the paused job crashed");
    let status = place.verb(&["status", "--json"]);
    let status: serde_json::Value = serde_json::from_slice(&status.stdout).unwrap();
    assert_eq!(status["state"], "paused", "{status}");
    assert_eq!(pause(&place), image, "it is");
    assert_eq!(numbers(&place).len(), counted);
    let unpaused = place.verb(&["unpause"]);
    assert_eq!(code(unpaused.status), 0, "{}", stderr(&unpaused));
    assert_ne!(run.job(), job, "it was restored before the answer");
    wait_until("it goes on", || numbers(&place).len() > counted);
    fs::write(place.file("end"), "").unwrap();
    assert_eq!(run.wait(), 0, "{}", place.text("err"));
    let numbers = numbers(&place);
    assert!(numbers.iter().copied().eq(1..=numbers.len() as u64));
}

#[apply(as_root_and_user)]
fn a_paused_job_that_is_killed_can_be_stopped_or_the_run_ended() {
    for by_signal in [false, true] {
        let (place, mut run) = counting();
        let image = pause(&place);
        run.crash();
        place.wait_for("err", "the paused job crashed");
        if by_signal {
            run.signal(Signal::SIGTERM);
        } else {
            let stopped = place.verb(&["stop"]);
            assert_eq!(stdout(&stopped).trim(), image);
        }
        assert_eq!(run.wait(), 75, "{}", place.text("err"));
        assert_eq!(place.images().len(), 1);
    }
}
