//! Names of files, folders and arguments that are not UTF-8, which Linux allows.

use std::ffi::{OsStr, OsString};
use std::fs;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::process::{Command, Stdio};

use crate::harness::{Place, Run, apply, as_root, stderr};

/// Keeps a log, a file that it replaces and one in its working folder; records its argument.
const JOB: &str = r#"
import os, sys, time
log = open(b"log\xe9", "a")
def state(number):
    with open(b"state\xe9.tmp", "w") as file: file.write(str(number))
    os.rename(b"state\xe9.tmp", b"state\xe9")
os.mkdir(b"f\xff"); os.symlink(b"t\xe9", b"link\xe9")
update = open(b"f\xff/update", "w+")
def step(number):
    log.write("%d\n" % number); log.flush(); state(number)
    update.seek(0); update.write("at %d" % number); update.flush()
    print(number, os.fsencode(sys.argv[1]), os.getcwdb() == home, flush=True)
home = os.getcwdb()
for number in range(5): step(number)
while not os.path.exists("one"): time.sleep(0.01)
os.chdir(b"f\xff"); os.rename(b"../link\xe9", b"../moved\xe9")
os.chdir("..")
for number in range(5, 10): step(number)
while not os.path.exists("two"): time.sleep(0.01)
print(open(b"state\xe9").read(), open(b"log\xe9").read().split(), open(b"f\xff/update").read(), os.readlink(b"moved\xe9"))
"#;

/// Folder for all commands, with a name that is not UTF-8.
struct Folder {
    place: Place,
    name: OsString,
}

impl Folder {
    fn new() -> Self {
        let folder = Self {
            place: Place::new(),
            name: OsString::from_vec(b"work\xe9".to_vec()),
        };
        fs::create_dir(folder.place.path().join(&folder.name)).unwrap();
        fs::write(folder.file("job.py"), JOB).unwrap();
        folder
    }

    fn file(&self, name: impl AsRef<OsStr>) -> std::path::PathBuf {
        self.place.path().join(&self.name).join(name.as_ref())
    }

    fn command(&self, arguments: &[&str]) -> Command {
        let mut command = self.place.command(arguments);
        command.current_dir(self.file(""));
        command
    }

    fn verb(&self, arguments: &[&str]) -> String {
        let done = self.command(arguments).stdin(Stdio::null()).output();
        let done = done.unwrap();
        assert!(done.status.success(), "{arguments:?}: {}", stderr(&done));
        String::from_utf8(done.stdout).unwrap()
    }

    fn start(&self, verb: &[&str], job: &[&[u8]]) -> Run {
        let mut command = self.command(verb);
        command.args(job.iter().map(|word| OsStr::from_bytes(word)));
        command.env("CKPT_RUN_RESTART_BACKOFF", "50ms");
        self.place.spawn(command, |_| {})
    }
}

const LINE: [&[u8]; 5] = [b"--", b"python3", b"-u", b"job.py", b"arg\xff"];

#[apply(as_root)]
fn names_that_are_not_utf_8_survive() {
    let folder = Folder::new();
    let mut run = folder.start(&["--interval", "never"], &LINE);
    folder.place.wait_for("out", "4 b'arg\\xff' True\n");
    folder.verb(&["snapshot"]);
    fs::write(folder.file("one"), "").unwrap();
    folder.place.wait_for("out", "9 b'arg\\xff' True\n");
    let status: serde_json::Value =
        serde_json::from_str(&folder.verb(&["status", "--json"])).unwrap();
    assert_eq!(status["state"], "running", "{status}");
    let shown: serde_json::Value =
        serde_json::from_str(&folder.verb(&["show", "latest", "--json"])).unwrap();
    assert!(shown.to_string().contains("[97,114,103,255]"), "{shown}");
    folder.verb(&["show", "latest"]);
    // Kills both the job and its supervisor, so that the image and the run's state are read again.
    run.signal(nix::sys::signal::Signal::SIGKILL);
    run.wait();
    fs::write(folder.file("two"), "").unwrap();
    let mut run = folder.start(&["restore"], &[]);
    assert_eq!(run.wait(), 0, "{}", folder.place.text("err"));
    let end = "9 ['0', '1', '2', '3', '4', '5', '6', '7', '8', '9'] at 9 b't\\xe9'\n";
    let out = folder.place.text("out");
    assert!(out.ends_with(end), "{out}\n{}", folder.place.text("err"));
    assert!(folder.place.text("err").contains("restored"));
}

#[apply(as_root)]
fn a_line_that_differs_in_bytes_that_are_not_utf_8_is_another() {
    let folder = Folder::new();
    let mut run = folder.start(&["--interval", "never"], &LINE);
    folder.place.wait_for("out", "4 b'arg\\xff' True\n");
    folder.verb(&["snapshot"]);
    run.signal(nix::sys::signal::Signal::SIGKILL);
    run.wait();
    let mut other = LINE;
    other[4] = b"arg\xfe";
    let mut run = folder.start(&["--interval", "never"], &other);
    assert_ne!(run.wait(), 0);
    let err = folder.place.text("err");
    assert!(err.contains("a run of another command"), "{err}");
}
