//! Sequences of snapshots, crashes and restores onto other GPUs, also with several processes.

use std::fs;

use nix::sys::signal::Signal;

use super::scene::{self, JOB, Scene, begin};
use crate::harness::fake_gpu::{self, FakeGpu, UUIDS, untouched};
use crate::harness::{Place, Run, apply, as_root_and_user, wait_until};

#[apply(as_root_and_user)]
fn snapshots_and_crashes_with_changing_memory() {
    let scene = Scene::start("resident");
    for step in ["\n3 ", "\n8 ", "\n13 "] {
        scene.place.wait_for("out", step);
        scene.resident_snapshot();
    }
    scene.rests();
    scene.run.crash();
    wait_until("the first restore", || {
        scene.count("ckpt-run: restored ") == 1
    });
    scene.resident_snapshot();
    scene.run.crash();
    wait_until("the second restore", || {
        scene.count("ckpt-run: restored ") == 2
    });
    scene.ends_as_ever();
}

#[apply(as_root_and_user)]
fn many_snapshots_and_crashes_of_threads_that_allocate_and_free() {
    let job = [
        &["--wait-at", "180:go", "--threads", "2"][..],
        &["--segments", "64K,2M,2M", "--renew", "1"],
        &["--steps", "200", "--pause-ms", "20"],
    ]
    .concat();
    let mut scene = Scene::with(scene::gpu(), "resident", &job, &[]);
    scene.place.wait_for("out", "\n5 ");
    for number in 1..=20 {
        scene.resident_snapshot();
        if number % 5 == 0 {
            scene.run.crash();
            wait_until("the restore", || {
                scene.count("ckpt-run: restored ") == number / 5
            });
        }
    }
    scene.go();
    assert_eq!(scene.run.wait(), 0, "{}", scene.said());
    assert_eq!(scene.place.text("out"), untouched(&scene::gpu(), &job[2..]));
    scene.gpu.assert_free("at its end");
}

/// Job that computes on the first GPU until it and its supervisor are killed, and continues on the second, by a map.
struct Elsewhere {
    place: Place,
    gpu: FakeGpu,
    run: Run,
    /// Output of an undisturbed job.
    alone: String,
    /// Memory that it had on the first GPU.
    used: u64,
}

impl Elsewhere {
    /// Starts the job. `visible` are the GPUs visible to the first and to the second run; `faults` are the job's
    /// failing calls in each.
    fn begin(visible: [&str; 2], map: &str, faults: [&str; 2]) -> Self {
        let job = ["--steps", "30", "--segments", "300,2M,6M"];
        Self::with(&job, visible, map, faults)
    }

    fn with(job: &[&str], visible: [&str; 2], map: &str, faults: [&str; 2]) -> Self {
        // Its only thread computes on the first GPU.
        let job = [&JOB[..2], job].concat();
        let (place, gpu) = (Place::new(), scene::gpu());
        let program = fake_gpu::job();
        let words = [&[program.to_str().expect("a path")], &job[..]].concat();
        let [before, after] = visible.map(|list| [("CUDA_VISIBLE_DEVICES", list)]);
        let mut run = begin(&place, &gpu, "resident", &words, &before);
        place.wait_for("out", "\n20 ");
        let fail = |rule: &str| fs::write(gpu.folder().join("fail"), rule).expect("written");
        fail(faults[0]);
        let id = place.snapshot();
        let used = gpu.used_bytes(0);
        gpu.assert_used(1, 0, "before the move");
        run.signal(Signal::SIGKILL);
        run.wait();
        wait_until("free GPUs", || gpu.used_bytes(0) == 0);
        fail(faults[1]);
        let command = place.command(&["restore", "--config", "config", "--gpu-map", map, &id]);
        let mut wrapped = gpu.wrap(&command);
        wrapped.envs(after);
        let run = place.spawn(wrapped, |_| {});
        let alone = untouched(&scene::gpu(), &job[2..]);
        Self {
            place,
            gpu,
            run,
            alone,
            used,
        }
    }

    fn restored(&self, times: usize) {
        wait_until("the restored job", || {
            self.place
                .text("err")
                .matches("ckpt-run: restored ")
                .count()
                == times
        });
        let said = self.place.text("err");
        self.gpu.assert_used(1, self.used, &said);
        self.gpu.assert_used(0, 0, &said);
    }

    fn ends_as_ever(mut self) {
        self.place.go();
        let said = || self.place.text("err");
        assert_eq!(self.run.wait(), 0, "{}", said());
        assert_eq!(self.place.text("out"), self.alone, "{}", said());
        self.gpu.assert_free("at its end");
    }
}

#[apply(as_root_and_user)]
fn memory_is_restored_on_another_gpu() {
    let [first, second] = UUIDS;
    let one_way = format!("{first}={second}");
    let both_ways = format!("{first}={second},{second}={first}");
    for (visible, map) in [(["0", "1"], one_way), (["0,1", "0,1"], both_ways)] {
        let scene = Elsewhere::begin(visible, &map, ["", ""]);
        scene.restored(1);
        // After the move the driver cannot import memory, and further snapshots work any number of times.
        scene.place.snapshot();
        scene.place.snapshot();
        let said = scene.place.text("err");
        assert_eq!(said.matches(" release ").count(), 1, "{said}");
        assert!(said.contains("restored onto another GPU"), "{said}");
        scene.run.crash();
        scene.restored(2);
        scene.place.snapshot();
        scene.ends_as_ever();
    }
}

#[apply(as_root_and_user)]
fn a_job_that_the_driver_has_moved_keeps_going_the_driver_s_way() {
    let [first, second] = UUIDS;
    let map = format!("{first}={second}");
    let no_export = "cuMemExportToShareableHandle:0:2";
    let scene = Elsewhere::begin(["0", "1"], &map, [no_export, ""]);
    scene.restored(1);
    for times in 1..=2 {
        scene.place.snapshot();
        let said = scene.place.text("err");
        assert_eq!(
            said.matches("restored onto another GPU").count(),
            times,
            "{said}"
        );
        assert_eq!(said.matches(" release ").count(), 0, "{said}");
    }
    scene.run.crash();
    scene.restored(2);
    scene.ends_as_ever();
}

#[apply(as_root_and_user)]
fn driver_suspends_a_job_moved_before_it_allocates() {
    let [first, second] = UUIDS;
    let map = format!("{first}={second}");
    let job = "--steps 1000 --pause-ms 4 --segments 300,64K --late 22:6M";
    let job: Vec<&str> = job.split(' ').collect();
    let scene = Elsewhere::with(&job, ["0", "1"], &map, ["", ""]);
    scene.restored(1);
    let moved = || {
        let said = scene.place.text("err");
        said.matches("restored onto another GPU").count()
    };
    // The next image records the move, too.
    scene.place.snapshot();
    scene.run.crash();
    scene.restored(2);
    scene.place.go();
    scene.place.wait_for("out", "\n30 ");
    let before = moved();
    scene.place.snapshot();
    let said = scene.place.text("err");
    assert_eq!(moved(), before + 1, "{said}");
    assert_eq!(said.matches(" release ").count(), 0, "{said}");
    scene.ends_as_ever();
}

#[apply(as_root_and_user)]
fn memory_that_cannot_be_made_on_another_gpu_fails_the_restore() {
    let [first, second] = UUIDS;
    let map = format!("{first}={second}");
    let mut scene = Elsewhere::begin(["0", "1"], &map, ["", "cuMemCreate:0:2"]);
    assert_ne!(scene.run.wait(), 0);
    let said = scene.place.text("err");
    assert!(said.contains("cannot create new device memory"), "{said}");
    scene.gpu.assert_free("at its end");
}

#[apply(as_root_and_user)]
fn processes_are_halted_together_even_without_agents() {
    let (place, gpu) = (Place::new(), FakeGpu::with(2, 3072));
    let job = "\"$job\" --wait-at 20:go --steps 30 --pause-ms 2 --segments 300,2M,4M";
    let script =
        format!("{job} > a & {job} --threads 2 > b & LD_PRELOAD= {job} > c & wait; echo ended");
    let program = fake_gpu::job();
    let variables = [("job", program.to_str().expect("a path"))];
    let mut run = begin(&place, &gpu, "resident", &["sh", "-c", &script], &variables);
    for name in ["a", "b", "c"] {
        place.wait_for(name, "\n20 ");
    }
    place.snapshot();
    place.snapshot();
    assert_eq!(place.text("err").matches(" release ").count(), 2);
    run.crash();
    wait_until("the restored job", || {
        place.text("err").contains("ckpt-run: restored ")
    });
    place.snapshot();
    place.go();
    assert_eq!(run.wait(), 0, "{}", place.text("err"));
    let one = [
        "--steps",
        "30",
        "--pause-ms",
        "2",
        "--segments",
        "300,2M,4M",
    ];
    let two = [&one[..], &["--threads", "2"]].concat();
    for (name, job) in [("a", &one[..]), ("b", &two), ("c", &one)] {
        assert_eq!(place.text(name), untouched(&scene::gpu(), job), "{name}");
    }
}
