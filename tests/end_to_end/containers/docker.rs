//! Container image of the Dockerfile, run by the command in its comments, stopped and killed.

use std::fs;
use std::path::PathBuf;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::{Value, json};

use super::image_build::{IMAGE, machine, template};
use super::machine::Machine;
use crate::harness::{apply, as_root, lines, wait_until, wait_until_gone};

/// Volume in that command.
pub const VOLUME: &str = "train";

/// Returns the options of the `docker run` in the Dockerfile's comments. There is no GPU, and the container is kept for
/// its log. Only the named capabilities are granted; docker's default capabilities are dropped.
pub fn options() -> Vec<String> {
    let text = template("docker");
    let comments: Vec<&str> = text
        .lines()
        .filter_map(|line| line.strip_prefix("#   "))
        .collect();
    let line = comments.join("\n").replace("\\\n", " ");
    let line = line
        .lines()
        .find_map(|line| line.strip_prefix("docker run "))
        .unwrap();
    let line = line.replace("--rm ", "").replace("--gpus all ", "");
    let mut words = shlex::split(&line).unwrap();
    assert_eq!(words.pop().as_deref(), Some(IMAGE));
    words.extend(["--cap-drop", "ALL"].map(str::to_owned));
    words
}

/// Starts the command in the background, as `name`.
pub fn start(machine: &Machine, name: &str, options: &[String]) {
    let mut words = vec!["run", "--detach", "--name", name];
    words.extend(options.iter().map(String::as_str));
    machine.podman(&[&words[..], &[IMAGE]].concat());
}

pub fn go(machine: &Machine) {
    fs::write(machine.in_volume(VOLUME, "go"), "").unwrap();
}

pub fn log(machine: &Machine) -> String {
    fs::read_to_string(machine.in_volume(VOLUME, "log")).unwrap()
}

#[apply(as_root)]
fn stopped_container_is_saved_and_the_next_one_continues() {
    let Some(machine) = machine() else { return };
    start(&machine, "first", &options());
    machine.wait_for(VOLUME, "log", "20\n", "first");
    machine.podman(&["stop", "first"]);
    assert_eq!(machine.wait("first"), 75, "{}", machine.err("first"));
    go(&machine);
    start(&machine, "second", &options());
    assert_eq!(machine.wait("second"), 0, "{}", machine.err("second"));
    assert_eq!(log(&machine), lines(40));
    assert_eq!(machine.out("first") + &machine.out("second"), lines(40));
    for name in ["first", "second"] {
        let err = machine.err(name);
        // The files of the container image are on an overlay; the job's files are on the volume.
        let is_about_overlay =
            |line: &&str| line.contains("the file system at / cannot be watched");
        let lines: Vec<&str> = err.lines().filter(|line| !is_about_overlay(line)).collect();
        let err = lines.join("\n");
        assert!(!err.contains("warning") && !err.contains("error"), "{err}");
    }
}

/// File of podman with its default seccomp filter.
const DEFAULT_FILTER: &str = "/usr/share/containers/seccomp.json";

/// Writes a filter that allows CRIU's calls, as docker's default filter does. Podman's default filter rejects `vmsplice`.
fn filter_that_suffices(machine: &Machine) -> PathBuf {
    let mut filter: Value = serde_json::from_slice(&fs::read(DEFAULT_FILTER).unwrap()).unwrap();
    let rules = filter["syscalls"].as_array_mut().unwrap();
    for rule in rules.iter_mut() {
        let names = rule["names"].as_array_mut().unwrap();
        names.retain(|name| name != "vmsplice");
    }
    rules.retain(|rule| rule["names"] != json!([]));
    rules.push(json!({"names": ["vmsplice"], "action": "SCMP_ACT_ALLOW"}));
    let path = machine.file("filter.json");
    fs::write(&path, filter.to_string()).unwrap();
    path
}

#[apply(as_root)]
fn killed_job_and_killed_container_are_restored() {
    let Some(machine) = machine() else { return };
    killed_and_restored(&machine, &options());
}

#[apply(as_root)]
fn job_under_the_filter_of_a_container_is_restored() {
    let Some(machine) = machine() else { return };
    let filter = format!("seccomp={}", filter_that_suffices(&machine).display());
    let options = options();
    let options: Vec<String> = options
        .iter()
        .map(|word| word.replace("seccomp=unconfined", &filter))
        .collect();
    killed_and_restored(&machine, &options);
}

fn killed_and_restored(machine: &Machine, options: &[String]) {
    start(machine, "first", options);
    machine.wait_for(VOLUME, "log", "20\n", "first");
    let snapshot = [
        "exec",
        "first",
        "ckpt-run",
        "--store",
        "/store/train",
        "snapshot",
    ];
    assert_eq!(machine.podman(&snapshot), "000001\n");
    let job = machine.job();
    kill(Pid::from_raw(job), Signal::SIGKILL).unwrap();
    wait_until_gone(&[job]);
    wait_until("the restore", || machine.err("first").contains("restored"));
    let again = machine.job();
    assert_ne!(again, job);
    machine.podman(&["kill", "first"]);
    assert_eq!(machine.wait("first"), 137);
    wait_until_gone(&[again]);
    go(machine);
    // The creator of the file is unknown, because the watcher did not run after the kill.
    let accept = ["--env", "CKPT_RUN_FILES_ON_LOST=warn"].map(str::to_owned);
    start(machine, "second", &[options, &accept[..]].concat());
    assert_eq!(machine.wait("second"), 0, "{}", machine.err("second"));
    assert_eq!(log(machine), lines(40));
}
