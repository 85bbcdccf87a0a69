//! Options: no agent, a preloaded library of the job's own, a folder whose path cannot be preloaded from, another user
//! for the job.

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;

use super::scene::{JOB, Scene, gpu};
use crate::harness::{apply, as_root, as_root_and_user, stderr, wait_until};

fn environment(scene: &Scene) -> String {
    let bytes = fs::read(format!("/proc/{}/environ", scene.run.job())).expect("its environment");
    String::from_utf8_lossy(&bytes).replace('\0', "\n")
}

/// Returns the abstract names of agents.
fn sockets() -> String {
    fs::read_to_string("/proc/net/unix").expect("the sockets")
}

#[apply(as_root)]
fn without_an_agent_all_is_the_driver_s() {
    let scene = Scene::at_rest("driver");
    let environment = environment(&scene);
    assert!(!environment.contains("LD_PRELOAD"), "{environment}");
    assert!(!environment.contains("CKPT_RUN_AGENT"), "{environment}");
    let reason = scene.driver_snapshot();
    assert_eq!(reason, "");
    scene.run.crash();
    scene.ends_as_ever();
}

#[apply(as_root_and_user)]
fn a_library_that_the_job_loads_stays() {
    let scene = Scene::with(gpu(), "auto", &JOB, &[("LD_PRELOAD", "libm.so.6")]);
    scene.rests();
    let environment = environment(&scene);
    let token = environment
        .lines()
        .find_map(|line| line.strip_prefix("CKPT_RUN_AGENT="))
        .expect("a token");
    assert!(sockets().contains(token), "{}", sockets());
    let preload = environment
        .lines()
        .find_map(|line| line.strip_prefix("LD_PRELOAD="))
        .expect("libraries");
    assert!(
        preload.contains("libm.so.6") && preload.len() > 9,
        "{preload}"
    );
    let maps = fs::read_to_string(format!("/proc/{}/maps", scene.run.job())).expect("its maps");
    assert!(maps.contains("libm.so"), "{maps}");
    scene.resident_snapshot();
    scene.ends_as_ever();
}

#[apply(as_root)]
fn a_job_that_becomes_another_user_is_answered_for_by_its_agent() {
    let gpu = gpu();
    let all = Permissions::from_mode(0o777);
    fs::set_permissions(gpu.folder(), all).expect("GPUs for all users");
    let job = [&["--user", "65534"], &JOB[..]].concat();
    let scene = Scene::with(gpu, "auto", &job, &[]);
    scene.rests();
    let taken = scene.place.verb(&["snapshot"]);
    if taken.status.success() {
        assert_eq!(scene.count(" release "), 1, "{}", scene.said());
        scene.run.crash();
        scene.restored();
    } else {
        // Without CAP_SYS_RESOURCE it fails after the agent has released the memory and before it maps it again.
        let error = stderr(&taken);
        assert!(error.contains("CRIU: Can't get rlimit"), "{error}");
    }
    scene.ends_as_ever();
}

#[apply(as_root_and_user)]
fn store_path_unfit_for_preload_leaves_memory_to_driver() {
    let store = "my images";
    let variables = [("CKPT_RUN_STORE", store)];
    let mut scene = Scene::with(gpu(), "resident", &JOB, &variables);
    assert_eq!(scene.run.wait(), 125, "{}", scene.said());
    assert_eq!(scene.count("my images/bin contains a space"), 1);
    assert_eq!(scene.place.text("out"), "");

    let scene = Scene::with(gpu(), "auto", &JOB, &variables);
    scene.rests();
    let words = ["snapshot", "--store", store];
    let taken = scene.place.verb(&words);
    assert!(taken.status.success(), "{taken:?}{}", scene.said());
    assert_eq!(scene.count("through host memory"), 1, "{}", scene.said());
    scene.run.crash();
    wait_until("the restored job", || {
        scene.count("ckpt-run: restored ") == 1
    });
    scene.ends_as_ever();
}
