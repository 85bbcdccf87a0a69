//! Machines on which an image cannot run: they refuse it before they download anything but manifests.

use std::fs;
use std::process::Command;

use nix::sys::signal::Signal;

use super::{S3Server, seeing};
use crate::harness::fake_gpu::{self, FakeGpu};
use crate::harness::{ON_REQUEST, Place, Run, apply, as_root, wait_until_gone};

/// Reads one file and maps another one.
const READS: &str = r#"
import mmap, os, time
held = open("input")
with open("library", "rb") as library:
    mapped = mmap.mmap(library.fileno(), 0, prot=mmap.PROT_READ)
print("ready", flush=True)
while not os.path.exists("go"):
    time.sleep(0.02)
print("done", flush=True)
"#;

/// A run in a place, whose only image is on the server.
struct Scene {
    server: S3Server,
    place: Place,
}

impl Scene {
    fn new() -> Option<Self> {
        let server = S3Server::start()?;
        let place = Place::new();
        fs::write(place.file("job.py"), READS).unwrap();
        fs::write(place.file("input"), "input").unwrap();
        fs::write(place.file("library"), vec![1; 10_000]).unwrap();
        Some(Self { server, place })
    }

    /// Returns the run's line, from a place with a store of its own.
    fn line(&self, place: &Place, job: &[&str]) -> Command {
        let url = self.server.url();
        let options = [&ON_REQUEST[..], &["--remote", &url, "--take-over", "--"]].concat();
        let mut command = place.command(&[&options, job].concat());
        self.server.is_used_by(&mut command);
        // Its store is elsewhere, and its files are here.
        let folder = self.place.path();
        command.current_dir(folder);
        command.env("CKPT_RUN_STORE", place.file("store"));
        command
    }

    /// Starts the run, has an image uploaded after this output, and kills the run.
    fn leave_an_image(&self, line: Command, output: &str) {
        let mut run = self.place.spawn(line, |_| {});
        self.place.wait_for("out", output);
        let store = self.place.file("store");
        let snapshot = ["--store", store.to_str().unwrap(), "snapshot"];
        assert!(self.place.verb(&snapshot).status.success());
        let done = "the image is in the remote store image=000001";
        self.place.wait_for("err", done);
        let job = run.job();
        run.signal(Signal::SIGKILL);
        run.wait();
        wait_until_gone(&[job]);
        assert_eq!(self.server.gate().pack_reads(), 0);
    }

    /// Checks that a machine refuses the image with these words, and reads no part of it.
    fn is_refused(&self, other: &Place, mut run: Run, words: &[&str]) {
        assert_eq!(run.wait(), 125, "{}", other.text("err"));
        let said = other.text("err");
        for words in words {
            assert!(said.contains(words), "no {words:?}: {said}");
        }
        assert_eq!(self.server.gate().pack_reads(), 0, "{said}");
        fs::write(other.file("err"), "").unwrap();
    }
}

#[apply(as_root)]
fn another_machine_refuses_before_it_downloads() {
    let Some(scene) = Scene::new() else {
        return;
    };
    let job = ["python3", "-u", "job.py"];
    scene.leave_an_image(scene.line(&scene.place, &job), "ready");
    let other = Place::new();
    let line = scene.line(&other, &job);

    let list = fs::read_to_string("/proc/cpuinfo").unwrap();
    let older = list.replace(" ssse3 ", " ").replace(" popcnt ", " ");
    assert_ne!(older, list);
    fs::write(other.file("cpuinfo"), older).unwrap();
    let on_older = seeing(&other.file("cpuinfo"), "/proc/cpuinfo", &line);
    let words = ["cannot restore on this processor", "it lacks popcnt, ssse3"];
    scene.is_refused(&other, other.spawn(on_older, |_| {}), &words);

    for (name, content) in [("library", vec![1; 10_001]), ("input", b"in".to_vec())] {
        let path = scene.place.file(name);
        let (good, modified) = (
            fs::read(&path).unwrap(),
            fs::metadata(&path).unwrap().modified().unwrap(),
        );
        fs::write(&path, content).unwrap();
        let run = other.spawn(scene.line(&other, &job), |_| {});
        scene.is_refused(&other, run, &[path.to_str().unwrap()]);
        fs::write(&path, good).unwrap();
        let file = fs::File::options().write(true).open(&path).unwrap();
        file.set_modified(modified).unwrap();
    }

    let mut run = other.spawn(line, |_| {});
    other.wait_for("err", "restored image=000001");
    scene.place.go();
    assert_eq!(run.wait(), 0, "{}", other.text("err"));
    assert_eq!(other.text("out"), "done\n");
    assert!(scene.server.gate().pack_reads() > 0);
}

#[apply(as_root)]
fn a_machine_without_gpus_refuses_before_it_downloads() {
    let Some(scene) = Scene::new() else {
        return;
    };
    let gpu = FakeGpu::new();
    let job = fake_gpu::job();
    let job = [job.to_str().unwrap(), "--steps", "30", "--wait-at", "20:go"];
    let line = scene.line(&scene.place, &job);
    scene.leave_an_image(gpu.wrap(&line), "\n20 ");

    let other = Place::new();
    let run = other.spawn(scene.line(&other, &job), |_| {});
    scene.is_refused(&other, run, &["cannot restore GPU state"]);

    let mut run = other.spawn(gpu.wrap(&scene.line(&other, &job)), |_| {});
    other.wait_for("err", "restored image=000001");
    scene.place.go();
    assert_eq!(run.wait(), 0, "{}", other.text("err"));
}
