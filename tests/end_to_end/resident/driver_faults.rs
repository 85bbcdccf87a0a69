//! Failure of every driver call that can fail: in the agent, in the supervisor, in the copier.

use super::scene::{JOB, Scene, gpu};
use crate::harness::{apply, as_root_and_user, stderr};

/// Message that results from an agent's reply about a failed driver call.
const ANSWERED: &str = "the driver returned 999 to its agent";

#[apply(as_root_and_user)]
fn driver_suspends_memory_that_agents_cannot() {
    let scene = Scene::at_rest("auto");
    for call in [
        "cuMemExportToShareableHandle",
        "cuCtxSetCurrent",
        "cuMemAddressReserve",
        "cuMemCreate",
        "cuMemMap",
        "cuMemUnmap",
    ] {
        scene.rule("fail", &format!("{call}:0:999"));
        let reason = scene.driver_snapshot();
        assert!(reason.contains(ANSWERED), "{call}: {reason}");
        scene.mend();
    }
    scene.resident_snapshot();
    scene.run.crash();
    scene.ends_as_ever();
}

/// Result in a process whose driver has shut down, as it does before the process exits.
const DEINITIALIZED: i32 = 4;

#[apply(as_root_and_user)]
fn a_process_that_is_about_to_end_is_waited_for() {
    let scene = Scene::at_rest("auto");
    scene.answer_next("fail", "cuCtxSetCurrent", 1, DEINITIALIZED);
    scene.resident_snapshot();
    let again = "the snapshot is taken again: process";
    assert_eq!(scene.count(again), 1, "{}", scene.said());
    scene.mend();
    scene.ends_as_ever();
}

/// The driver shuts down while it is waited for, between the release of the memory and its return.
#[apply(as_root_and_user)]
fn a_process_that_has_begun_to_end_is_left_to_it() {
    let scene = Scene::at_rest("resident");
    scene.resident_snapshot();
    // The second lock of the next snapshot.
    scene.rule("caller-fail", "cuCheckpointProcessLock:4:999");
    let call = "cuMemImportFromShareableHandle";
    scene.answer_next("fail", call, 3, DEINITIALIZED);
    let error = scene.refused();
    assert!(error.contains("lock the job's CUDA processes"), "{error}");
    assert_eq!(scene.left(call), 2, "{}", scene.said());
    assert_eq!(scene.count("the job may be damaged"), 0, "{}", scene.said());
    scene.mend();
    scene.run.crash();
    scene.ends_as_ever();
}

#[apply(as_root_and_user)]
fn a_call_of_the_agent_that_fails_costs_a_snapshot_at_most() {
    let scene = Scene::at_rest("resident");
    scene.resident_snapshot();
    for (call, fails) in [
        ("cuCtxSetCurrent", true),
        ("cuMemAddressReserve", true),
        ("cuMemUnmap", true),
        ("cuMemMap", true),
        ("cuMemRelease", false),
        ("cuMemImportFromShareableHandle", false),
        ("cuMemSetAccess", false),
    ] {
        scene.fail_next("fail", call, 1);
        if fails {
            let error = scene.refused();
            assert!(error.contains(ANSWERED), "{call}: {error}");
        } else {
            scene.resident_snapshot();
        }
        assert_eq!(scene.left(call), 0, "{call}: {}", scene.said());
        scene.mend();
    }
    scene.resident_snapshot();
    scene.ends_as_ever();
}

#[apply(as_root_and_user)]
fn job_is_restored_if_memory_cannot_be_mapped_again() {
    let scene = Scene::at_rest("resident");
    scene.resident_snapshot();
    for call in ["cuMemImportFromShareableHandle", "cuMemSetAccess"] {
        // Once for each attempt.
        scene.fail_next("fail", call, 3);
        let error = {
            let output = scene.place.verb(&["snapshot"]);
            stderr(&output)
        };
        assert!(
            error.contains("lost") && error.contains(ANSWERED),
            "{error}"
        );
        scene.mend();
        scene.restored();
        scene.resident_snapshot();
    }
    scene.ends_as_ever();
}

#[apply(as_root_and_user)]
fn a_second_lock_that_fails_gives_the_memory_back() {
    let scene = Scene::at_rest("resident");
    scene.rule("caller-fail", "cuCheckpointProcessLock:2:999");
    let error = scene.refused();
    assert!(error.contains("lock the job's CUDA processes"), "{error}");
    scene.resident_snapshot();
    scene.run.crash();
    scene.ends_as_ever();
}

/// Simulates a thread that was halted at a point that the driver waits for.
#[apply(as_root_and_user)]
fn second_lock_timeout_halts_the_job_again() {
    let patient = [("CKPT_RUN_SNAPSHOT_LOCK_TIMEOUT", "60s")];
    let scene = Scene::with(gpu(), "resident", &JOB, &patient);
    scene.rests();
    // More than the attempts before giving up (14), so that the third lock begins with some.
    let in_vain: Vec<_> = (2..40)
        .map(|nth| format!("cuCheckpointProcessLock:{nth}:600"))
        .collect();
    scene.rule("caller-fail", &in_vain.join(","));
    scene.resident_snapshot();
    let said = scene.said();
    // A phase for each time that the job was stopped.
    let phases = (0..=9).map(|digit| said.matches(&format!(" lock {digit}")).count());
    assert!(phases.sum::<usize>() >= 2, "{said}");
    scene.run.crash();
    scene.ends_as_ever();
}

#[apply(as_root_and_user)]
fn a_call_of_the_supervisor_that_fails_costs_a_snapshot_at_most() {
    let scene = Scene::at_rest("auto");
    for (call, fails) in [
        ("cuCheckpointProcessLock", true),
        ("cuCheckpointProcessCheckpoint", true),
        ("cuCheckpointProcessRestore", false),
        ("cuCheckpointProcessUnlock", false),
    ] {
        scene.fail_next("caller-fail", call, 1);
        if fails {
            let error = scene.refused();
            assert!(error.contains("the job computes"), "{call}: {error}");
        } else {
            scene.place.snapshot();
        }
        assert_eq!(scene.left(call), 0, "{call}: {}", scene.said());
        scene.mend();
        scene.resident_snapshot();
    }
    scene.run.crash();
    scene.ends_as_ever();
}
