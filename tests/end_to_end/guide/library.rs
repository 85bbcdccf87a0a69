//! Test of the Rust example, which supervises a job.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::harness::{Place, apply, as_root, criu_prefix, lines, program};

/// Counts to 60 in three seconds, and waits half-way for a file `go`.
const COUNT: &str = "\
import os, time
for i in range(60):
    print(i, flush=True)
    while i == 30 and not os.path.exists('go'): time.sleep(0.02)
    time.sleep(0.05)
";

/// Returns the path of the example built by `cargo test`; builds it if only this test was requested.
fn example() -> PathBuf {
    let folder = Path::new(program()).parent().unwrap();
    let program = folder.join("examples/supervise");
    if !program.exists() {
        let mut cargo = Command::new(env!("CARGO"));
        cargo.args(["build", "--quiet", "--example", "supervise"]);
        if folder.ends_with("release") {
            cargo.arg("--release");
        }
        let built = cargo.current_dir(env!("CARGO_MANIFEST_DIR")).status();
        assert!(built.unwrap().success());
    }
    program
}

#[apply(as_root)]
fn a_rust_program_supervises_a_job() {
    let place = Place::new();
    std::fs::write(place.file("job.py"), COUNT).unwrap();
    let mut command = Command::new(example());
    command
        .args([".ckpt-run", "python3", "-u", "job.py"])
        .current_dir(place.path())
        .env("XDG_CONFIG_HOME", place.path());
    if let Some(criu) = criu_prefix() {
        command.env("CKPT_RUN_CRIU", criu);
    }
    let mut run = place.spawn(command, |_| {});
    place.wait_for("out", "5\n");
    place.snapshot();
    run.crash();
    place.go();
    assert_eq!(run.wait(), 0, "{}", place.text("err"));
    assert_eq!(place.text("out"), lines(60), "{}", place.text("err"));
}
