//! Job whose memory, appended log and replaced file show where it continued.

use std::fs;
use std::process::Command;

use crate::harness::{ON_REQUEST, Place, Run, lines};

/// Appends 60 lines to a log and replaces a file by rename at each one. Waits for a file `snapshotted` after line 20,
/// and for `go` after line 40. At the end it compares its random memory with the checksum at the start.
const STEPS: &str = r#"
import hashlib, os, time
memory = os.urandom(4 << 20)
checksum = hashlib.sha256(memory).hexdigest()
print("memory", checksum, flush=True)
log = open("log", "a")
def wait(step, name):
    print("step", step, flush=True)
    while not os.path.exists(name):
        time.sleep(0.02)
for step in range(60):
    log.write(f"{step}\n"); log.flush()
    with open("state.new", "w") as state:
        state.write(f"step {step}\n")
    os.rename("state.new", "state")
    assert open("state").read() == f"step {step}\n"
    if step == 20:
        wait(step, "snapshotted")
    if step == 40:
        wait(step, "go")
assert hashlib.sha256(memory).hexdigest() == checksum
print("result", checksum, flush=True)
"#;

/// The job in a place.
pub(super) struct StepsJob<'a> {
    pub(super) place: &'a Place,
    pub(super) url: &'a str,
    /// Changes of the supervisor's environment.
    pub(super) environment: &'a dyn Fn(&mut Command),
}

impl<'a> StepsJob<'a> {
    /// Returns the job with the environment of the test.
    pub(super) fn new(place: &'a Place, url: &'a str) -> Self {
        Self {
            place,
            url,
            environment: &|_| {},
        }
    }

    /// Starts the line, or continues its run.
    pub(super) fn start(&self, options: &[&str]) -> Run {
        let options = [&ON_REQUEST[..], &["--remote", self.url], options].concat();
        let script = self.place.file("job.py");
        if !script.exists() {
            fs::write(&script, STEPS).unwrap();
        }
        let job = ["python3", "-u", "job.py"];
        self.place.start_with(&options, &job, self.environment)
    }

    /// Starts the run, has an image of step 20 uploaded, and lets the job continue to step 40.
    pub(super) fn start_with_image(&self) -> Run {
        let run = self.start(&[]);
        self.place.wait_for("out", "step 20\n");
        let mut snapshot = self.place.command(&["snapshot"]);
        (self.environment)(&mut snapshot);
        assert!(snapshot.output().unwrap().status.success());
        fs::write(self.place.file("snapshotted"), "").unwrap();
        self.place.wait_for("out", "step 40\n");
        self.place
            .wait_for("err", "the image is in the remote store image=000001");
        run
    }

    /// Lets the job of a restored image run to its end, and compares its result with that of an undisturbed one.
    /// `checksum` is what the job printed at its start, and `files` the folder of its files.
    pub(super) fn assert_result(&self, run: &mut Run, files: &Place, checksum: &str) {
        self.place.wait_for("err", "restored image=");
        fs::write(files.file("snapshotted"), "").unwrap();
        files.go();
        assert_eq!(run.wait(), 0, "{}", self.place.text("err"));
        assert_eq!(files.text("log"), lines(60), "{}", self.place.text("err"));
        assert_eq!(files.text("state"), "step 59\n");
        assert!(!files.file("state.new").exists());
        let out = self.place.text("out");
        assert!(out.ends_with(&format!("result {checksum}\n")), "{out}");
    }

    /// Returns the checksum that the job printed at its start.
    pub(super) fn checksum(&self) -> String {
        let out = self.place.text("out");
        let line = out.lines().find_map(|line| line.strip_prefix("memory "));
        line.expect("the job's first line").to_owned()
    }
}
