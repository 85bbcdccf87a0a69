//! Device memory that stays on the GPU while the job is suspended, on the fake GPU (`tests/fake-cuda`) with the real
//! program and the real CRIU. Whatever happens, the job ends as one that nobody touched.

mod busy;
#[path = "../common/mod.rs"]
mod common;
mod copying;
#[path = "../common/fake_gpu.rs"]
mod fake_gpu;
mod faults;
#[path = "../common/gpu_job.rs"]
mod gpu_job;
mod options;
mod pausing;
mod sequence;
mod sharing;
mod support;

use common::can_run;
use fake_gpu::FakeGpu;
use support::{JOB, Scene};

#[test]
fn memory_that_stays_on_the_gpu_is_in_the_image_and_comes_back() {
    if !can_run() {
        return;
    }
    let scene = Scene::start("resident");
    scene.place.wait_for("out", "\n10 ");
    scene.resident_snapshot();
    scene.rests();
    assert!(scene.count(" drain ") == 1, "{}", scene.said());
    scene.run.crash();
    scene.ends_as_ever();
}

#[test]
fn without_room_for_a_shadow_memory_goes_into_the_image_while_the_job_stands_still() {
    if !can_run() {
        return;
    }
    let scene = Scene::with(FakeGpu::with(2, 64), "resident", &JOB, &[]);
    scene.rests();
    scene.resident_snapshot();
    scene.run.crash();
    scene.ends_as_ever();
}
