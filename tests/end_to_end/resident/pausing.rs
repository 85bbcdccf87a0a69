//! Pauses, and the last snapshot of a run that is stopped.

use nix::sys::signal::Signal;

use super::scene::{JOB, Scene, begin, uninterrupted};
use crate::harness::fake_gpu::{self, FakeGpu, alone};
use crate::harness::{Place, apply, as_root, as_root_and_user, stderr, wait_until};

fn done(scene: &Scene, verb: &str) {
    let output = scene.place.verb(&[verb]);
    let error = stderr(&output);
    assert!(output.status.success(), "{error}{}", scene.said());
}

#[apply(as_root_and_user)]
fn paused_job_has_no_gpu_memory() {
    let scene = Scene::at_rest("resident");
    let used = scene.used();
    done(&scene, "pause");
    assert_eq!(
        scene.count(" release "),
        0,
        "the driver's way: {}",
        scene.said()
    );
    scene.gpu.assert_free("paused");
    done(&scene, "unpause");
    // A copier has a context for a moment.
    wait_until("the memory", || scene.used() == used);
    scene.resident_snapshot();
    for _ in 0..2 {
        done(&scene, "pause");
        scene.gpu.assert_free("paused");
        done(&scene, "unpause");
        wait_until("the memory", || scene.used() == used);
    }
    scene.resident_snapshot();
    scene.run.crash();
    scene.ends_as_ever();
}

#[apply(as_root_and_user)]
fn a_job_whose_memory_cannot_be_read_yet_stays_paused() {
    let scene = Scene::at_rest("resident");
    scene.resident_snapshot();
    done(&scene, "pause");
    for call in ["cuMemCreate", "cuMemcpyHtoDAsync_v2"] {
        scene.fail_next("caller-fail", call, 1);
        let output = scene.place.verb(&["unpause"]);
        assert_ne!(output.status.code(), Some(0));
        assert_eq!(scene.left(call), 0);
        scene.mend();
        scene.gpu.assert_free("paused");
    }
    assert_eq!(scene.count("the job stays paused"), 2, "{}", scene.said());
    done(&scene, "unpause");
    scene.resident_snapshot();
    scene.ends_as_ever();
}

#[apply(as_root_and_user)]
fn killed_paused_job_uses_no_gpu_until_unpaused() {
    let scene = Scene::with(FakeGpu::with(2, 64), "resident", &JOB, &[]);
    scene.rests();
    done(&scene, "pause");
    scene.run.crash();
    scene.place.wait_for("err", "the paused job crashed");
    scene.gpu.assert_free("paused and killed");
    let place = Place::new();
    let needs = ["--segments", "60M", "--renew", "1000", "--wait-at", "1:go"];
    let mut other = alone(&place, &scene.gpu, &needs);
    wait_until("the other job", || scene.used()[0] > 60 << 20);
    let output = scene.place.verb(&["unpause"]);
    let said = stderr(&output);
    assert!(said.contains("free and the job needs"), "{said}");
    place.go();
    assert_eq!(other.wait(), 0);
    done(&scene, "unpause");
    scene.ends_as_ever();
}

#[apply(as_root)]
fn stopped_run_continues_from_its_last_snapshot() {
    let Scene {
        place,
        gpu,
        mut run,
    } = Scene::at_rest("resident");
    run.signal(Signal::SIGTERM);
    run.wait();
    let said = place.text("err");
    assert!(said.contains(" release "), "{said}");
    gpu.assert_free("at its end");
    let program = fake_gpu::job();
    let words = [&[program.to_str().expect("a path")], &JOB[..]].concat();
    let mut run = begin(&place, &gpu, "resident", &words, &[]);
    place.go();
    assert_eq!(run.wait(), 0, "{}", place.text("err"));
    assert_eq!(place.text("out"), uninterrupted());
    gpu.assert_free("at its end");
}
