//! Threads that stand still within the driver, and agents that hang there.

use std::fs;
use std::time::Instant;

use crate::common::{can_run, wait_until};
use crate::support::{JOB, Scene, gpu, uninterrupted};

/// [`JOB`] with a thread that holds the driver's lock at step 20, where a lock of CUDA's does not see it.
fn holding() -> Scene {
    let job = [&["--hold-at", "20:go"], &JOB[2..]].concat();
    let scene = Scene::with(gpu(), "auto", &job, &[]);
    scene.rests();
    scene
}

#[test]
fn a_thread_that_holds_the_driver_s_lock_for_long_costs_a_snapshot() {
    if !can_run() {
        return;
    }
    let scene = holding();
    let error = scene.refused();
    assert!(error.contains("did not finish"), "{error}");
    scene.ends_as_ever();
}

#[test]
fn a_thread_that_holds_the_driver_s_lock_for_a_while_is_waited_for() {
    if !can_run() {
        return;
    }
    let mut scene = holding();
    std::thread::scope(|scope| {
        let taken = scope.spawn(|| scene.resident_snapshot());
        wait_until("the agent to hang", || agent_hangs(&scene));
        scene.go();
        taken.join().expect("a snapshot");
    });
    assert_eq!(scene.run.wait(), 0, "{}", scene.said());
    assert_eq!(scene.place.text("out"), uninterrupted());
}

/// Whether it was asked to try the driver and has no answer.
fn agent_hangs(scene: &Scene) -> bool {
    let tasks = fs::read_dir(format!("/proc/{}/task", scene.run.job())).expect("its threads");
    tasks.flatten().any(|task| {
        let read = |name| fs::read_to_string(task.path().join(name)).unwrap_or_default();
        let waits = format!("{} ", nix::libc::SYS_futex);
        read("comm").trim() == "ckpt-agent" && read("syscall").starts_with(&waits)
    })
}

#[test]
fn an_agent_that_hangs_before_it_let_go_is_given_up() {
    if !can_run() {
        return;
    }
    let scene = Scene::at_rest("auto");
    let path = scene.place.file("on");
    scene.rule(
        "hang",
        &format!("cuMemExportToShareableHandle:0:{}", path.display()),
    );
    let begun = Instant::now();
    let error = scene.refused();
    assert!(begun.elapsed().as_secs() < 20, "{error}");
    fs::write(path, "").expect("written");
    // What it does now changes nothing.
    scene.mend();
    wait_until("the agent", || {
        scene.place.verb(&["snapshot"]).status.success()
    });
    scene.resident_snapshot();
    scene.run.crash();
    scene.ends_as_ever();
}
