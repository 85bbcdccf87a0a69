//! State that CRIU does not know, such as AMX tiles, protection keys, the dispatch of system calls, Landlock.
//! `tests/processor/run` uses each in a small program, kills and restores it. Kinds that the machine lacks are skipped.

use std::fs;
use std::path::Path;
use std::process::Command;

use crate::harness::{
    Place, apply, as_root_and_user, criu_prefix, installed, program, skip, stderr, stdout,
};

#[apply(as_root_and_user)]
fn state_that_criu_does_not_know_is_restored() {
    if !installed("cc") {
        return;
    }
    let place = Place::new();
    // The user may not be able to read the checkout.
    let files = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/processor");
    for name in ["run", "state.c"] {
        fs::copy(files.join(name), place.file(name)).unwrap();
    }
    let mut run = Command::new("python3");
    run.args(["run", "--bin", program(), "--work"])
        .arg(place.path());
    place.in_folder(&mut run);
    place.own(&mut run);
    if let Some(criu) = criu_prefix() {
        run.arg("--criu").arg(criu);
    }
    let output = run.output().expect("python3 starts");
    let said = stdout(&output);
    assert!(output.status.success(), "{said}\n{}", stderr(&output));
    for line in said.lines().filter(|line| line.starts_with("SKIPPED: ")) {
        skip(line);
    }
}
