//! Memory that stays on the GPU: its place in the image, its restore, and the effects of free memory.

use super::scene::{JOB, Scene, begin, gpu, words};
use crate::harness::fake_gpu::{FakeGpu, UUIDS};
use crate::harness::{apply, as_root_and_user, wait_until, wait_until_or};

#[apply(as_root_and_user)]
fn resident_memory_is_in_the_image_and_is_restored() {
    let scene = Scene::start("resident");
    scene.place.wait_for("out", "\n10 ");
    scene.resident_snapshot();
    scene.rests();
    assert!(scene.count(" drain ") == 1, "{}", scene.said());
    scene.run.crash();
    scene.ends_as_ever();
}

#[apply(as_root_and_user)]
fn memory_is_filled_before_the_restore_of_a_killed_job() {
    for mib in [3072, 9] {
        // At the end of the backoff it is filled, and the restore finds little free memory.
        let settings = [
            ("CKPT_RUN_LOG_LEVEL", "debug"),
            ("CKPT_RUN_RESTART_BACKOFF", "1s"),
        ];
        let scene = Scene::with(FakeGpu::with(2, mib), "resident", &JOB, &settings);
        scene.rests();
        for crash in 1..=2 {
            scene.place.snapshot();
            scene.run.crash();
            wait_until("the restore", || {
                scene.count("ckpt-run: restored ") == crash
            });
        }
        let said = "filled while the job exited";
        assert_eq!(scene.count(said), 2, "{mib} MiB: {}", scene.said());
        scene.ends_as_ever();
    }
}

#[apply(as_root_and_user)]
fn memory_usage_includes_returned_memory() {
    let verbose = [("CKPT_RUN_LOG_LEVEL", "debug")];
    let job = [&["--segments", "8M,6M"], &JOB[..4], &JOB[6..]].concat();
    let scene = Scene::with(gpu(), "resident", &job, &verbose);
    scene.rests();
    for snapshot in 1..=4 {
        scene.place.snapshot();
        let room = format!("room for a shadow gpu={} bytes={}", UUIDS[0], 14 << 20);
        assert_eq!(scene.count(&room), snapshot, "{}", scene.said());
        if snapshot == 3 {
            scene.run.crash();
            wait_until("the restore", || scene.count("ckpt-run: restored ") == 1);
        }
    }
    let used = |image: &serde_json::Value| {
        let output = scene
            .place
            .verb(&["show", "--json", image["id"].as_str().expect("an ID")]);
        let shown: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
        let gpus = shown["cuda"]["gpus"].as_array().expect("GPUs").iter();
        gpus.map(|gpu| gpu["used_bytes"].as_u64())
            .collect::<Vec<_>>()
    };
    let used: Vec<_> = scene.place.images().iter().map(used).collect();
    assert_eq!(used.len(), 4);
    assert!(
        used[0][0] > Some(14 << 20) && used.iter().all(|one| *one == used[0]),
        "{used:?}"
    );
}

#[apply(as_root_and_user)]
fn memory_without_a_shadow_is_copied_during_the_freeze() {
    let scene = Scene::with(FakeGpu::with(2, 64), "resident", &JOB, &[]);
    scene.rests();
    scene.resident_snapshot();
    scene.run.crash();
    scene.ends_as_ever();
}

#[apply(as_root_and_user)]
fn unchanged_memory_is_not_copied() {
    let scene = Scene::at_rest("resident");
    scene.resident_snapshot();
    scene.rule("caller-fail", "cuMemcpyDtoHAsync_v2");
    // Images whose memory is named again, also after the first of them.
    scene.resident_snapshot();
    scene.resident_snapshot();
    scene.mend();
    scene.run.crash();
    scene.ends_as_ever();
}

#[apply(as_root_and_user)]
fn a_new_supervisor_copies_no_unchanged_memory() {
    let mut scene = Scene::at_rest("resident");
    scene.resident_snapshot();
    scene.run.kill_supervisor();
    scene.run = begin(&scene.place, &scene.gpu, "resident", &words(&JOB), &[]);
    wait_until_or(|| scene.said(), || scene.count("ckpt-run: restored ") == 1);
    scene.rule("caller-fail", "cuMemcpyDtoHAsync_v2");
    scene.resident_snapshot();
    scene.mend();
    scene.run.crash();
    scene.ends_as_ever();
}

#[apply(as_root_and_user)]
fn memory_is_copied_if_the_gpu_cannot_compare_it() {
    for call in [
        "cuModuleLoadData",
        "cuModuleGetFunction",
        "cuLaunchKernel",
        "cuMemcpyDtoH_v2",
    ] {
        let scene = Scene::at_rest("resident");
        scene.rule("caller-fail", call);
        scene.resident_snapshot();
        scene.resident_snapshot();
        scene.mend();
        scene.run.crash();
        scene.ends_as_ever();
    }
}
