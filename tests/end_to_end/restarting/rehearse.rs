//! Test of `ckpt-run rehearse`: a job that can be restored passes, another fails with the reason, and no files or
//! processes are left.

use std::fs;
use std::process::Output;

use nix::sys::signal::Signal;
use serde_json::Value;

use crate::harness::{
    Place, apply, as_root, as_root_and_user, code, descendants, is_dead, stderr, stdout, wait_until,
};

/// Options that skip the wait for the end of an endless job.
const ENDLESS: [&str; 2] = ["--end-within", "0s"];

/// Counts into a log and onto stdout, with a child, until it is killed.
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

/// Has state that CRIU would restore wrongly.
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

/// Returns the names in the folder except those that a test expects.
fn left(place: &Place, known: &[&str]) -> Vec<String> {
    let entries = fs::read_dir(place.path()).unwrap().flatten();
    let names = entries.map(|entry| entry.file_name().to_string_lossy().into_owned());
    names
        .filter(|name| !known.contains(&name.as_str()))
        .collect()
}

/// Returns the number of images of a rehearsal in a folder of this place.
fn images_beside(place: &Place) -> usize {
    let folders = fs::read_dir(place.path()).unwrap().flatten();
    let images = folders.filter_map(|folder| fs::read_dir(folder.path().join("store/images")).ok());
    let names = images.flatten().flatten().map(|entry| entry.file_name());
    names
        .filter(|name| name.to_string_lossy().ends_with(".manifest"))
        .count()
}

/// Returns the processes of the machine whose command line contains this path.
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
fn a_job_that_counts_passes_and_its_folder_is_untouched() {
    let place = Place::new();
    let work = place.file("work");
    fs::create_dir(&work).unwrap();
    // The job ends after its second snapshot.
    let counts = COUNT_ON.replace("while True", "while i < 200").replace(
        "time.sleep(0.02)",
        "time.sleep(0.05)\n    while i == 150 and not os.path.exists('../go'): pass",
    );
    fs::write(work.join("job.py"), counts).unwrap();
    let options = [
        "rehearse",
        "--json",
        "--end-within",
        "10m",
        "--store",
        "mine/store",
    ];
    let mut run = place.start_with(&options, &["python3", "-u", "job.py"], |command| {
        command.current_dir(&work);
    });
    wait_until("two images", || images_beside(&place) == 2);
    place.go();
    let exit_code = run.wait();
    let report: Value = serde_json::from_str(&place.text("out")).unwrap();
    assert_eq!(exit_code, 0, "{report:#}");
    assert_eq!(report["pass"], true);
    assert_eq!(report["verdict"], "PASS");
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
        "continues",
        "kill",
        "restore",
        "runs again",
        "again",
        "end",
        "first run",
        "second run",
        "output",
        "files",
    ];
    assert_eq!(names, expected, "{report:#}");
    assert!(
        steps.iter().all(|step| step["outcome"] == "ok"),
        "{report:#}"
    );
    let detail = |step: usize| steps[step]["detail"].as_str().unwrap();
    assert!(detail(1).contains("2 processes"), "{report:#}");
    let output_detail = detail(11);
    assert!(
        output_detail.starts_with("stdout: all 200 lines are equal, the snapshot at line ")
            && output_detail.ends_with("; stderr: empty"),
        "{output_detail}"
    );
    assert_eq!(detail(12), "all 2 files in the working folder are equal");
    let figures = &report["figures"];
    assert_eq!(figures["freeze_seconds"].as_array().unwrap().len(), 2);
    assert!(figures["restore_seconds"].as_f64().unwrap() > 0.0);
    assert!(figures["raw_bytes"].as_u64() > figures["stored_bytes"].as_u64());
    assert!(figures["interval_seconds"].as_u64().unwrap() >= 10);
    let said = place.text("err");
    assert!(
        said.starts_with("ckpt-run: rehearsal: this runs the job three times"),
        "{said}"
    );
    assert_eq!(said.lines().count(), 1, "{said}");
    assert_eq!(left(&place, &["work", "go", "out", "err"]), [""; 0]);
    assert_eq!(fs::read_dir(&work).unwrap().count(), 1, "the script alone");
}

#[apply(as_root)]
fn stderr_is_compared_like_stdout() {
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
    let options = [&["--json"], &ENDLESS[..]].concat();
    let output = rehearse(&place, &options, &count.replace("FORMAT", "f'step {i}'"));
    let same = report(&output);
    assert_eq!(code(output.status), 0, "{same:#}");
    for (stream, name) in ["stdout", "stderr"].into_iter().enumerate() {
        let compared = &same["output"][stream];
        assert_eq!(compared["stream"], name, "{same:#}");
        assert_eq!(compared["result"], "same", "{same:#}");
        assert!(compared["bytes"].as_u64().unwrap() > 2, "{same:#}");
    }
    assert_eq!(
        same["checked"][1],
        "files: not compared, because the job did not end by itself"
    );

    let timed = count.replace("FORMAT", "f'{time.time_ns()}'");
    let output = rehearse(&place, &options, &timed);
    let differs = report(&output);
    assert_eq!(code(output.status), 3, "{differs:#}");
    assert_eq!(differs["verdict"], "INCONCLUSIVE");
    assert_eq!(differs["pass"], false);
    let reason = differs["failure"]["reason"].as_str().unwrap();
    assert!(
        reason.contains("not deterministic") && reason.contains("stderr line 1: "),
        "{reason}"
    );
    assert_eq!(differs["output"][0]["result"], "same", "{differs:#}");
    assert_eq!(differs["output"][1]["result"], "differs", "{differs:#}");
}

#[apply(as_root)]
fn rehearsal_prints_a_line_per_step() {
    let place = Place::new();
    let output = rehearse(
        &place,
        &[&["--show-output", "--keep"], &ENDLESS[..]].concat(),
        COUNT_ON,
    );
    assert_eq!(code(output.status), 0, "{}", stdout(&output));
    let text = stdout(&output);
    for line in [
        "ok       machine ",
        "ok       snapshot ",
        "skipped  end ",
        "PASS: ",
        "  checked   stdout: equal up to line ",
        "  interval  --interval ",
    ] {
        assert!(text.contains(line), "{line}: {text}");
    }
    // The job writes a line's end separately, and may be killed before.
    let printed: Vec<String> = stderr(&output)
        .lines()
        .filter_map(|line| line.split("ckpt-run:").next())
        .filter(|number| !number.is_empty())
        .map(str::to_owned)
        .collect();
    let numbers: Vec<String> = (0..printed.len()).map(|i| i.to_string()).collect();
    assert!(printed.len() > 10 && printed == numbers, "{printed:?}");
    let kept = text
        .lines()
        .find_map(|line| line.strip_prefix("images and logs are kept in "))
        .unwrap();
    assert!(
        fs::read_dir(format!("{kept}/store/images"))
            .unwrap()
            .count()
            >= 2
    );
}

#[apply(as_root_and_user)]
fn rehearsal_fails_with_the_snapshots_reason() {
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
    assert!(text.contains("FAILED   snapshot "), "{text}");
    assert_eq!(left(&place, &["job.py"]), [""; 0]);

    let json = rehearse(&place, &["--json"], SEMAPHORE);
    assert_eq!(report(&json)["failure"]["kind"], "unsupported");
    assert_eq!(report(&json)["pass"], false);
}

#[apply(as_root_and_user)]
fn job_ending_at_once_gets_a_remedy() {
    let place = Place::new();
    // On a slow machine, a job could be snapshotted between its output and its end.
    let late = ["--after", "1h"];
    let quick = rehearse(&place, &late, "print('done')");
    assert_eq!(code(quick.status), 1);
    let text = stdout(&quick);
    assert!(
        text.contains("ended by itself (exit code 0) before it could be snapshotted"),
        "{text}"
    );
    assert!(
        text.contains("-> rehearse with more work for the job"),
        "{text}"
    );

    let broken = rehearse(&place, &late, "raise SystemExit('no data there')");
    assert_eq!(code(broken.status), 1);
    let text = stdout(&broken);
    assert!(
        text.contains(
            "(exit code 1) before it could be snapshotted; its last output: no data there"
        ),
        "{text}"
    );

    let missing = place.verb(&["rehearse", "--", "./no-such-program"]);
    assert_eq!(code(missing.status), 1);
    let text = stdout(&missing);
    assert!(text.contains("no-such-program"), "{text}");
    assert_eq!(left(&place, &["job.py"]), [""; 0]);
}

#[apply(as_root_and_user)]
fn a_job_that_does_not_live_after_its_restore_fails() {
    let place = Place::new();
    // Job that depends on its process's identity and exits if it changes.
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
    assert!(text.contains("FAILED   runs again "), "{text}");
    assert!(
        text.contains("(exit code 1) after its restore; its last output: lost the connection"),
        "{text}"
    );
}

#[test]
fn unsuitable_machine_is_reported_before_the_job_runs() {
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

#[apply(as_root_and_user)]
fn ended_rehearsal_leaves_no_processes() {
    for signal in [Signal::SIGINT, Signal::SIGTERM, Signal::SIGKILL] {
        let place = Place::new();
        fs::write(place.file("job.py"), COUNT_ON).unwrap();
        let job = place.file("job.py");
        let job = job.to_str().unwrap();
        let mut run = place.start(
            &["rehearse", "--after", "1h", "--show-output"],
            &["python3", "-u", job],
        );
        wait_until("the job counts", || place.text("err").contains("\n5\n"));
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
        assert_eq!(left(&place, &["job.py", "out", "err"]), [""; 0]);
        assert!(
            place
                .text("err")
                .contains("all files of the rehearsal were removed"),
            "{}",
            place.text("err")
        );
    }
}
