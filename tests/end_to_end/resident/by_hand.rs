//! Use of `ckpt-run cuda` on processes that have an agent.

use std::process::Output;

use super::scene::Scene;
use crate::harness::{apply, as_root_and_user, stderr, stdout};

/// Runs a verb that calls the driver itself, for the job's process.
fn cuda(scene: &Scene, verb: &str) -> Output {
    let pid = scene.run.job().to_string();
    let command = scene.place.command(&["cuda", verb, "--pid", &pid]);
    let mut wrapped = scene.gpu.wrap(&command);
    wrapped.output().expect("ckpt-run starts")
}

/// Returns the printed state.
fn state(scene: &Scene, verb: &str) -> String {
    let output = cuda(scene, verb);
    let errors = stderr(&output);
    assert!(output.status.success(), "{errors}");
    let said = stdout(&output);
    said.split_whitespace()
        .last()
        .unwrap_or_default()
        .to_owned()
}

#[apply(as_root_and_user)]
fn cuda_verbs_refuse_a_job_that_needs_its_agent() {
    let scene = Scene::at_rest("resident");
    scene.resident_snapshot();
    for verb in ["suspend", "toggle", "checkpoint"] {
        let refused = cuda(&scene, verb);
        assert_eq!(refused.status.code(), Some(1));
        let error = stderr(&refused);
        assert!(error.contains("ckpt-run pause --store /"), "{error}");
        assert_eq!(state(&scene, "state"), "running");
    }
    assert_eq!(state(&scene, "lock"), "locked");
    assert_eq!(cuda(&scene, "checkpoint").status.code(), Some(1));
    assert_eq!(state(&scene, "unlock"), "running");
    scene.resident_snapshot();
    scene.ends_as_ever();
}

#[apply(as_root_and_user)]
fn a_job_that_was_suspended_by_hand_stays_so_through_a_snapshot() {
    let scene = Scene::at_rest("auto");
    assert_eq!(state(&scene, "suspend"), "checkpointed");
    scene.driver_snapshot();
    assert_eq!(state(&scene, "state"), "checkpointed");
    assert_eq!(state(&scene, "toggle"), "running");
    scene.ends_as_ever();
}
