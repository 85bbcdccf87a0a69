//! Processes that share device memory (CUDA IPC), as NCCL's peer-to-peer transport does.

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use nix::sys::signal::Signal;

use super::scene::{self, begin};
use crate::harness::fake_gpu::{self, FakeGpu};
use crate::harness::{Place, Run, apply, as_root_and_user, stderr, wait_until};

const WAIT: [&str; 2] = ["--wait-at", "20:go"];

/// Run of the pair.
struct Pair {
    place: Place,
    gpu: FakeGpu,
    run: Run,
}

impl Pair {
    fn start(arguments: &[&str]) -> Self {
        let (place, gpu) = (Place::new(), scene::gpu());
        let run = run(&place, &gpu, arguments, &[]);
        Self { place, gpu, run }
    }

    fn said(&self) -> String {
        self.place.text("err")
    }

    fn used(&self) -> [u64; 2] {
        [0, 1].map(|gpu| self.gpu.used_bytes(gpu))
    }

    fn verb(&self, words: &[&str]) {
        let output = self.place.verb(words);
        let error = stderr(&output);
        assert!(output.status.success(), "{error}{}", self.said());
    }

    fn crash(&self, number: usize) {
        self.run.crash();
        wait_until("the restore", || {
            self.said().matches("ckpt-run: restored ").count() == number
        });
    }

    /// Lets it end, and compares its output with that of an undisturbed run.
    fn ends_as_ever(mut self) {
        self.place.go();
        assert_eq!(self.run.wait(), 0, "{}", self.said());
        let mut untouched = Self::start(&[]);
        assert_eq!(untouched.run.wait(), 0, "{}", untouched.said());
        let said = self.said();
        assert_eq!(
            self.place.text("out"),
            untouched.place.text("out"),
            "{said}"
        );
        self.gpu.assert_free("at its end");
    }
}

fn run(place: &Place, gpu: &FakeGpu, arguments: &[&str], variables: &[(&str, &str)]) -> Run {
    let program = fake_gpu::pair();
    let words = [&[program.to_str().expect("a path")], arguments].concat();
    begin(place, gpu, "auto", &words, variables)
}

#[apply(as_root_and_user)]
fn shared_memory_survives_snapshots_and_crashes() {
    let pair = Pair::start(&WAIT);
    for step in ["\n3 ", "\n9 "] {
        pair.place.wait_for("out", step);
        pair.place.snapshot();
    }
    pair.place.wait_for("out", "\n20 ");
    let used = pair.used();
    pair.crash(1);
    pair.place.wait_for("out", "\n20 ");
    pair.place.snapshot();
    pair.crash(2);
    // Copiers use some memory for a moment.
    wait_until("nothing twice", || pair.used() == used);
    assert_eq!(
        pair.said().matches(" release ").count(),
        3,
        "{}",
        pair.said()
    );
    pair.ends_as_ever();
}

#[apply(as_root_and_user)]
fn sharing_begun_during_preparation_repeats_it() {
    let pair = Pair::start(&[&WAIT[..], &["--begin-at", "begin"]].concat());
    wait_until("two contexts", || pair.used().iter().all(|used| *used > 0));
    // The processes have no agent memory on the GPUs yet, and are about to be locked.
    let file = |name: &str| pair.gpu.folder().join(name);
    let (call, mended) = ("cuCheckpointProcessLock", file("mended"));
    let rule = format!("{call}:0:{}", mended.display());
    fs::write(file("caller-hang"), rule).expect("written");
    std::thread::scope(|scope| {
        let snapshot = scope.spawn(|| pair.place.snapshot());
        wait_until("the lock", || file(&format!("hangs-{call}")).exists());
        fs::write(pair.place.file("begin"), "").expect("written");
        pair.place.wait_for("out", "\n5 ");
        fs::write(&mended, "").expect("written");
        snapshot.join().expect("a snapshot");
    });
    let said = pair.said();
    assert_eq!(
        said.matches("the snapshot is taken again").count(),
        1,
        "{said}"
    );
    assert_eq!(said.matches(" release ").count(), 1, "{said}");
    pair.place.wait_for("out", "\n20 ");
    pair.crash(1);
    pair.ends_as_ever();
}

#[apply(as_root_and_user)]
fn freed_shared_memory_does_not_end_snapshots() {
    let pair = Pair::start(&["--free-until", "go"]);
    pair.place.wait_for("err", "freed");
    for number in 1..=2 {
        pair.place.snapshot();
        pair.crash(number);
    }
    pair.ends_as_ever();
}

#[apply(as_root_and_user)]
fn a_paused_job_gives_shared_memory_back_and_gets_it_again() {
    let pair = Pair::start(&WAIT);
    pair.place.wait_for("out", "\n20 ");
    let used = pair.used();
    for _ in 0..2 {
        pair.verb(&["pause"]);
        pair.gpu.assert_free("paused");
        pair.verb(&["unpause"]);
        // A copier has a context for a moment.
        wait_until("the memory", || pair.used() == used);
    }
    pair.ends_as_ever();
}

#[apply(as_root_and_user)]
fn shared_memory_does_not_move_to_other_gpus() {
    let mut pair = Pair::start(&WAIT);
    pair.place.wait_for("out", "\n20 ");
    let id = pair.place.snapshot();
    pair.run.signal(Signal::SIGKILL);
    pair.run.wait();
    pair.gpu.assert_free("after a kill");
    let uuid = |gpu: u32| format!("GPU-fa4e0000-0000-4000-8000-00000000000{gpu}");
    let map = format!("{0}={1},{1}={0}", uuid(0), uuid(1));
    let words = ["restore", "--config", "config", "--gpu-map", &map, &id];
    let command = pair.gpu.wrap(&pair.place.command(&words));
    pair.run = pair.place.spawn(command, |_| {});
    assert_eq!(pair.run.wait(), 125, "{}", pair.said());
    let said = pair.said();
    assert!(said.contains("on the same GPUs only"), "{said}");
    // The image is unchanged: it can be restored where the memory was.
    let words = ["restore", "--config", "config", &id];
    let command = pair.gpu.wrap(&pair.place.command(&words));
    pair.run = pair.place.spawn(command, |_| {});
    pair.ends_as_ever();
}

#[apply(as_root_and_user)]
fn two_nccl_runs_on_the_same_gpus_are_refused() {
    let (gpu, places) = (scene::gpu(), [Place::new(), Place::new()]);
    let library = nccl(&places[0]);
    let preload = [("LD_PRELOAD", library.to_str().expect("a path"))];
    let [mut one, mut two] = places
        .each_ref()
        .map(|place| run(place, &gpu, &WAIT, &preload));
    for place in &places {
        place.wait_for("out", "\n20 ");
    }
    let refused = places[1].verb(&["snapshot"]);
    let said = stderr(&refused);
    assert!(!refused.status.success(), "{said}");
    for part in [
        &format!(
            "the run in {} on the same GPUs",
            places[0].file(".ckpt-run").display()
        ),
        "CUDA_VISIBLE_DEVICES",
    ] {
        assert!(said.contains(part), "{said}");
    }
    places[0].go();
    assert_eq!(one.wait(), 0, "{}", places[0].text("err"));
    places[1].snapshot();
    places[1].go();
    assert_eq!(two.wait(), 0, "{}", places[1].text("err"));
    assert_eq!(places[1].text("out"), places[0].text("out"));
}

/// Creates an empty library with NCCL's name.
fn nccl(place: &Place) -> PathBuf {
    let path = place.file("libnccl.so.2");
    let empty = ["-shared", "-x", "c", "/dev/null", "-o"];
    let built = Command::new("cc").args(empty).arg(&path).status();
    assert!(built.expect("a compiler").success());
    path
}
