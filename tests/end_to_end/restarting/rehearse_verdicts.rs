//! Verdicts of `ckpt-run rehearse`: PASS, FAIL and INCONCLUSIVE, each for a suitable job.

use std::fs;
use std::path::PathBuf;
use std::process::{Output, Stdio};

use serde_json::Value;

use crate::harness::{Place, apply, as_root, code, stderr, stdout, wait_until};

/// The Python module of jobs.
const MODULE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/python");
/// Options that skip the wait for the end of an endless job.
const ENDLESS: [&str; 3] = ["--json", "--end-within", "0s"];
/// Options that wait for the end of a job, which the test triggers.
const ENDING: [&str; 2] = ["--end-within", "10m"];

/// Makes the job slow until the restored one has been snapshotted, and fast afterwards, without effect on its results.
const PACE: &str = r#"
import ckpt_run, hashlib, json, os, random, sys, time
work, outside = sys.argv[1:]
def pace(i):
    while not os.path.exists(outside + "/go"):
        time.sleep(0.05)
        if i < 100: return
"#;

/// Reads its state from a file and writes it back, with the file closed in between, as simulators with restart files
/// do. No snapshot finds the file open.
const CLOSED_STATE: &str = r#"
for i in range(STEPS):
    with ckpt_run.postpone():
        s = json.load(open("state")) if os.path.exists("state") else {"n": 0, "h": "x"}
        s = {"n": s["n"] + 1, "h": hashlib.sha256((s["h"] + str(i)).encode()).hexdigest()}
        # By one write, so that a kill never leaves a part of it.
        f = os.open("state", os.O_WRONLY | os.O_CREAT)
        os.write(f, json.dumps(s).ljust(120).encode()); os.close(f)
    print(i, s["n"], s["h"][:16], flush=True)
    pace(i)
"#;

/// Returns the same job without an end.
fn endless_closed_state() -> String {
    let endless = CLOSED_STATE.replace("STEPS", "10**9");
    endless.replace("pace(i)", "time.sleep(0.05)")
}

/// Counts to 200.
const COUNT: &str = "
for i in range(200):
    print(i, flush=True)
    pace(i)
";

struct Rehearsal {
    place: Place,
    settings: Vec<(&'static str, &'static str)>,
}

impl Rehearsal {
    fn new(script: &str) -> Self {
        let place = Place::new();
        fs::create_dir(place.file("work")).unwrap();
        fs::write(place.file("work/job.py"), format!("{PACE}\n{script}")).unwrap();
        Self {
            place,
            settings: vec![("PYTHONPATH", MODULE)],
        }
    }

    /// Returns the user's working folder, as the job sees it.
    fn work(&self) -> PathBuf {
        self.place.file("work").canonicalize().unwrap()
    }

    fn job(&self) -> Vec<String> {
        let outside = self.place.path().to_str().unwrap();
        let work = self.work();
        let words = ["python3", "-u", "job.py", work.to_str().unwrap(), outside];
        words.map(str::to_owned).to_vec()
    }

    /// Rehearses an endless job; returns exit code and report.
    fn endless(&self, options: &[&str]) -> (i32, Value) {
        let output: Output = self
            .place
            .command(&[&["rehearse"], &ENDLESS[..], options, &["--"]].concat())
            .args(self.job())
            .current_dir(self.work())
            .envs(self.settings.iter().copied())
            .stdin(Stdio::null())
            .output()
            .unwrap();
        let report = serde_json::from_slice(&output.stdout)
            .unwrap_or_else(|error| panic!("{error}: {} {}", stdout(&output), stderr(&output)));
        (code(output.status), report)
    }

    /// Rehearses a job that ends after its second snapshot; returns exit code and printed report.
    fn to_the_end(&self) -> (i32, String) {
        let job = self.job();
        let job: Vec<&str> = job.iter().map(String::as_str).collect();
        let options = [&["rehearse"], &ENDING[..]].concat();
        let mut run = self.place.start_with(&options, &job, |command| {
            command
                .current_dir(self.work())
                .envs(self.settings.iter().copied());
        });
        wait_until("the second snapshot", || {
            let said = self.place.text("out");
            said.contains(" again ") || said.contains("  -> ")
        });
        self.place.go();
        (run.wait(), self.place.text("out") + &self.place.text("err"))
    }

    /// Returns unexpected names in the test's folder and in the working folder.
    fn left(&self) -> Vec<String> {
        let folders = [self.place.path().to_owned(), self.work()];
        let entries = folders
            .iter()
            .flat_map(|folder| fs::read_dir(folder).unwrap().flatten());
        let names = entries.map(|entry| entry.file_name().to_string_lossy().into_owned());
        let known = ["job.py", "work", "go", "out", "err"];
        names
            .filter(|name| !known.contains(&name.as_str()))
            .collect()
    }
}

fn reason(report: &Value) -> &str {
    report["failure"]["reason"].as_str().unwrap_or_default()
}

/// Checks the verdict, and that its reason contains these words.
fn assert_told(rehearsed: &(i32, String), code: i32, verdict: &str, words: &[&str]) {
    let (found, text) = rehearsed;
    let line = text.lines().find(|line| line.starts_with(verdict));
    assert!(*found == code && line.is_some(), "{found}: {text}");
    for word in words {
        assert!(text.contains(word), "{word}: {text}");
    }
}

#[apply(as_root)]
fn a_job_with_its_state_in_a_closed_file_passes() {
    let rehearsal = Rehearsal::new(&CLOSED_STATE.replace("STEPS", "200"));
    let rehearsed = rehearsal.to_the_end();
    let words = [
        "checked   stdout: all 200 lines are equal",
        "checked   files: all 2 files in the working folder are equal",
        "checked   exit code: 0",
    ];
    assert_told(&rehearsed, 0, "PASS: ", &words);
    assert_eq!(rehearsal.left(), [""; 0]);
}

#[apply(as_root)]
fn file_missing_in_the_image_fails_with_name_and_setting() {
    let mut rehearsal = Rehearsal::new(&endless_closed_state());
    rehearsal
        .settings
        .push(("CKPT_RUN_FILES_KEEP_CONTENT", "0B"));
    let (code, report) = rehearsal.endless(&[]);
    assert_eq!(
        (code, &report["verdict"]),
        (1, &"FAIL".into()),
        "{report:#}"
    );
    let state = rehearsal.work().join("state");
    assert!(!state.exists(), "the user's folder is untouched");
    let state = state.to_str().unwrap();
    assert!(reason(&report).contains(state), "{report:#}");
    let remedy = report["failure"]["remedy"].as_str().unwrap();
    assert_eq!(remedy, "set files.keep_content to \"1KiB\" or more");
    assert_eq!(report["not_kept"][0]["path"], state);
}

#[apply(as_root)]
fn wrongly_restored_job_fails_with_the_line() {
    let mut rehearsal = Rehearsal::new(&endless_closed_state());
    rehearsal.settings.extend([
        ("CKPT_RUN_FILES_KEEP_CONTENT", "0B"),
        ("CKPT_RUN_FILES_ON_LOST", "warn"),
    ]);
    let (code, report) = rehearsal.endless(&[]);
    assert_eq!(
        (code, &report["verdict"]),
        (1, &"FAIL".into()),
        "{report:#}"
    );
    let differs = "differs from two uninterrupted ones: stdout line ";
    assert!(reason(&report).contains(differs), "{report:#}");
    assert!(reason(&report).contains("files.keep_content"), "{report:#}");
    assert_eq!(report["output"][0]["result"], "differs");
}

#[apply(as_root)]
fn a_wrong_file_of_a_restored_job_fails_by_name() {
    // A restored process has a different start time.
    let script = format!(
        "
def started(): return open('/proc/self/stat').read().split()[21]
first = started()
{COUNT}
open('result', 'w').write('right' if started() == first else 'wrong')
"
    );
    let rehearsed = Rehearsal::new(&script).to_the_end();
    assert_told(
        &rehearsed,
        1,
        "FAIL: ",
        &["ones: result has different content"],
    );
}

#[apply(as_root)]
fn random_output_is_inconclusive_by_line() {
    let random = "
while True:
    print(random.random(), flush=True)
    time.sleep(0.02)
";
    let (code, report) = Rehearsal::new(random).endless(&[]);
    let verdict = (code, &report["verdict"]);
    assert_eq!(verdict, (3, &"INCONCLUSIVE".into()), "{report:#}");
    assert!(reason(&report).contains("stdout line 1: "), "{report:#}");
}

#[apply(as_root)]
fn a_random_file_is_inconclusive_by_name() {
    let script = format!("{COUNT}\nopen('result', 'w').write(str(random.random()))");
    let rehearsed = Rehearsal::new(&script).to_the_end();
    let words = ["not deterministic", "result has different content"];
    assert_told(&rehearsed, 3, "INCONCLUSIVE: ", &words);
}

#[apply(as_root)]
fn a_job_that_neither_ends_nor_prints_is_inconclusive() {
    let rehearsal = Rehearsal::new("while True: pass");
    let (code, report) = rehearsal.endless(&["--seconds", "1"]);
    let verdict = (code, &report["verdict"]);
    assert_eq!(verdict, (3, &"INCONCLUSIVE".into()), "{report:#}");
    assert!(reason(&report).contains("printed nothing"), "{report:#}");
}

#[apply(as_root)]
fn an_unkept_file_that_stays_as_it_is_is_inconclusive() {
    let mut rehearsal = Rehearsal::new(&format!("open('once', 'w').write('text')\n{COUNT}"));
    rehearsal
        .settings
        .push(("CKPT_RUN_FILES_KEEP_CONTENT", "0B"));
    let rehearsed = rehearsal.to_the_end();
    let words = [
        "/work/once (4 B: beyond files.keep_content",
        "-> set files.keep_content to ",
    ];
    assert_told(&rehearsed, 3, "INCONCLUSIVE: ", &words);
}

#[apply(as_root)]
fn absolute_paths_into_the_folder_lead_into_the_copy() {
    let script = r"
assert os.listdir('.') == ['job.py'], os.listdir('.')
log = open(work + '/log', 'w')
for i in range(200):
    print(i, flush=True)
    log.write(f'{i}\n'); log.flush()
    with open(work + '/state', 'w') as state: state.write(str(i))
    pace(i)
";
    let rehearsal = Rehearsal::new(script);
    let rehearsed = rehearsal.to_the_end();
    let words = ["files: all 3 files in the working folder are equal"];
    assert_told(&rehearsed, 0, "PASS: ", &words);
    assert_eq!(rehearsal.left(), [""; 0]);
}

#[apply(as_root)]
fn difference_due_to_files_elsewhere_is_inconclusive() {
    let script = format!(
        "{COUNT}
done = outside + '/done'
print(os.path.exists(done))
open(done, 'w').write('yes')
"
    );
    let rehearsed = Rehearsal::new(&script).to_the_end();
    assert_told(
        &rehearsed,
        3,
        "INCONCLUSIVE: ",
        &["/done): stdout line 201"],
    );
}

#[apply(as_root)]
fn a_folder_that_is_too_large_is_inconclusive() {
    let rehearsal = Rehearsal::new("while True: print('a', flush=True); time.sleep(0.02)");
    fs::create_dir(rehearsal.place.file("work/data")).unwrap();
    for number in 0..20_001 {
        fs::File::create(rehearsal.work().join(format!("data/{number}"))).unwrap();
    }
    let (code, report) = rehearsal.endless(&[]);
    let verdict = (code, &report["verdict"]);
    assert_eq!(verdict, (3, &"INCONCLUSIVE".into()), "{report:#}");
    let limit = "more than 1.0 GiB or 20000 files";
    assert!(reason(&report).contains(limit), "{report:#}");
    assert_eq!(
        report["output"],
        Value::Array(Vec::new()),
        "nothing was compared"
    );
}

#[apply(as_root)]
fn a_report_into_the_folder_itself_is_no_difference() {
    let place = Place::new();
    let counts = "import time\nwhile True: print('a', flush=True); time.sleep(0.02)";
    fs::write(place.file("job.py"), counts).unwrap();
    let job = ["python3", "-u", "job.py"];
    let mut run = place.start(&["rehearse", "--end-within", "0s"], &job);
    assert_eq!(run.wait(), 0, "{} {}", place.text("out"), place.text("err"));
}

#[apply(as_root)]
fn a_folder_that_changes_during_the_rehearsal_is_inconclusive() {
    let rehearsal = Rehearsal::new(COUNT);
    let edit = rehearsal.work().join("edited");
    fs::write(&edit, "1").unwrap();
    let changed = std::thread::scope(|scope| {
        scope.spawn(|| {
            rehearsal.place.wait_for("out", " start ");
            fs::write(&edit, "2").unwrap();
        });
        rehearsal.to_the_end()
    });
    let reason = "INCONCLUSIVE: the working folder changed during the rehearsal: edited has";
    assert_told(&changed, 3, reason, &[]);
}
