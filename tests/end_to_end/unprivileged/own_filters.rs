//! Seccomp filters in the job of an ordinary user: those of the sandbox are left out of images, those of the job are refused.

use std::process::Command;

use super::snapshot_crash_and_end;
use crate::harness::{ON_REQUEST, Place, apply, as_user, installed, skip, stderr};

/// Sets a filter that allows everything or enters the strict mode, in one of its processes or threads. Prints the results of
/// calls before and after the file `go` exists.
const JOB: &str = r#"
import ctypes, os, signal, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)
allow = ctypes.create_string_buffer(b"\x06\0\0\0\0\0\xff\x7f")
class Program(ctypes.Structure): _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_void_p)]
program = Program(1, ctypes.addressof(allow))
def install():
    libc.prctl(38, 1, 0, 0, 0)
    assert libc.prctl(22, 2, ctypes.byref(program), 0, 0) == 0
def in_thread():
    told, tell = os.pipe()
    def run(): install(); os.write(tell, b"x"); signal.pause()
    threading.Thread(target=run, daemon=True).start(); os.read(told, 1)
def in_child(prepare):
    told, tell = os.pipe()
    there, _ = os.pipe()
    if os.fork() == 0:
        prepare(); os.write(tell, b"x"); os.read(there, 1); os._exit(0)
    os.read(told, 1)
def strict(): assert libc.prctl(22, 1, 0, 0, 0) == 0
{"process": install, "thread": in_thread, "child": lambda: in_child(install), "strict": lambda: in_child(strict)}[sys.argv[1]]()
print("ready", flush=True)
while not os.path.exists("go"):
    time.sleep(0.02)
print("done", flush=True)
os.killpg(0, 9) if sys.argv[1] == "strict" else None
"#;

fn refused(place_of_filter: &str, visibility: &str) {
    let place = Place::new();
    std::fs::write(place.file("job.py"), JOB).unwrap();
    let job = ["python3", "-u", "job.py", place_of_filter];
    let mut run = place.start_with(&ON_REQUEST, &job, |command| {
        command.env("CKPT_RUN_SANDBOX_IO_URING", visibility);
        command.env("CKPT_RUN_SANDBOX_LANDLOCK", visibility);
    });
    place.wait_for("out", "ready");
    let refused = place.verb(&["snapshot"]);
    let said = stderr(&refused);
    assert!(!refused.status.success(), "{place_of_filter} {visibility}");
    assert!(said.contains("the job has set a seccomp filter"), "{said}");
    place.go();
    run.wait();
    assert_eq!(place.text("out"), "ready\ndone\n");
}

#[apply(as_user)]
fn filters_of_the_job_are_refused_by_name() {
    for place_of_filter in ["process", "thread", "child"] {
        for visibility in ["hide", "allow"] {
            refused(place_of_filter, visibility);
        }
    }
    refused("strict", "allow");
}

/// Reads files in a loop, with the library that would use `io_uring`.
const NODE: &str = r#"
const fs = require("fs");
console.log("ready");
async function round() {
    await fs.promises.readFile("/proc/self/stat");
    if (fs.existsSync("go")) { console.log("done"); return; }
    setTimeout(round, 20);
}
round();
"#;

#[apply(as_user)]
fn node_that_would_use_io_uring_is_restored() {
    if !installed("node") {
        skip("node is not installed");
        return;
    }
    let place = Place::new();
    std::fs::write(place.file("job.js"), NODE).unwrap();
    let wants_it = |command: &mut Command| {
        command.env("UV_USE_IO_URING", "1");
    };
    let run = place.start_with(&ON_REQUEST, &["node", "job.js"], wants_it);
    snapshot_crash_and_end(&place, run);
    assert_eq!(place.text("out"), "ready\ndone\n");
}
