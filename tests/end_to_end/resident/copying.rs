//! Copier that fails, is killed, or cannot start.

use std::fs;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::scene::{self, JOB, Scene, begin, words};
use crate::harness::{
    apply, as_root, as_root_and_user, damage, descendants, wait_until, wait_until_gone,
    wait_until_or,
};

/// Message about memory that did not have the fingerprints of the snapshot.
const AGAIN: &str = "filling it again";
/// Message about memory that still had other fingerprints.
const ALTERED: &str = "differs from that of the snapshot";
/// Stream of the fingerprints in an image.
const FINGERPRINTS: &str = "gpu/fingerprints";

/// Returns the copier of the snapshot in progress.
fn copier(scene: &Scene) -> Option<i32> {
    descendants(scene.run.pid()).into_iter().find(|pid| {
        let command = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        command
            .split(|byte| *byte == 0)
            .any(|word| word == b"gpu-copier")
    })
}

#[apply(as_root_and_user)]
fn driver_suspends_memory_if_the_copier_cannot_start() {
    let scene = Scene::at_rest("auto");
    let calls = [
        "cuDevicePrimaryCtxRetain",
        "cuStreamCreate",
        "cuMemHostRegister_v2",
        "cuMemGetInfo_v2",
    ];
    for call in calls {
        scene.fail_next("caller-fail", call, 1);
        let reason = scene.driver_snapshot();
        assert!(reason.contains("copy GPU memory"), "{call}: {reason}");
        assert_eq!(scene.left(call), 0, "{call}");
        scene.mend();
    }
    scene.resident_snapshot();
    for call in calls {
        // The prepared copier, and its replacement.
        scene.fail_next("caller-fail", call, 2);
        let error = scene.refused();
        assert!(error.contains("copy GPU memory"), "{call}: {error}");
        scene.mend();
    }
    scene.resident_snapshot();
    scene.ends_as_ever();
}

#[apply(as_root_and_user)]
fn waiting_copier_uses_no_gpu_and_ends_with_the_run() {
    let scene = Scene::at_rest("resident");
    let before = scene.used();
    assert_eq!(copier(&scene), None);
    scene.resident_snapshot();
    wait_until("a copier", || copier(&scene).is_some());
    wait_until("the GPU memory of the one before to be free", || {
        scene.used() == before
    });
    scene.resident_snapshot();
    wait_until("the next one", || copier(&scene).is_some());
    let waiting = copier(&scene).expect("it waits");
    scene.ends_as_ever();
    wait_until_gone(&[waiting]);
}

#[apply(as_root_and_user)]
fn a_copier_that_fails_costs_a_snapshot_at_most() {
    let scene = Scene::copying("resident");
    scene.rests();
    let used = {
        scene.resident_snapshot();
        scene.used()
    };
    for (call, fails) in [
        ("cuMemImportFromShareableHandle", true),
        ("cuMemAddressReserve", true),
        ("cuMemSetAccess", true),
        ("cuMemcpyDtoDAsync_v2", true),
        ("cuMemcpyDtoHAsync_v2", true),
        // Without memory for a shadow the data go directly into the image.
        ("cuMemAlloc_v2", false),
    ] {
        scene.fail_next("caller-fail", call, 1);
        if fails {
            let error = scene.refused();
            assert!(error.contains("copy GPU memory"), "{call}: {error}");
        } else {
            scene.rule("caller-fail", &format!("{call}:token:2"));
            scene.place.snapshot();
        }
        assert_eq!(scene.left(call), 0, "{call}");
        scene.mend();
        scene.resident_snapshot();
        wait_until("the copier's memory to be free", || scene.used() == used);
    }
    scene.run.crash();
    scene.ends_as_ever();
}

#[apply(as_root_and_user)]
fn a_restore_whose_copier_fails_is_made_from_the_image_before() {
    for (call, times, failed) in [
        // The first failure hits the memory that is filled while the job exits.
        ("cuMemCreate", 1, 0),
        ("cuMemCreate", 2, 1),
        ("cuMemExportToShareableHandle", 2, 1),
        ("cuMemcpyHtoDAsync_v2", 1, 0),
        // As long as another copier can be started, the restore continues.
        ("cuDevicePrimaryCtxRetain", 2, 0),
        ("cuDevicePrimaryCtxRetain", 3, 1),
    ] {
        let scene = Scene::at_rest("resident");
        scene.resident_snapshot();
        scene.resident_snapshot();
        scene.fail_next("caller-fail", call, times);
        scene.run.crash();
        scene.place.wait_for("err", "ckpt-run: restored ");
        assert_eq!(scene.count("restore failed"), failed, "{}", scene.said());
        assert_eq!(scene.left(call), 0, "{call}");
        scene.ends_as_ever();
    }
}

#[apply(as_root_and_user)]
fn memory_that_arrives_altered_on_the_gpu_is_filled_again() {
    let scene = Scene::at_rest("resident");
    scene.resident_snapshot();
    // A copy reports success and has no effect; or the GPU does not compute the fingerprints.
    for (call, code) in [("cuMemcpyHtoDAsync_v2", 0), ("cuLaunchKernel", 999)] {
        let before = scene.count("ckpt-run: restored ");
        scene.answer_next("caller-fail", call, 1, code);
        scene.run.crash();
        wait_until("the restored job", || {
            scene.count("ckpt-run: restored ") > before
        });
        assert_eq!(scene.left(call), 0, "{call}");
        // Once for the copy: a GPU that computes no fingerprints is no reason for a warning.
        assert_eq!(scene.count(AGAIN), 1, "{}", scene.said());
        scene.mend();
    }
    scene.ends_as_ever();
}

#[apply(as_root_and_user)]
fn a_new_supervisor_compares_restored_memory_too() {
    let mut scene = Scene::at_rest("resident");
    scene.resident_snapshot();
    scene.run.kill_supervisor();
    scene.answer_next("caller-fail", "cuMemcpyHtoDAsync_v2", 1, 0);
    scene.run = begin(&scene.place, &scene.gpu, "resident", &words(&JOB), &[]);
    wait_until_or(|| scene.said(), || scene.count("ckpt-run: restored ") == 1);
    assert_eq!(scene.count(AGAIN), 1, "{}", scene.said());
    scene.mend();
    scene.run.crash();
    scene.ends_as_ever();
}

#[apply(as_root_and_user)]
fn memory_that_was_altered_at_a_snapshot_is_not_restored() {
    let gpu = scene::gpu();
    // No file of the job.
    let first = gpu.folder().join("first");
    let wait = format!("10:{}", first.display());
    let job = [&["--wait-at", &wait], &JOB[..]].concat();
    let scene = Scene::with(gpu, "resident", &job, &[]);
    scene.place.wait_for("out", "\n10 ");
    scene.resident_snapshot();
    fs::write(first, "").expect("written");
    scene.rests();
    // A copy from the GPU reports success and has no effect.
    scene.answer_next("caller-fail", "cuMemcpyDtoHAsync_v2", 1, 0);
    scene.resident_snapshot();
    assert_eq!(scene.left("cuMemcpyDtoHAsync_v2"), 0);
    scene.mend();
    scene.run.crash();
    scene.place.wait_for("err", "ckpt-run: restored ");
    assert_eq!(scene.count(ALTERED), 1, "{}", scene.said());
    scene.ends_as_ever();
}

#[apply(as_root_and_user)]
fn memory_that_always_arrives_altered_ends_the_run() {
    let mut scene = Scene::at_rest("resident");
    scene.resident_snapshot();
    scene.resident_snapshot();
    scene.rule("caller-fail", "cuMemcpyHtoDAsync_v2:0:0");
    scene.run.crash();
    assert_eq!(scene.run.wait(), 125);
    let said = scene.said();
    assert!(said.contains(ALTERED), "{said}");
    assert_eq!(scene.count("restore failed"), 2, "{said}");
    assert_eq!(scene.count("ckpt-run: restored "), 0, "{said}");
    scene.gpu.assert_free("after the refusal");
}

#[apply(as_root)]
fn damaged_gpu_memory_of_an_image_is_not_restored() {
    let is_memory = |name: &str| name.starts_with("gpu/") && name != FINGERPRINTS;
    let are_fingerprints = |name: &str| name == FINGERPRINTS;
    for (start, is_wanted, is_compared) in [
        (
            Scene::at_rest as fn(&str) -> Scene,
            is_memory as fn(&str) -> bool,
            true,
        ),
        (Scene::at_rest, are_fingerprints, false),
        // The image has no fingerprints.
        (Scene::copying, is_memory, false),
    ] {
        let mut scene = start("resident");
        scene.rests();
        let image = scene.place.snapshot();
        damage(&scene.place, &image, |stream| is_wanted(&stream.name));
        scene.run.crash();
        assert_eq!(scene.run.wait(), 125);
        let said = scene.said();
        assert_eq!(said.contains(AGAIN), is_compared, "{said}");
        assert!(said.contains("its stored bytes have changed"), "{said}");
        scene.gpu.assert_free("after the refusal");
    }
}

#[apply(as_root_and_user)]
fn a_copier_that_is_killed_in_the_midst_costs_a_snapshot() {
    // During the freeze, and while the job computes.
    for call in [
        "cuMemImportFromShareableHandle",
        "cuMemcpyDtoDAsync_v2",
        "cuMemcpyDtoHAsync_v2",
    ] {
        let scene = Scene::copying("resident");
        scene.place.wait_for("out", "\n5 ");
        scene.resident_snapshot();
        let never = scene.place.file("never");
        scene.rule("caller-hang", &format!("{call}:0:{}", never.display()));
        let error = std::thread::scope(|scope| {
            let refused = scope.spawn(|| scene.refused());
            wait_until("the copier", || copier(&scene).is_some());
            // It hangs for good, so any moment is in the middle of the call.
            wait_until("the copier to hang", || scene.hangs(call));
            let pid = Pid::from_raw(copier(&scene).expect("it hangs"));
            kill(pid, Signal::SIGKILL).expect("killed");
            refused.join().expect("an error")
        });
        assert!(error.contains("copy GPU memory"), "{call}: {error}");
        scene.mend();
        scene.resident_snapshot();
        scene.rests();
        scene.run.crash();
        scene.ends_as_ever();
    }
}
