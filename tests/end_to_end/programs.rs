//! Real programs that work on files: databases, mapped files, make with gcc, git, and small jobs with closed, renamed and
//! temporary files. `tests/programs/run` kills and restores each; here it runs the programs that need no download.

use std::process::Command;

use crate::harness::{Place, apply, as_root, criu_prefix, program, skip, stderr, stdout};

/// Programs that a machine with Python, gcc, make and git has.
const PROGRAMS: &str =
    "sqlite-journal,mmap,dbm,state-inplace,state-rename,temporary,folders,logs,make,git";
/// Seconds that a job takes by itself.
const SECONDS: &str = "4";
/// Programs at a time: each waits most of the time.
const PARALLEL: &str = "4";

#[apply(as_root)]
fn programs_find_their_files_as_they_were_after_kills() {
    let place = Place::new();
    let mut run = Command::new("python3");
    run.arg(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/programs/run"))
        .args(["--programs", PROGRAMS, "--seconds", SECONDS])
        .args(["--parallel", PARALLEL, "--rounds", "1", "--seed", "1"])
        .args(["--strict", "--no-install", "--bin", program(), "--work"])
        .arg(place.path())
        .env("XDG_CONFIG_HOME", place.path())
        .env_remove("CKPT_RUN_STORE");
    if let Some(criu) = criu_prefix() {
        run.arg("--criu").arg(criu);
    }
    let output = run.output().expect("python3 starts");
    let said = stdout(&output);
    assert!(output.status.success(), "{said}\n{}", stderr(&output));
    for line in said.lines().filter(|line| line.contains("SKIPPED: ")) {
        skip(line);
    }
}
