//! Running a job as a user sees it: streams, surroundings, signals, exit codes, repetition, schedule,
//! restarts, verbs, which images are kept.

#[path = "../common/mod.rs"]
mod common;

mod again;
mod completions;
mod cuda;
mod encryption;
mod hangs;
mod hooks;
mod idle;
mod images;
mod io_uring;
mod journal;
mod keeping;
mod live;
mod metrics;
mod orphans;
mod pages;
mod pause;
mod plain;
mod rehearse;
mod report;
mod restarts;
mod restore;
mod schedule;
mod signals;
mod slurm;
mod stacks;
mod status;
mod stop;
mod streams;
mod surroundings;
mod systemd;
mod templates;
mod verbs;

use std::fs;
use std::process::{Command, Output};

/// Counts to 40 into a log opened in mode `w` and onto stdout. Halfway it waits for a file `go`, so that it is not over
/// before we are.
const COUNT: &str = r#"
import os, time
log = open("log", "w")
for i in range(40):
    print(i, flush=True)
    log.write(f"{i}\n"); log.flush()
    time.sleep(0.02)
    while i == 20 and not os.path.exists("go"):
        time.sleep(0.02)
"#;

/// Says `ready` and computes until there is a file `go`, then runs what follows.
const UNTIL_GO: &str = r#"
import os, signal, sys, time
print("ready", flush=True)
while not os.path.exists("go"):
    time.sleep(0.02)
"#;

fn lines(count: u32) -> String {
    let numbers: Vec<String> = (0..count).map(|i| i.to_string()).collect();
    numbers.join("\n") + "\n"
}

/// State letter of a process, as in `ps`; `None` when there is none.
fn state(pid: i32) -> Option<char> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    stat.rsplit_once(") ")?.1.chars().next()
}

/// Whether a process is gone, or dead and not yet reaped by whoever adopted it.
fn is_dead(pid: i32) -> bool {
    matches!(state(pid), None | Some('Z'))
}

/// Whether a program is installed; says aloud when it is not.
fn has(program: &str) -> bool {
    let found = Command::new("sh")
        .args([
            "-c",
            &format!("PATH=$PATH:/usr/sbin:/sbin; command -v {program}"),
        ])
        .output();
    let found = found.is_ok_and(|output| output.status.success());
    if !found {
        eprintln!("SKIPPED: no {program} here");
    }
    found
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn stdout(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}
