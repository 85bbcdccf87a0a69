//! Procedure for each job here: start, snapshot, crash, restore, end; and the same job undisturbed.

use std::fs;
use std::process::{Command, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};

use nix::unistd::geteuid;

use crate::harness::{ON_REQUEST, Place, Run};

/// Common beginning of the jobs: `steps` counts, and waits where the test has to act, independent of the machine's
/// speed.
const PRELUDE: &str = r#"
import array, ctypes, fcntl, hashlib, mmap, os, select, signal, socket, struct, subprocess, sys, threading, time

# Others could replace this file. Therefore a restore checks all files that it has opened.
os.makedirs("open-to-all", exist_ok=True)
os.chmod("open-to-all", 0o777)
replaceable = open("open-to-all/file", "w")

STEPS = 20
notes = []
libc = ctypes.CDLL(None, use_errno=True)

def note(*values):
    text = repr(values)
    notes.append(text if len(text) < 200 else hashlib.sha256(text.encode()).hexdigest())

def gate(name):
    while not os.path.exists(name):
        time.sleep(0.005)

def steps():
    for i in range(STEPS):
        if i == 8: gate("snapshotted")
        if i == 14: gate("crashed")
        yield i
        print(i, flush=True)
        time.sleep(0.01)

def check(result):
    if result == -1:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result

def until(condition):
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.005)
"#;
/// Common end of the jobs.
const EPILOGUE: &str = "\nprint(*notes, 'end', sep='\\n', flush=True)\n";

/// Supervised job that was snapshotted and has continued a little.
pub struct Survival {
    pub place: Place,
    pub run: Run,
    expected: String,
}

/// Runs the whole procedure; the job's own checks and all its notes must equal those of an undisturbed job.
pub fn survives(script: &str) {
    let survival = Survival::begin(script);
    survival.run.crash();
    survival.ends_like_an_undisturbed_run();
}

/// Begins a warning about what a restore has lost.
const DIFFERS: &str = "the job differs from the snapshot";

impl Survival {
    /// Starts the job, takes a snapshot in the middle of its work and lets it continue.
    pub fn begin(script: &str) -> Self {
        let script = format!("{PRELUDE}{script}{EPILOGUE}");
        let expected = undisturbed(&script);
        let place = Place::new();
        fs::write(place.file("job.py"), script).expect("the script is written");
        let run = place.start_with(&ON_REQUEST, &JOB, |command| {
            command.env("CKPT_RUN_RESTART_BACKOFF", "50ms");
        });
        place.wait_for("out", "\n4\n");
        place.snapshot();
        fs::write(place.file("snapshotted"), "").expect("a gate");
        place.wait_for("out", "\n12\n");
        Self {
            place,
            run,
            expected,
        }
    }

    pub fn ends_like_an_undisturbed_run(mut self) {
        fs::write(self.place.file("crashed"), "").expect("a gate");
        let err = || self.place.text("err");
        assert_eq!(self.run.wait(), 0, "{}", err());
        assert_eq!(self.place.text("out"), self.expected, "{}", err());
        assert!(err().contains("restored"), "{}", err());
        assert!(!err().contains(DIFFERS), "{}", err());
    }

    /// Simulates a reboot: the supervisor is killed with the job, then started again.
    pub fn supervisor_dies(self, meanwhile: impl FnOnce(&Place)) -> Self {
        let Self {
            place,
            run,
            expected,
        } = self;
        let mut dying = run;
        dying.kill_supervisor();
        meanwhile(&place);
        let run = place.start(&ON_REQUEST, &JOB);
        Self {
            place,
            run,
            expected,
        }
    }
}

/// Takes two snapshots, each followed by a crash. In round N the job prints `armed-N` where the snapshot is to be
/// taken, waits for the gate `snapshotted-N`, continues, prints `moved-N` and waits for the gate `crashed-N`.
pub fn survives_two_crashes(script: &str) {
    let place = Place::new();
    fs::write(place.file("job.py"), format!("{PRELUDE}{script}")).expect("the script is written");
    let mut run = place.start_with(&ON_REQUEST, &JOB, |command| {
        command.env("CKPT_RUN_RESTART_BACKOFF", "50ms");
    });
    for round in 0..2 {
        place.wait_for("out", &format!("armed-{round}\n"));
        place.snapshot();
        fs::write(place.file(&format!("snapshotted-{round}")), "").expect("a gate");
        place.wait_for("out", &format!("moved-{round}\n"));
        run.crash();
        fs::write(place.file(&format!("crashed-{round}")), "").expect("a gate");
    }
    let err = || place.text("err");
    assert_eq!(run.wait(), 0, "{}", err());
    assert_eq!(err().matches("restored image").count(), 2, "{}", err());
    assert!(!err().contains(DIFFERS), "{}", err());
}

/// Lock of jobs with named semaphores: while CRIU dumps or restores one, its `link_remap.N` is in `/dev/shm`, and
/// another job's link may have the same number. A snapshot that meets it fails, and the job continues.
static NAMED_SEMAPHORES: Mutex<()> = Mutex::new(());

pub fn take_turns() -> MutexGuard<'static, ()> {
    NAMED_SEMAPHORES
        .lock()
        .unwrap_or_else(PoisonError::into_inner)
}

const JOB: [&str; 3] = ["python3", "-u", "job.py"];

/// Returns the output of an undisturbed job.
fn undisturbed(script: &str) -> String {
    let place = Place::new();
    for name in ["job.py", "snapshotted", "crashed"] {
        fs::write(place.file(name), script).expect("a file");
    }
    // As under supervision, there are no System V objects of others.
    let mut command = Command::new("unshare");
    if !geteuid().is_root() {
        command.args(["--user", "--map-current-user"]);
    }
    let output = command
        .args(["--ipc", "python3", "-u", "job.py"])
        .current_dir(place.path())
        .stdin(Stdio::null())
        .stderr(Stdio::inherit())
        .output()
        .expect("python3 starts");
    assert!(output.status.success(), "the job fails by itself");
    String::from_utf8(output.stdout).expect("text")
}
