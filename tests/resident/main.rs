//! Device memory that stays on the GPU while the job is suspended, on the fake GPU (`tests/fake-cuda`) with the real
//! program and the real CRIU. Whatever happens, the job ends as one that nobody touched.

mod busy;
mod by_hand;
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

use common::{can_run, wait_until};
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
fn where_a_gpu_has_room_twice_memory_is_filled_while_the_killed_job_ends() {
    if !can_run() {
        return;
    }
    for (mib, times) in [(3072, 2), (10, 0)] {
        let verbose = [("CKPT_RUN_LOG_LEVEL", "debug")];
        let scene = Scene::with(FakeGpu::with(2, mib), "resident", &JOB, &verbose);
        scene.rests();
        for crash in 1..=2 {
            scene.place.snapshot();
            scene.run.crash();
            wait_until("the restore", || {
                scene.count("ckpt-run: restored ") == crash
            });
        }
        let said = "filled while the job ended";
        assert_eq!(scene.count(said), times, "{mib} MiB: {}", scene.said());
        scene.ends_as_ever();
    }
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
