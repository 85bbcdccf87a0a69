//! The sample job on fake GPUs: beside no supervisor, and as it ends when nobody touches it.

use std::process::Command;

use super::fake_gpu::{self, FakeGpu};
use super::{Place, Run};

/// A job beside no supervisor, its output in `out`.
pub fn alone(place: &Place, gpu: &FakeGpu, arguments: &[&str]) -> Run {
    let mut command = Command::new(fake_gpu::job());
    command
        .args(arguments)
        .envs(gpu.environment())
        .current_dir(place.path());
    place.spawn(command, |_| {})
}

/// What a job prints when nobody touches it.
pub fn untouched(gpu: &FakeGpu, arguments: &[&str]) -> String {
    let place = Place::new();
    let mut run = alone(&place, gpu, arguments);
    assert_eq!(run.wait(), 0, "{}", place.text("err"));
    place.text("out")
}

/// Lets a job go on to its end, which must be that of one that printed this.
pub fn ends_as(place: &Place, run: &mut Run, untouched: &str) {
    place.go();
    assert_eq!(run.wait(), 0, "{}", place.text("err"));
    assert_eq!(place.text("out"), untouched, "{}", place.text("err"));
}
