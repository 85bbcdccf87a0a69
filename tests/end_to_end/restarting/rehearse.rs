//! `ckpt-run rehearse`: a job that can be kept alive passes, one that cannot fails with the reason, and nothing is left.

use std::fs;
use std::process::Output;

use nix::sys::signal::Signal;
use serde_json::Value;

use crate::harness::{
    Place, apply, as_root, code, descendants, is_dead, stderr, stdout, wait_until,
};

/// Counts into a log and onto stdout, with a child, until it is ended.
const COUNT_ON: &str = r#"
import os, time
if os.fork() == 0:
    time.sleep(10000)
log = open("log", "w")
i = 0
while True:
    print(i, flush=True)
    log.write(f"{i}\n"); log.flush()
    i += 1
    time.sleep(0.02)
"#;

/// Has what CRIU would restore wrongly.
const SEMAPHORE: &str = r#"
import os, time
fd = os.eventfd(3, os.EFD_SEMAPHORE)
print("ready", flush=True)
while True:
    time.sleep(0.02)
"#;

fn rehearse(place: &Place, options: &[&str], script: &str) -> Output {
    fs::write(place.file("job.py"), script).unwrap();
    let job = ["--", "python3", "-u", "job.py"];
    place.verb(&[&["rehearse"], options, &job].concat())
}

fn report(output: &Output) -> Value {
    serde_json::from_slice(&output.stdout)
        .unwrap_or_else(|error| panic!("{error}: {} {}", stdout(output), stderr(output)))
}

/// Names in the folder but for those that a test knows of.
fn left(place: &Place, known: &[&str]) -> Vec<String> {
    let entries = fs::read_dir(place.path()).unwrap().flatten();
    let names = entries.map(|entry| entry.file_name().to_string_lossy().into_owned());
    names
        .filter(|name| !known.contains(&name.as_str()))
        .collect()
}

/// Processes of the machine whose command line holds this path.
fn with_path(path: &str) -> Vec<i32> {
    let processes = fs::read_dir("/proc").unwrap().flatten();
    let pids = processes.filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
    pids.filter(|pid| {
        let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        String::from_utf8_lossy(&line).contains(path) && !is_dead(*pid)
    })
    .collect()
}

#[apply(as_root)]
fn a_job_that_counts_passes_and_nothing_is_left_but_its_own_files() {
    let place = Place::new();
    let output = rehearse(&place, &["--json", "--store", "mine/store"], COUNT_ON);
    let report = report(&output);
    assert_eq!(code(output.status), 0, "{report:#}");
    assert_eq!(report["pass"], true);
    assert_eq!(report["failure"], Value::Null);
    let steps = report["steps"].as_array().unwrap();
    let names: Vec<&str> = steps
        .iter()
        .filter_map(|step| step["name"].as_str())
        .collect();
    let expected = [
        "machine",
        "start",
        "snapshot",
        "goes on",
        "kill",
        "restore",
        "comes back",
        "output",
        "files",
        "again",
    ];
    assert_eq!(names, expected, "{report:#}");
    assert!(
        steps.iter().all(|step| step["outcome"] == "ok"),
        "{report:#}"
    );
    assert!(
        steps[1]["detail"].as_str().unwrap().contains("2 processes"),
        "{report:#}"
    );
    assert!(
        steps[7]["detail"].as_str().unwrap().contains("the same"),
        "{report:#}"
    );
    assert_eq!(
        steps[7]["detail"].as_str().unwrap().split_once("; "),
        Some((
            format!(
                "stdout: the {} bytes since the snapshot came again, the same",
                report["output"][0]["bytes"]
            )
            .as_str(),
            "stderr: nothing to compare"
        )),
    );
    let figures = &report["figures"];
    assert_eq!(figures["freeze_seconds"].as_array().unwrap().len(), 2);
    assert!(figures["restore_seconds"].as_f64().unwrap() > 0.0);
    assert!(figures["raw_bytes"].as_u64() > figures["stored_bytes"].as_u64());
    assert!(figures["interval_seconds"].as_u64().unwrap() >= 10);
    let said = stderr(&output);
    assert!(
        said.starts_with("ckpt-run: rehearsal: the job really runs"),
        "{said}"
    );
    assert_eq!(said.lines().count(), 1, "{said}");
    assert_eq!(left(&place, &["job.py", "log"]), [""; 0]);
    let log = place.text("log");
    let numbers: Vec<String> = (0..log.lines().count()).map(|i| i.to_string()).collect();
    assert_eq!(
        log.lines().collect::<Vec<_>>(),
        numbers,
        "neither a gap nor a repetition"
    );
}

#[apply(as_root)]
fn what_the_job_says_on_stderr_is_compared_as_what_it_prints() {
    let count = r"
import sys, time
i = 0
while True:
    print(i, flush=True)
    print(FORMAT, file=sys.stderr, flush=True)
    i += 1
    time.sleep(0.02)
";
    let place = Place::new();
    let output = rehearse(&place, &["--json"], &count.replace("FORMAT", "f'step {i}'"));
    let same = report(&output);
    assert_eq!(code(output.status), 0, "{same:#}");
    for (stream, name) in ["stdout", "stderr"].into_iter().enumerate() {
        let compared = &same["output"][stream];
        assert_eq!(compared["stream"], name, "{same:#}");
        assert_eq!(compared["result"], "same", "{same:#}");
        assert!(compared["bytes"].as_u64().unwrap() > 2, "{same:#}");
    }
    assert_eq!(same["steps"][7]["outcome"], "ok", "{same:#}");

    let timed = count.replace("FORMAT", "f'{time.time_ns()}'");
    let output = rehearse(&place, &["--json"], &timed);
    let differs = report(&output);
    assert_eq!(code(output.status), 0, "{differs:#}");
    let step = &differs["steps"][7];
    assert_eq!(step["outcome"], "note", "{differs:#}");
    let detail = step["detail"].as_str().unwrap();
    assert!(
        detail.contains(
            "the same; stderr: what came since the snapshot came again, but not the same"
        ),
        "{detail}"
    );
    assert_eq!(differs["output"][0]["result"], "same", "{differs:#}");
    assert_eq!(differs["output"][1]["result"], "differs", "{differs:#}");
}

#[apply(as_root)]
fn in_words_each_step_is_a_line_and_what_the_job_prints_is_on_stderr_if_wanted() {
    let place = Place::new();
    let output = rehearse(&place, &["--show-output", "--keep"], COUNT_ON);
    assert_eq!(code(output.status), 0, "{}", stdout(&output));
    let text = stdout(&output);
    for line in [
        "ok      machine ",
        "ok      snapshot ",
        "PASS: ",
        "  interval  --interval ",
    ] {
        assert!(text.contains(line), "{line}: {text}");
    }
    let printed: Vec<String> = stderr(&output)
        .lines()
        .filter(|line| !line.starts_with("ckpt-run:"))
        .map(str::to_owned)
        .collect();
    let numbers: Vec<String> = (0..printed.len()).map(|i| i.to_string()).collect();
    assert!(printed.len() > 10 && printed == numbers, "{printed:?}");
    let kept = text
        .lines()
        .find_map(|line| line.strip_prefix("kept in "))
        .unwrap();
    assert!(
        fs::read_dir(format!("{kept}/store/images"))
            .unwrap()
            .count()
            >= 2
    );
}

#[apply(as_root)]
fn a_job_that_cannot_be_snapshotted_fails_with_the_reason_and_leaves_nothing() {
    let place = Place::new();
    let output = rehearse(&place, &[], SEMAPHORE);
    assert_eq!(code(output.status), 1);
    let text = stdout(&output);
    let verdict = text
        .lines()
        .find(|line| line.starts_with("FAIL: "))
        .unwrap();
    assert!(verdict.contains("EFD_SEMAPHORE"), "{text}");
    assert!(text.lines().last().unwrap().starts_with("  -> "), "{text}");
    assert!(text.contains("FAILED  snapshot "), "{text}");
    assert_eq!(left(&place, &["job.py"]), [""; 0]);

    let json = rehearse(&place, &["--json"], SEMAPHORE);
    assert_eq!(report(&json)["failure"]["kind"], "unsupported");
    assert_eq!(report(&json)["pass"], false);
}

#[apply(as_root)]
fn a_job_that_ends_at_once_is_said_to_need_more_to_do_or_a_look() {
    let place = Place::new();
    let quick = rehearse(&place, &[], "print('done')");
    assert_eq!(code(quick.status), 1);
    let text = stdout(&quick);
    assert!(
        text.contains("ended by itself (exit code 0) before it could be snapshotted"),
        "{text}"
    );
    assert!(
        text.contains("-> rehearse with more for the job to do"),
        "{text}"
    );

    let broken = rehearse(&place, &[], "raise SystemExit('no data there')");
    assert_eq!(code(broken.status), 1);
    let text = stdout(&broken);
    assert!(
        text.contains(
            "(exit code 1) before it could be snapshotted; the last it said: no data there"
        ),
        "{text}"
    );

    let missing = place.verb(&["rehearse", "--", "./no-such-program"]);
    assert_eq!(code(missing.status), 1);
    let text = stdout(&missing);
    assert!(text.contains("no-such-program"), "{text}");
    assert_eq!(left(&place, &["job.py"]), [""; 0]);
}

#[apply(as_root)]
fn a_job_that_does_not_live_after_its_restore_fails() {
    let place = Place::new();
    // What a program may do that knows its machine: it gives up when its process is another one.
    let script = r#"
import sys, time
def started():
    return open("/proc/self/stat").read().rsplit(")", 1)[1].split()[19]
first = started()
print("ready", flush=True)
while started() == first:
    time.sleep(0.02)
sys.exit("lost the connection")
"#;
    let output = rehearse(&place, &[], script);
    assert_eq!(code(output.status), 1, "{}", stdout(&output));
    let text = stdout(&output);
    assert!(text.contains("FAILED  comes back "), "{text}");
    assert!(
        text.contains("(exit code 1) after its restore; the last it said: lost the connection"),
        "{text}"
    );
}

#[test]
fn a_machine_that_cannot_do_it_is_told_before_anything_runs() {
    let place = Place::new();
    let line = ["rehearse", "--criu", "/no/such/criu", "--", "touch", "ran"];
    let output = place.verb(&line);
    assert_eq!(code(output.status), 1);
    let text = stdout(&output);
    assert!(
        text.contains("FAIL: ") && text.contains("/no/such/criu"),
        "{text}"
    );
    assert_eq!(left(&place, &[]), [""; 0]);
}

#[apply(as_root)]
fn a_rehearsal_that_is_interrupted_or_killed_leaves_no_process_and_interrupted_no_file() {
    for signal in [Signal::SIGINT, Signal::SIGTERM, Signal::SIGKILL] {
        let place = Place::new();
        fs::write(place.file("job.py"), COUNT_ON).unwrap();
        let job = place.file("job.py");
        let job = job.to_str().unwrap();
        let mut run = place.start(&["rehearse", "--after", "1h"], &["python3", "-u", job]);
        wait_until("the job counts", || place.text("log").contains("5\n"));
        let processes = descendants(run.pid());
        assert!(processes.len() > 3, "{processes:?}");
        run.signal(signal);
        assert_eq!(run.wait(), 128 + signal as i32, "{}", place.text("err"));
        if signal == Signal::SIGKILL {
            wait_until("all of it is gone", || with_path(job).is_empty());
            continue;
        }
        assert!(processes.iter().all(|pid| is_dead(*pid)));
        assert_eq!(with_path(job), [0; 0]);
        assert_eq!(left(&place, &["job.py", "log", "out", "err"]), [""; 0]);
        assert!(
            place
                .text("err")
                .contains("nothing of the rehearsal is left"),
            "{}",
            place.text("err")
        );
    }
}
