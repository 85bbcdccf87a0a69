//! Effect of the job's strings on a terminal, and access of others to the supervisor.

use std::fs;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Command, ExitStatus};

use nix::sys::resource::{RLIM_INFINITY, Resource, setrlimit};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::harness::{ON_REQUEST, Place, apply, as_root, skip, wait_until};

/// Sets a title, clears the screen, and hides text from a reader: by one byte, by two bytes, and by text direction.
const EVIL: &str = "\u{1b}]0;owned\u{7}\u{9b}2J\u{202e}evil";

#[apply(as_root)]
fn a_jobs_command_line_controls_no_terminal() {
    let place = Place::new();
    let script = "echo ready; while ! [ -e go ]; do sleep 0.05; done";
    let mut run = place.start(&ON_REQUEST, &["sh", "-c", script, EVIL]);
    place.wait_for("out", "ready");
    place.snapshot();
    let mut shown = Vec::new();
    let other = ["--", "true", EVIL];
    for verb in [&["status"][..], &["show"], &["list"], &["show", "--json"]] {
        shown.push(place.verb(verb));
    }
    place.go();
    assert_eq!(run.wait(), 0, "{}", place.text("err"));
    shown.push(place.verb(&other)); // the store is another command's
    shown.push(place.verb(&["show", EVIL]));
    let mut texts = vec![place.text("err")];
    for output in &shown {
        for stream in [&output.stdout, &output.stderr] {
            texts.push(String::from_utf8_lossy(stream).into_owned());
        }
    }
    for text in &texts {
        let controls = |c: char| (c.is_control() && c != '\n') || c == '\u{202e}';
        assert!(!text.chars().any(controls), "{text:?}");
    }
    let named = texts.iter().filter(|text| text.contains("owned")).count();
    assert!(named >= 4, "{texts:?}");
    assert!(texts[0].contains("\\u001b]0;owned"), "{}", texts[0]);
    // The data are unchanged.
    let json: serde_json::Value = serde_json::from_slice(&shown[3].stdout).expect("JSON");
    assert!(json.to_string().contains("owned"), "{json}");
}

/// Allows a command to dump core, wherever the machine writes it.
fn with_core(command: &mut Command) -> &mut Command {
    // SAFETY: one system call.
    #[allow(unsafe_code, reason = "a limit is set between fork and exec")]
    unsafe {
        command.pre_exec(|| {
            Ok(setrlimit(
                Resource::RLIMIT_CORE,
                RLIM_INFINITY,
                RLIM_INFINITY,
            )?)
        })
    }
}

fn aborted(command: &mut Command, ready: impl Fn()) -> ExitStatus {
    let mut child = with_core(command).spawn().expect("it starts");
    ready();
    let pid = Pid::from_raw(i32::try_from(child.id()).expect("a pid"));
    kill(pid, Signal::SIGABRT).expect("it runs");
    child.wait().expect("a child")
}

#[apply(as_root)]
fn a_supervisor_leaves_no_core_with_its_key() {
    let place = Place::new();
    let mut sleep = Command::new("sleep");
    sleep.arg("100").current_dir(place.path());
    if !aborted(&mut sleep, || {}).core_dumped() {
        skip("no cores are dumped here");
        return;
    }
    let log = |name| fs::File::create(place.file(name)).expect("a file");
    let mut command = place.command(&["--interval", "never", "--", "sleep", "100"]);
    command.stdout(log("out")).stderr(log("err"));
    let status = aborted(&mut command, || {
        wait_until("the job's start", || {
            place.text("err").contains("job started")
        });
    });
    assert_eq!(status.signal(), Some(Signal::SIGABRT as i32));
    assert!(!status.core_dumped());
}
