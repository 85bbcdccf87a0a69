//! GPU jobs on the fake GPU (`tests/fake-cuda`) with the real program and the real CRIU: snapshots by the driver, and
//! the driver's known faults.

use std::fs;
use std::process::Output;
use std::sync::OnceLock;
use std::thread;

use crate::harness::fake_gpu::{self, FakeGpu, UUIDS, alone, ends_as, untouched};
use crate::harness::{
    Place, Run, apply, as_root, as_root_and_user, criu_script, stderr, stdout, wait_until,
};

/// Job that runs long enough for the test's actions; it waits at step 20 for a file `go`.
const JOB: [&str; 8] = [
    "--threads",
    "2",
    "--steps",
    "30",
    "--pause-ms",
    "2",
    "--wait-at",
    "20:go",
];
/// Starts a supervised job.
fn supervised(place: &Place, gpu: &FakeGpu, arguments: &[&str]) -> Run {
    let mut command = place.command(&["--interval", "never", "--"]);
    command.arg(fake_gpu::job()).args(arguments);
    place.spawn(gpu.wrap(&command), |_| {})
}

/// Runs a verb that calls the driver itself.
fn cuda(place: &Place, gpu: &FakeGpu, arguments: &[&str]) -> Output {
    let mut command = place.command(&["cuda"]);
    command.args(arguments);
    gpu.wrap(&command).output().expect("ckpt-run starts")
}

/// Runs a verb for the job and checks the resulting state.
#[track_caller]
fn leaves(place: &Place, gpu: &FakeGpu, run: &Run, arguments: &[&str], state: &str) -> Output {
    let pid = run.pid().to_string();
    let done = cuda(place, gpu, &[arguments, &["--pid", &pid]].concat());
    let told = format!("{pid} {state}\n");
    assert_eq!(stdout(&done), told, "{}", stderr(&done));
    done
}

/// Lets a [`JOB`] run to its end, which must equal that of an undisturbed one.
fn ends_as_ever(place: &Place, run: &mut Run) {
    static UNTOUCHED: OnceLock<String> = OnceLock::new();
    let ends = UNTOUCHED.get_or_init(|| untouched(&FakeGpu::new(), &JOB[..6]));
    ends_as(place, run, ends);
}

#[apply(as_root_and_user)]
fn killed_gpu_job_is_restored_and_completes() {
    let (place, gpu) = (Place::new(), FakeGpu::new());
    let mut run = supervised(&place, &gpu, &[&JOB[..], &["--log", "log"]].concat());
    place.wait_for("out", "\n10 ");
    place.snapshot();
    place.wait_for("out", "\n20 ");
    run.crash();
    ends_as_ever(&place, &mut run);
    assert_eq!(place.text("log") + "done\n", place.text("out"));
    gpu.assert_free("at its end");
}

/// ckpt-run makes a system call in each thread of such a job before the thread runs.
#[apply(as_root_and_user)]
fn a_gpu_job_with_a_personality_waits_for_its_gpu_memory() {
    let (place, gpu) = (Place::new(), FakeGpu::new());
    let mut command = place.command(&["--interval", "never", "--", "setarch", "-R"]);
    command.arg(fake_gpu::job()).args(JOB);
    let mut run = place.spawn(gpu.wrap(&command), |_| {});
    place.wait_for("out", "\n10 ");
    place.snapshot();
    place.wait_for("out", "\n20 ");
    run.crash();
    ends_as_ever(&place, &mut run);
}

#[apply(as_root)]
fn suspended_memory_can_be_resumed_on_another_gpu() {
    let (place, gpu) = (Place::new(), FakeGpu::new());
    let mut run = alone(
        &place,
        &gpu,
        &[&JOB[2..], &["--segments", "300,4M"]].concat(),
    );
    place.wait_for("out", "\n20 ");
    let pid = run.pid().to_string();
    let [on_first, on_second] = [0, 1].map(|device| gpu.used_bytes(device));
    assert!(on_first > 4 << 20, "{on_first}");
    assert_eq!(on_second, 0);
    leaves(&place, &gpu, &run, &["suspend"], "checkpointed");
    gpu.assert_used(0, 0, "suspended");
    let [first, second] = UUIDS;
    let short = format!("{first}={second}");
    let refused = cuda(
        &place,
        &gpu,
        &["resume", "--pid", &pid, "--gpu-map", &short],
    );
    assert_eq!(refused.status.code(), Some(1), "{}", stderr(&refused));
    assert!(
        stderr(&refused).contains("map lacks one"),
        "{}",
        stderr(&refused)
    );
    let map = format!("{first}={second},{second}={first}");
    leaves(
        &place,
        &gpu,
        &run,
        &["resume", "--gpu-map", &map],
        "running",
    );
    gpu.assert_used(0, 0, "moved");
    gpu.assert_used(1, on_first, "moved");
    let arguments = [&JOB[2..6], &["--segments", "300,4M"]].concat();
    ends_as(&place, &mut run, &untouched(&gpu, &arguments));
}

#[apply(as_root)]
fn busy_job_is_not_locked_and_continues() {
    let (place, gpu) = (Place::new(), FakeGpu::new());
    let mut run = alone(
        &place,
        &gpu,
        &[&JOB[..6], &["--kernel-at", "20:go"]].concat(),
    );
    let computes = gpu.folder().join("hangs-fakeKernel");
    wait_until("the kernel", || computes.exists());
    let suspend = ["suspend", "--timeout", "200ms"];
    let busy = leaves(&place, &gpu, &run, &suspend, "running");
    assert_eq!(busy.status.code(), Some(1), "{}", stderr(&busy));
    ends_as_ever(&place, &mut run);
}

#[apply(as_root)]
fn a_call_that_hangs_keeps_a_job_from_being_locked() {
    let (place, gpu) = (Place::new(), FakeGpu::new());
    let rule = format!("cuMemFree_v2:1:{}", place.file("go").display());
    fs::write(gpu.folder().join("hang"), rule).expect("written");
    let mut run = alone(&place, &gpu, &JOB);
    let hangs = gpu.folder().join("hangs-cuMemFree_v2");
    wait_until("the call", || hangs.exists());
    let suspend = ["suspend", "--timeout", "200ms"];
    leaves(&place, &gpu, &run, &suspend, "running");
    ends_as_ever(&place, &mut run);
}

#[apply(as_root)]
fn thread_holding_the_drivers_lock_allows_a_suspend() {
    let (place, gpu) = (Place::new(), FakeGpu::new());
    let mut run = alone(&place, &gpu, &[&JOB[..6], &["--hold-at", "20:go"]].concat());
    let holds = gpu.folder().join("hangs-fakeHoldDriverLock");
    wait_until("the lock", || holds.exists());
    for (verb, state) in [("suspend", "checkpointed"), ("resume", "running")] {
        leaves(&place, &gpu, &run, &[verb], state);
    }
    ends_as_ever(&place, &mut run);
}

#[apply(as_root)]
fn imported_memory_is_suspended_and_cannot_be_resumed() {
    let (place, gpu) = (Place::new(), FakeGpu::new());
    let run = alone(&place, &gpu, &[&JOB[..], &["--import"]].concat());
    place.wait_for("out", "\n20 ");
    leaves(&place, &gpu, &run, &["suspend"], "checkpointed");
    let lost = leaves(&place, &gpu, &run, &["resume"], "checkpointed");
    assert!(stderr(&lost).contains("801"), "{}", stderr(&lost));
}

#[apply(as_root_and_user)]
fn restore_thread_has_its_host_number() {
    let (place, gpu) = (Place::new(), FakeGpu::new());
    let mut run = supervised(&place, &gpu, &JOB);
    place.wait_for("out", "\n20 ");
    let pid = run.job();
    let told = cuda(&place, &gpu, &["tid", "--pid", &pid.to_string()]);
    let thread: i32 = stdout(&told)
        .split_whitespace()
        .last()
        .expect("a thread")
        .parse()
        .expect("a number");
    let name = fs::read_to_string(format!("/proc/{pid}/task/{thread}/comm")).expect("a thread");
    assert_eq!(name, "fake-restore\n");
    ends_as_ever(&place, &mut run);
}

#[apply(as_root_and_user)]
fn failed_checkpoint_fails_the_snapshot_only() {
    let (place, gpu) = (Place::new(), FakeGpu::new());
    let mut run = supervised(&place, &gpu, &JOB);
    place.wait_for("out", "\n10 ");
    let rule = gpu.folder().join("caller-fail");
    fs::write(&rule, "cuCheckpointProcessCheckpoint:0:2").expect("written");
    let refused = place.verb(&["snapshot"]);
    assert_eq!(refused.status.code(), Some(125));
    assert!(
        stderr(&refused).contains("out of memory"),
        "{}",
        stderr(&refused)
    );
    fs::remove_file(rule).expect("removed");
    place.snapshot();
    ends_as_ever(&place, &mut run);
}

#[apply(as_root_and_user)]
fn a_job_computes_while_criu_starts() {
    let (place, gpu) = (Place::new(), FakeGpu::new());
    let mut command = place.command(&["--interval", "never", "--"]);
    command.arg(fake_gpu::job()).args(JOB);
    // Delays the dump until the test permits it.
    let slow = "[ \"$1\" != dump ] || { : > HERE/criu-is-here; until [ -e HERE/criu-goes-on ]; do :; done; }\n\
        exec CRIU \"$@\"";
    command.env("CKPT_RUN_CRIU_PATH", criu_script(place.path(), slow));
    let mut run = place.spawn(gpu.wrap(&command), |_| {});
    place.wait_for("out", "\n10 ");
    thread::scope(|scope| {
        let snapshot = scope.spawn(|| place.snapshot());
        wait_until("CRIU", || place.file("criu-is-here").exists());
        // Its last step before the wait: the job was not stopped, and its memory is still on the GPU.
        place.wait_for("out", "\n20 ");
        assert!(gpu.used_bytes(0) > 0);
        fs::write(place.file("criu-goes-on"), "").expect("written");
        snapshot.join().expect("a snapshot");
    });
    ends_as_ever(&place, &mut run);
}

#[apply(as_root_and_user)]
fn job_on_a_mig_gpu_continues_without_snapshots() {
    let (place, gpu) = (Place::new(), FakeGpu::new());
    fs::write(
        place.file("ckpt-run.toml"),
        "metrics.textfile = 'run.prom'\n",
    )
    .expect("written");
    fs::write(gpu.folder().join("mig"), "").expect("written");
    let mut run = supervised(&place, &gpu, &JOB);
    place.wait_for("out", "\n10 ");
    for refusals in 1..=2 {
        let refused = place.verb(&["snapshot"]);
        assert_eq!(refused.status.code(), Some(125));
        let said = stderr(&refused);
        assert!(
            said.contains("is in MIG mode") && said.lines().count() == 1,
            "{said}"
        );
        wait_until("the count of failures", || {
            let figures = place.text("run.prom");
            let mut counted = figures
                .lines()
                .filter(|line| line.starts_with("ckpt_run_snapshots_failed_total{"));
            counted.any(|line| line.ends_with(&format!("}} {refusals}")))
        });
    }
    assert_eq!(place.images().len(), 0);
    ends_as_ever(&place, &mut run);
}

#[apply(as_root_and_user)]
fn restore_on_a_mig_gpu_is_refused_and_the_image_stays() {
    let (place, gpu) = (Place::new(), FakeGpu::new());
    let mut run = supervised(&place, &gpu, &JOB);
    place.wait_for("out", "\n10 ");
    place.snapshot();
    let split = gpu.folder().join("mig");
    fs::write(&split, "").expect("written");
    run.crash();
    assert_eq!(run.wait(), 125, "{}", place.text("err"));
    let said = place.text("err");
    assert!(
        said.contains("is in MIG mode, and a job cannot be restored"),
        "{said}"
    );
    fs::remove_file(split).expect("removed");
    let mut again = supervised(&place, &gpu, &JOB);
    ends_as_ever(&place, &mut again);
    assert!(place.text("err").contains("restored image=000001"));
}

#[test]
fn fake_calls_fail_on_request_and_on_a_full_gpu() {
    let place = Place::new();
    let small = FakeGpu::with(1, 6);
    assert_eq!(alone(&place, &small, &["--steps", "1"]).wait(), 70);
    assert_eq!(place.text("err"), "cuMemAlloc answered 2\n");
    let gpu = FakeGpu::new();
    fs::write(gpu.folder().join("fail"), "cuMemcpyDtoD_v2:3:700").expect("written");
    assert_eq!(alone(&place, &gpu, &["--pause-ms", "0"]).wait(), 70);
    assert!(
        place.text("err").ends_with("cuMemcpyDtoD answered 700\n"),
        "{}",
        place.text("err")
    );
    assert!(
        place.text("out").is_empty(),
        "in the first step: {}",
        place.text("out")
    );
}

#[apply(as_root_and_user)]
fn only_a_job_with_an_idle_gpu_counts_as_hung() {
    let (place, gpu) = (Place::new(), FakeGpu::new());
    fs::write(
        place.file("ckpt-run.toml"),
        "[hang]\ngpu = '2s'\naction = 'report'",
    )
    .expect("written");
    fs::write(gpu.folder().join("utilization"), "60").expect("written");
    let mut run = supervised(&place, &gpu, &JOB);
    place.wait_for("out", "\n19 ");
    let begun = std::time::Instant::now();
    wait_until("more than its limit", || begun.elapsed().as_secs() >= 4);
    assert!(
        !place.text("err").contains("hangs"),
        "{}",
        place.text("err")
    );
    fs::write(gpu.folder().join("utilization"), "0").expect("written");
    place.wait_for("err", "the job hangs, no GPU work for");
    ends_as_ever(&place, &mut run);
}

#[apply(as_root_and_user)]
fn hwloc_ignores_gpus_unless_the_caller_decides() {
    let printed = |set: Option<&str>| {
        let (place, gpu) = (Place::new(), FakeGpu::new());
        let mut command = place.command(&["--interval", "never", "--", "printenv"]);
        command.arg("HWLOC_COMPONENTS");
        command.env_remove("HWLOC_COMPONENTS");
        if let Some(value) = set {
            command.env("HWLOC_COMPONENTS", value);
        }
        place.spawn(gpu.wrap(&command), |_| {}).wait();
        place.text("out")
    };
    assert_eq!(printed(None), "-opencl,-nvml,-cuda,-rsmi,-levelzero\n");
    assert_eq!(printed(Some("linux,stop")), "linux,stop\n");
}
