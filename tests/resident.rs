//! Device memory that stays on the GPU while the job is suspended, on the fake GPU (`tests/fake-cuda`) with the real
//! program and the real CRIU.

mod common;
#[path = "common/fake_gpu.rs"]
mod fake_gpu;

use std::fs;
use std::process::Command;

use common::{Place, Run, can_run};
use fake_gpu::FakeGpu;

/// Long enough for something to be done to it; it waits at step 20 until there is a file `go`.
const JOB: [&str; 10] = [
    "--threads",
    "2",
    "--segments",
    "300,64K,2M,4M,6M",
    "--steps",
    "30",
    "--pause-ms",
    "2",
    "--wait-at",
    "20:go",
];

/// A supervised job.
fn supervised(place: &Place, gpu: &FakeGpu, memory: &str) -> Run {
    let mut command = place.command(&["--interval", "never", "--config", "config"]);
    fs::write(
        place.file("config"),
        format!("[cuda]\nmemory = \"{memory}\"\n"),
    )
    .expect("written");
    command.arg("--").arg(fake_gpu::job()).args(JOB);
    place.spawn(gpu.wrap(&command), |_| {})
}

/// What [`JOB`] prints when nobody touches it.
fn uninterrupted() -> String {
    let (place, gpu) = (Place::new(), FakeGpu::new());
    let mut command = Command::new(fake_gpu::job());
    command
        .args(&JOB[..8])
        .envs(gpu.environment())
        .current_dir(place.path());
    let mut run = place.spawn(command, |_| {});
    assert_eq!(run.wait(), 0, "{}", place.text("err"));
    place.text("out")
}

/// Lets the job go on to its end, which must be that of [`uninterrupted`].
fn ends_as_ever(place: &Place, run: &mut Run) {
    fs::write(place.file("go"), "").expect("written");
    assert_eq!(run.wait(), 0, "{}", place.text("err"));
    assert_eq!(place.text("out"), uninterrupted(), "{}", place.text("err"));
}

#[test]
fn memory_that_stays_on_the_gpu_is_in_the_image_and_comes_back() {
    if !can_run() {
        return;
    }
    let (place, gpu) = (Place::new(), FakeGpu::new());
    let mut run = supervised(&place, &gpu, "resident");
    place.wait_for("out", "\n10 ");
    place.snapshot();
    place.wait_for("out", "\n20 ");
    assert!(
        place.text("err").contains("release "),
        "{}",
        place.text("err")
    );
    run.crash();
    ends_as_ever(&place, &mut run);
    assert_eq!(gpu.used_bytes(0) + gpu.used_bytes(1), 0);
}
