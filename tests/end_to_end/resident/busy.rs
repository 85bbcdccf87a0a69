//! Threads that are halted within the driver or hold a lock that it needs, and agents that hang there.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::scene::{JOB, Scene, gpu, uninterrupted};
use crate::harness::{apply, as_root, as_root_and_user, wait_until};

/// Starts [`JOB`] with these options and a thread that holds the driver's lock at step 20, where CUDA's lock does not
/// detect it.
fn holding(options: &[&str]) -> Scene {
    let job = [&["--hold-at", "20:go"], &JOB[2..], options].concat();
    let scene = Scene::with(gpu(), "auto", &job, &[]);
    wait_until("the lock", || scene.hangs("fakeHoldDriverLock"));
    scene
}

#[apply(as_root_and_user)]
fn thread_holding_the_drivers_lock_long_fails_a_snapshot() {
    let scene = holding(&[]);
    let error = scene.refused();
    assert!(error.contains("did not finish"), "{error}");
    scene.ends_as_ever();
}

#[apply(as_root_and_user)]
fn thread_holding_the_drivers_lock_briefly_is_awaited() {
    let mut scene = holding(&["--wait-at", "25:end"]);
    let agent = agent(&scene);
    std::thread::scope(|scope| {
        let taken = scope.spawn(|| scene.resident_snapshot());
        wait_until("the agent to hang", || hangs(&agent));
        scene.go();
        taken.join().expect("a snapshot");
    });
    fs::write(scene.place.file("end"), "").expect("written");
    assert_eq!(scene.run.wait(), 0, "{}", scene.said());
    assert_eq!(scene.place.text("out"), uninterrupted());
}

/// Starts [`JOB`] with threads that nearly always hold the lock of the only heap, wherever they are halted.
fn allocating(memory: &str) {
    /// Two at once would leave no processor to the thread that must run.
    static ALONE: Mutex<()> = Mutex::new(());
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let job = [&["--allocators", "3"], &JOB[..]].concat();
    let one_heap = [("MALLOC_ARENA_MAX", "1")];
    let scene = Scene::with(gpu(), memory, &job, &one_heap);
    scene.rests();
    scene.place.snapshot();
    scene.place.snapshot();
    scene.run.crash();
    scene.ends_as_ever();
}

#[apply(as_root_and_user)]
fn threads_that_allocate_all_the_time_are_stopped_without_harm() {
    allocating("auto");
}

#[apply(as_root_and_user)]
fn constantly_allocating_threads_do_not_block_the_driver() {
    allocating("driver");
}

/// Takes a snapshot, not the first, whose suspend lasts until `condition` and then fails as with a dead process; the
/// job is restored.
fn dies_in_the_suspend(scene: &Scene, condition: impl Fn() -> bool) {
    scene.place.snapshot();
    let call = "cuCheckpointProcessCheckpoint";
    let path = scene.place.file("dead");
    scene.rule("caller-hang", &format!("{call}:0:{}", path.display()));
    std::thread::scope(|scope| {
        let refused = scope.spawn(|| scene.place.verb(&["snapshot"]));
        wait_until("the suspend", || scene.hangs(call));
        wait_until("the job's death", condition);
        scene.mend();
        fs::write(&path, "").expect("written");
        let output = refused.join().expect("an answer");
        assert_eq!(output.status.code(), Some(125), "{}", scene.said());
    });
    wait_until("the restored job", || {
        scene.count("ckpt-run: restored ") == 1
    });
    scene.resident_snapshot();
}

#[apply(as_root)]
fn hanging_driver_loses_work_since_the_newest_image() {
    let impatient = [("CKPT_RUN_SNAPSHOT_TIMEOUT", "8s")];
    let scene = Scene::with(gpu(), "auto", &JOB, &impatient);
    scene.rests();
    let killed = "did not finish within 8s";
    dies_in_the_suspend(&scene, || scene.said().contains(killed));
    scene.ends_as_ever();
}

#[apply(as_root)]
fn a_job_that_is_killed_in_the_suspend_is_no_failed_snapshot() {
    let scene = Scene::at_rest("auto");
    let job = Pid::from_raw(scene.run.job());
    dies_in_the_suspend(&scene, || kill(job, Signal::SIGKILL).is_ok());
    let said = scene.said();
    assert!(said.contains("snapshot cancelled"), "{said}");
    assert!(!said.contains("snapshot failed"), "{said}");
    scene.ends_as_ever();
}

/// Returns the folder of the agent's thread in `/proc`.
fn agent(scene: &Scene) -> PathBuf {
    let tasks = fs::read_dir(format!("/proc/{}/task", scene.run.job())).expect("its threads");
    let mut tasks = tasks.flatten().map(|task| task.path());
    let name = |task: &PathBuf| fs::read_to_string(task.join("comm")).unwrap_or_default();
    tasks
        .find(|task| name(task).trim() == "ckpt-agent")
        .expect("an agent")
}

/// Returns true if the agent was asked to test the driver and has not replied.
fn hangs(agent: &Path) -> bool {
    let waits = format!("{} ", nix::libc::SYS_futex);
    fs::read_to_string(agent.join("syscall")).is_ok_and(|call| call.starts_with(&waits))
}

#[apply(as_root_and_user)]
fn agent_hanging_before_its_release_is_abandoned() {
    let scene = Scene::at_rest("auto");
    let path = scene.place.file("on");
    scene.rule(
        "hang",
        &format!("cuMemExportToShareableHandle:0:{}", path.display()),
    );
    scene.refused();
    fs::write(path, "").expect("written");
    // Its present actions change nothing.
    scene.mend();
    wait_until("the agent", || {
        scene.place.verb(&["snapshot"]).status.success()
    });
    scene.resident_snapshot();
    scene.run.crash();
    scene.ends_as_ever();
}
