//! Hiding of `io_uring` and Landlock from the job, so that it can be snapshotted and a restored job equals it.

use std::fs;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::plain::python;
use crate::harness::{ON_REQUEST, Place, Run, apply, as_root, as_root_and_user, skip, stderr};

/// Calls `io_uring_setup` and `landlock_create_ruleset` and prints the results, and again when each of two files exists: itself, in a thread, in a child,
/// and in a program that it executes.
const JOB: &str = r#"
import ctypes, os, subprocess, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)
def attempt():
    made = [libc.syscall(425, 4, ctypes.create_string_buffer(120)), libc.syscall(444, b"\1" + bytes(15), 8, 0)]
    if max(made) < 0: return os.strerror(ctypes.get_errno())
    return " and ".join(name for name, result in zip(["ring", "rules"], made) if result >= 0)
def status():
    lines = open("/proc/self/status").read().splitlines()
    return [line.split()[1] for line in lines if line.startswith(("NoNewPrivs:", "Seccomp:"))]
if len(sys.argv) > 1: sys.exit(print(attempt(), *status()))
turns, turn = [threading.Semaphore(0) for _ in range(2)], threading.Semaphore(0)
def in_thread():
    for mine in turns:
        mine.acquire(); print(attempt(), flush=True); turn.release()
threading.Thread(target=in_thread, daemon=True).start()
there, back = os.pipe(), os.pipe()
if os.fork() == 0:
    while os.read(there[0], 1): os.write(back[1], attempt().encode())
    os._exit(0)
def report():
    print(attempt(), *status(), flush=True)
    os.write(there[1], b"x"); print(os.read(back[0], 100).decode(), flush=True)
    subprocess.run([sys.executable, __file__, "child"], check=True)
report()
print("ready", flush=True)
for mine, word in zip(turns, ("go", "again")):
    while not os.path.exists(word): time.sleep(0.02)
    report()
    mine.release(); turn.acquire()
    print(word, flush=True)
"#;

/// Output of `JOB` where `io_uring` is hidden.
const HIDDEN: &str =
    "Function not implemented 0 2\nFunction not implemented\nFunction not implemented 0 2\n";

fn hidden_before_and_after_crashes(isolation: &str) {
    let place = Place::new();
    let options = ["--isolation", isolation, "--interval", "never"];
    let mut run = place.start_python(&options, JOB);
    place.wait_for("out", "ready");
    place.snapshot();
    crash(&run);
    place.wait_for("err", "restored image=000001");
    place.go();
    place.wait_for("out", "go\n");
    place.snapshot();
    crash(&run);
    place.wait_for("err", "restored image=000002");
    fs::write(place.file("again"), "").unwrap();
    assert_eq!(run.wait(), 0, "{}", place.text("err"));
    let once = format!("{HIDDEN}Function not implemented\n");
    let expected = format!("{HIDDEN}ready\n{once}go\n{once}again\n");
    assert_eq!(place.text("out"), expected);
}

fn crash(run: &Run) {
    kill(Pid::from_raw(python(run)), Signal::SIGKILL).unwrap();
}

#[apply(as_root)]
fn a_job_does_without_io_uring_and_still_does_when_restored() {
    hidden_before_and_after_crashes("namespaces");
}

#[apply(as_root)]
fn a_plain_job_does_without_io_uring_as_well() {
    hidden_before_and_after_crashes("none");
}

#[apply(as_root_and_user)]
fn a_job_in_a_user_namespace_does_without_io_uring() {
    hidden_before_and_after_crashes("user");
}

#[apply(as_root_and_user)]
fn snapshot_refusal_for_io_uring_has_a_reason() {
    let place = Place::new();
    let mut run = place.start_python_with(&ON_REQUEST, JOB, |command| {
        command.env("CKPT_RUN_SANDBOX_IO_URING", "allow");
    });
    place.wait_for("out", "ready");
    let out = place.text("out");
    assert!(!out.contains(HIDDEN), "{out}");
    if out.starts_with("ring 0 2\n") {
        let refused = place.verb(&["snapshot"]);
        let said = stderr(&refused);
        assert!(!refused.status.success(), "{said}");
        assert!(
            said.contains("uses io_uring") && said.contains("sandbox.io_uring = \"hide\""),
            "{said}"
        );
    } else {
        skip("this machine has no io_uring");
    }
    fs::write(place.file("again"), "").unwrap();
    place.go();
    assert_eq!(run.wait(), 0, "{}", place.text("err"));
}

#[apply(as_root_and_user)]
fn a_job_with_landlock_allowed_can_use_it() {
    let place = Place::new();
    let mut run = place.start_python_with(&ON_REQUEST, JOB, |command| {
        command.env("CKPT_RUN_SANDBOX_LANDLOCK", "allow");
    });
    place.wait_for("out", "ready");
    if !place.text("out").starts_with("rules 0 2\n") {
        assert!(place.text("out").starts_with(HIDDEN));
        skip("this machine has no Landlock");
    }
    fs::write(place.file("again"), "").unwrap();
    place.go();
    assert_eq!(run.wait(), 0, "{}", place.text("err"));
}

/// A child in seccomp's strict mode replies before and after the file `go` exists; or reports that it may not enter
/// that mode.
const STRICT: &str = r#"
import ctypes, os, time
libc = ctypes.CDLL(None, use_errno=True)
there, back = os.pipe(), os.pipe()
child = os.fork()
if child == 0:
    if libc.prctl(22, 1, 0, 0, 0) != 0:
        os.write(back[1], b"%d" % ctypes.get_errno()); os._exit(1)
    while True: os.write(back[1], os.read(there[0], 10))
def report():
    os.write(there[1], b"alive")
    answer = os.read(back[0], 10).decode()
    mode = [line.split()[1] for line in open(f"/proc/{child}/status") if line.startswith("Seccomp:")]
    print(answer, *mode, flush=True)
report()
print("ready", flush=True)
while not os.path.exists("go"): time.sleep(0.02)
if os.waitpid(child, os.WNOHANG)[0] == 0: report()
os.kill(child, 9)
"#;

#[apply(as_root)]
fn a_job_in_strict_seccomp_with_nothing_hidden_is_restored() {
    let place = Place::new();
    let mut run = place.start_python_with(&ON_REQUEST, STRICT, |command| {
        command.env("CKPT_RUN_SANDBOX_IO_URING", "allow");
        command.env("CKPT_RUN_SANDBOX_LANDLOCK", "allow");
    });
    place.wait_for("out", "ready");
    place.snapshot();
    run.crash();
    place.wait_for("err", "restored image");
    place.go();
    assert_eq!(run.wait(), 0, "{}", place.text("err"));
    assert_eq!(place.text("out"), "alive 1\nready\nalive 1\n");
}
