//! GPU jobs on the fake GPU (`tests/fake-cuda`), with the real program and the real CRIU: snapshots by the driver.

mod common;
#[path = "common/fake_gpu.rs"]
mod fake_gpu;

use std::fs;
use std::process::{Command, Output};

use common::{Place, can_run};
use fake_gpu::FakeGpu;

/// What the job prints when nobody touches it.
fn uninterrupted(gpu: &FakeGpu, arguments: &[&str]) -> String {
    let mut job = Command::new(fake_gpu::job());
    let output = job
        .args(arguments)
        .envs(gpu.environment())
        .output()
        .expect("the job starts");
    assert!(output.status.success(), "{}", errors(&output));
    String::from_utf8(output.stdout).expect("text")
}

fn errors(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[test]
fn a_gpu_job_that_was_killed_comes_back_and_ends_as_if_nothing_had_happened() {
    if !can_run() {
        return;
    }
    let (place, gpu) = (Place::new(), FakeGpu::new());
    let job = [
        "--threads",
        "2",
        "--steps",
        "30",
        "--pause-ms",
        "5",
        "--log",
        "log",
    ];
    let program = fake_gpu::job();
    let mut command = place.command(&["--interval", "never", "--"]);
    command.arg(program).args(job).args(["--wait-at", "20:go"]);
    let mut run = place.spawn(gpu.wrap(&command), |_| {});
    place.wait_for("out", "\n10 ");
    place.snapshot();
    eprintln!("{:#?}", place.images());
    place.wait_for("out", "\n20 ");
    run.crash();
    fs::write(place.file("go"), "").expect("written");
    assert_eq!(run.wait(), 0, "{}", place.text("err"));
    let expected = uninterrupted(&FakeGpu::new(), &job[..6]);
    assert!(
        place.text("out") == expected,
        "{}\n{}",
        place.text("out"),
        place.text("err")
    );
    assert_eq!(place.text("log") + "done\n", expected);
}
