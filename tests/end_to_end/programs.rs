//! Real programs that work on files: databases, mapped files, make with gcc, git, and small jobs with closed, renamed
//! and temporary files. `tests/programs/run` kills and restores each program; here it runs those that need no download.
//! Also a part of CRIU's own tests, which `tests/zdtm/run` runs if CRIU's source is available.

use std::path::Path;
use std::process::Command;

use crate::harness::{Place, apply, as_root, criu_prefix, program, skip, stderr, stdout};

/// Programs that a machine with Python, gcc, make and git has.
const PROGRAMS: &str =
    "sqlite-journal,mmap,dbm,state-inplace,state-rename,temporary,folders,logs,make,git";
/// Tests of CRIU of many kinds, each of a second or two.
const ZDTM: &str = "/(busyloop00|chroot|cow01|deleted_dev|env00|eventfs00|fifo|file_locks00|futex|itimers|maps00|\
    pipe00|pthread00|sigpending|sk-unix01|socket-tcp-local|timerfd|unlink_fstat00|fork|shmem)$";
/// Running time of an undisturbed job, in seconds.
const SECONDS: &str = "4";
/// Number of programs at a time: each waits most of the time.
const PARALLEL: &str = "4";

#[apply(as_root)]
fn programs_find_their_files_as_they_were_after_kills() {
    let place = Place::new();
    let mut run = suite(&place, "tests/programs/run");
    run.args(["--programs", PROGRAMS, "--seconds", SECONDS])
        .args(["--parallel", PARALLEL, "--rounds", "1", "--seed", "1"])
        .arg("--strict");
    passes(run);
}

#[apply(as_root)]
fn tests_of_criu_pass_after_two_kills_and_restores() {
    let Some(source) = std::env::var_os("CRIU_SOURCE") else {
        skip("CRIU's own tests: CRIU_SOURCE names no source tree of CRIU");
        return;
    };
    let place = Place::new();
    let mut run = suite(&place, "tests/zdtm/run");
    run.args(["--filter", ZDTM, "--parallel", PARALLEL, "--criu-source"])
        .arg(source);
    passes(run);
}

/// Returns the command of a suite, which installs nothing and works in a place.
fn suite(place: &Place, script: &str) -> Command {
    let mut run = Command::new("python3");
    run.arg(Path::new(env!("CARGO_MANIFEST_DIR")).join(script))
        .args(["--no-install", "--bin", program(), "--work"])
        .arg(place.path())
        .env("XDG_CONFIG_HOME", place.path())
        .env_remove("CKPT_RUN_STORE");
    if let Some(criu) = criu_prefix() {
        run.arg("--criu").arg(criu);
    }
    run
}

/// Runs a suite; tests that it skips count as skipped here.
fn passes(mut run: Command) {
    let output = run.output().expect("python3 starts");
    let said = stdout(&output);
    assert!(output.status.success(), "{said}\n{}", stderr(&output));
    for line in said.lines().filter(|line| line.contains("SKIPPED: ")) {
        skip(line);
    }
}
