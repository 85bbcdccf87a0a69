//! Verdicts of `ckpt-run rehearse`: PASS, FAIL and INCONCLUSIVE, each for a job that deserves it.

use std::fs;
use std::process::{Output, Stdio};

use serde_json::Value;

use crate::harness::{Place, apply, as_root, code, stderr, stdout};

/// Reads its state from a file and writes it back, closed between, as simulators with restart files do.
const CLOSED_STATE: &str = r#"
import hashlib, json, os, time
for i in range(240):
    s = json.load(open("state")) if os.path.exists("state") else {"n": 0, "h": "x"}
    s = {"n": s["n"] + 1, "h": hashlib.sha256((s["h"] + str(i)).encode()).hexdigest()}
    with open("state", "w") as f: json.dump(s, f)
    print(i, s["n"], s["h"][:16], flush=True)
    time.sleep(0.015)
"#;

/// Counts for some seconds; then `LAST` runs.
const COUNT: &str = r"
import os, random, time
for i in range(200):
    print(i, flush=True)
    time.sleep(0.015)
LAST
";

struct Rehearsal {
    place: Place,
    outer: Place,
    options: Vec<&'static str>,
    settings: Vec<(&'static str, &'static str)>,
}

impl Rehearsal {
    fn new() -> Self {
        Self {
            place: Place::new(),
            outer: Place::new(),
            options: vec!["--json"],
            settings: Vec::new(),
        }
    }

    fn run(&self, script: &str) -> (i32, Value) {
        fs::write(self.place.file("job.py"), script).unwrap();
        let folder = self.place.path().to_str().unwrap();
        let outside = self.outer.path().to_str().unwrap();
        let job = ["--", "python3", "-u", "job.py", folder, outside];
        let arguments = [&["rehearse"], &self.options[..], &job].concat();
        let output: Output = self
            .place
            .command(&arguments)
            .envs(self.settings.iter().copied())
            .stdin(Stdio::null())
            .output()
            .unwrap();
        let report = serde_json::from_slice(&output.stdout)
            .unwrap_or_else(|error| panic!("{error}: {} {}", stdout(&output), stderr(&output)));
        (code(output.status), report)
    }

    /// Names in the user's folder beside the script.
    fn left(&self) -> Vec<String> {
        let entries = fs::read_dir(self.place.path()).unwrap().flatten();
        let names = entries.map(|entry| entry.file_name().to_string_lossy().into_owned());
        names.filter(|name| name != "job.py").collect()
    }
}

fn reason(report: &Value) -> &str {
    report["failure"]["reason"].as_str().unwrap_or_default()
}

#[apply(as_root)]
fn a_job_with_its_state_in_a_closed_file_passes() {
    let rehearsal = Rehearsal::new();
    let (code, report) = rehearsal.run(CLOSED_STATE);
    assert_eq!(
        (code, &report["verdict"]),
        (0, &"PASS".into()),
        "{report:#}"
    );
    assert_eq!(
        report["checked"][1],
        "files: all 2 files in the working folder are equal"
    );
    assert_eq!(rehearsal.left(), [""; 0]);
}

#[apply(as_root)]
fn a_file_that_the_image_does_not_keep_fails_by_name_and_setting() {
    let mut rehearsal = Rehearsal::new();
    rehearsal.settings = vec![("CKPT_RUN_FILES_KEEP_CONTENT", "0B")];
    let (code, report) = rehearsal.run(CLOSED_STATE);
    assert_eq!(
        (code, &report["verdict"]),
        (1, &"FAIL".into()),
        "{report:#}"
    );
    let state = rehearsal.place.file("state").canonicalize();
    assert!(state.is_err(), "the user's folder is untouched");
    let state = rehearsal.place.path().canonicalize().unwrap().join("state");
    assert!(
        reason(&report).contains(state.to_str().unwrap()),
        "{report:#}"
    );
    let remedy = report["failure"]["remedy"].as_str().unwrap();
    assert_eq!(remedy, "set files.keep_content to \"1KiB\" or more");
    assert_eq!(report["not_kept"][0]["path"], state.to_str().unwrap());
}

#[apply(as_root)]
fn a_job_that_comes_back_wrong_fails_with_the_line() {
    let mut rehearsal = Rehearsal::new();
    rehearsal.settings = vec![
        ("CKPT_RUN_FILES_KEEP_CONTENT", "0B"),
        ("CKPT_RUN_FILES_ON_LOST", "warn"),
    ];
    let (code, report) = rehearsal.run(CLOSED_STATE);
    assert_eq!(
        (code, &report["verdict"]),
        (1, &"FAIL".into()),
        "{report:#}"
    );
    assert!(
        reason(&report).contains("differs from two uninterrupted ones: stdout line "),
        "{report:#}"
    );
    assert!(reason(&report).contains("files.keep_content"), "{report:#}");
    assert_eq!(report["output"][0]["result"], "differs");
}

#[apply(as_root)]
fn a_wrong_file_of_a_restored_job_fails_by_name() {
    let script = COUNT
        .replace("import os", "import os\ndef started(): return open('/proc/self/stat').read().split()[21]\nfirst = started()\nimport os")
        .replace("LAST", "open('result', 'w').write('right' if started() == first else 'wrong')");
    let (code, report) = Rehearsal::new().run(&script);
    assert_eq!(
        (code, &report["verdict"]),
        (1, &"FAIL".into()),
        "{report:#}"
    );
    assert!(
        reason(&report).ends_with("result has other content"),
        "{report:#}"
    );
}

#[apply(as_root)]
fn random_output_is_inconclusive_by_line() {
    let random = "
import random, time
while True:
    print(random.random(), flush=True)
    time.sleep(0.02)
";
    let mut rehearsal = Rehearsal::new();
    rehearsal.options.extend(["--end-within", "0s"]);
    let (code, report) = rehearsal.run(random);
    assert_eq!(
        (code, &report["verdict"]),
        (3, &"INCONCLUSIVE".into()),
        "{report:#}"
    );
    assert!(reason(&report).contains("stdout line 1: "), "{report:#}");
}

#[apply(as_root)]
fn a_random_file_is_inconclusive_by_name() {
    let (code, report) = Rehearsal::new()
        .run(&COUNT.replace("LAST", "open('result', 'w').write(str(random.random()))"));
    assert_eq!(
        (code, &report["verdict"]),
        (3, &"INCONCLUSIVE".into()),
        "{report:#}"
    );
    assert!(
        reason(&report).ends_with("result has other content"),
        "{report:#}"
    );
    assert_eq!(report["output"][0]["result"], "same");
}

#[apply(as_root)]
fn a_job_that_neither_ends_nor_prints_is_inconclusive() {
    let mut rehearsal = Rehearsal::new();
    rehearsal
        .options
        .extend(["--end-within", "0s", "--seconds", "1"]);
    let (code, report) = rehearsal.run("while True: pass");
    assert_eq!(
        (code, &report["verdict"]),
        (3, &"INCONCLUSIVE".into()),
        "{report:#}"
    );
    assert!(reason(&report).contains("printed nothing"), "{report:#}");
}

#[apply(as_root)]
fn an_unkept_file_that_stays_as_it_is_is_inconclusive() {
    let mut rehearsal = Rehearsal::new();
    rehearsal.settings = vec![("CKPT_RUN_FILES_KEEP_CONTENT", "0B")];
    let script = format!(
        "open('once', 'w').write('text')\n{}",
        COUNT.replace("LAST", "")
    );
    let (code, report) = rehearsal.run(&script);
    assert_eq!(
        (code, &report["verdict"]),
        (3, &"INCONCLUSIVE".into()),
        "{report:#}"
    );
    assert!(reason(&report).contains("/once ("), "{report:#}");
    assert!(
        report["failure"]["remedy"]
            .as_str()
            .unwrap()
            .contains("files.keep_content")
    );
}

#[apply(as_root)]
fn absolute_paths_into_the_folder_lead_into_the_copy() {
    let script = r"
import os, sys, time
assert os.listdir('.') == ['job.py'], os.listdir('.')
log = open(sys.argv[1] + '/log', 'w')
for i in range(200):
    print(i, flush=True)
    log.write(f'{i}\n'); log.flush()
    with open(sys.argv[1] + '/state', 'w') as state: state.write(str(i))
    time.sleep(0.015)
";
    let rehearsal = Rehearsal::new();
    let (code, report) = rehearsal.run(script);
    assert_eq!(
        (code, &report["verdict"]),
        (0, &"PASS".into()),
        "{report:#}"
    );
    assert_eq!(
        report["checked"][1],
        "files: all 3 files in the working folder are equal"
    );
    assert_eq!(rehearsal.left(), [""; 0]);
}

#[apply(as_root)]
fn a_difference_that_files_elsewhere_may_explain_is_inconclusive() {
    let script = r"
import os, sys, time
for i in range(200):
    print(i, flush=True)
    time.sleep(0.015)
done = sys.argv[2] + '/done'
print(os.path.exists(done))
open(done, 'w').write('yes')
";
    let (code, report) = Rehearsal::new().run(script);
    assert_eq!(
        (code, &report["verdict"]),
        (3, &"INCONCLUSIVE".into()),
        "{report:#}"
    );
    assert!(
        reason(&report).contains("/done): stdout line 201"),
        "{report:#}"
    );
}

#[apply(as_root)]
fn a_folder_that_is_too_large_is_inconclusive() {
    let rehearsal = Rehearsal::new();
    fs::create_dir(rehearsal.place.file("data")).unwrap();
    for number in 0..20_001 {
        fs::File::create(rehearsal.place.file(&format!("data/{number}"))).unwrap();
    }
    let (code, report) = rehearsal.run(&COUNT.replace("LAST", ""));
    assert_eq!(
        (code, &report["verdict"]),
        (3, &"INCONCLUSIVE".into()),
        "{report:#}"
    );
    assert!(
        reason(&report).contains("more than 1.0 GiB or 20000 files"),
        "{report:#}"
    );
}

#[apply(as_root)]
fn a_report_into_the_folder_itself_is_no_difference() {
    let place = Place::new();
    fs::write(place.file("job.py"), COUNT.replace("LAST", "")).unwrap();
    let mut run = place.start(&["rehearse"], &["python3", "-u", "job.py"]);
    assert_eq!(run.wait(), 0, "{} {}", place.text("out"), place.text("err"));
    assert!(
        place.text("out").contains("files: all 1 file in"),
        "{}",
        place.text("out")
    );
}

#[apply(as_root)]
fn a_folder_that_changes_during_the_rehearsal_is_inconclusive() {
    let place = Place::new();
    fs::write(place.file("job.py"), COUNT.replace("LAST", "")).unwrap();
    let mut run = place.start(&["rehearse"], &["python3", "-u", "job.py"]);
    place.wait_for("out", "snapshot ");
    fs::write(place.file("edited"), "text").unwrap();
    assert_eq!(run.wait(), 3, "{} {}", place.text("out"), place.text("err"));
    let verdict =
        "INCONCLUSIVE: the working folder changed during the rehearsal: edited exists only later";
    assert!(place.text("out").contains(verdict), "{}", place.text("out"));
}
