//! A supervised job on fake GPUs, and what is done to both.

use std::fs;
use std::sync::OnceLock;

use crate::harness::fake_gpu::{self, FakeGpu, ends_as, untouched};
use crate::harness::{Place, Run, stderr, wait_until};

/// Long enough for something to be done to it; it waits at step 20 until there is a file `go`.
pub const JOB: [&str; 10] = [
    "--wait-at",
    "20:go",
    "--threads",
    "2",
    "--segments",
    "300,64K,2M,2M",
    "--steps",
    "30",
    "--pause-ms",
    "2",
];
/// Where it does not wait.
const FREE: usize = 2;

/// A run of [`JOB`].
pub struct Scene {
    pub place: Place,
    pub gpu: FakeGpu,
    pub run: Run,
}

/// With room for a shadow.
pub fn gpu() -> FakeGpu {
    FakeGpu::with(2, 3072)
}

impl Scene {
    /// With `cuda.memory` as wanted.
    pub fn start(memory: &str) -> Self {
        Self::with(gpu(), memory, &JOB, &[])
    }

    pub fn with(gpu: FakeGpu, memory: &str, job: &[&str], variables: &[(&str, &str)]) -> Self {
        let place = Place::new();
        let program = fake_gpu::job();
        let words = [&[program.to_str().expect("a path")], job].concat();
        let run = begin(&place, &gpu, memory, &words, variables);
        Self { place, gpu, run }
    }

    /// The same where it waits at step 20.
    pub fn at_rest(memory: &str) -> Self {
        let scene = Self::start(memory);
        scene.rests();
        scene
    }

    pub fn rests(&self) {
        self.place.wait_for("out", "\n20 ");
    }

    /// Its messages so far.
    pub fn said(&self) -> String {
        self.place.text("err")
    }

    /// How often it said so.
    pub fn count(&self, text: &str) -> usize {
        self.said().matches(text).count()
    }

    /// A snapshot that fails and lets the job be; why.
    pub fn refused(&self) -> String {
        let output = self.place.verb(&["snapshot"]);
        let error = stderr(&output);
        assert_eq!(output.status.code(), Some(125), "{error}{}", self.said());
        error
    }

    /// A snapshot whose memory stayed on the GPU.
    pub fn resident_snapshot(&self) {
        let before = self.count(" release ");
        self.place.snapshot();
        assert_eq!(self.count(" release "), before + 1, "{}", self.said());
    }

    /// A snapshot by the driver alone; the last reason that was given.
    pub fn driver_snapshot(&self) -> String {
        let before = self.count(" release ");
        self.place.snapshot();
        let said = self.said();
        assert_eq!(self.count(" release "), before, "{said}");
        let reason = said
            .rsplit_once("through host memory: ")
            .map_or("", |(_, rest)| rest);
        reason.lines().next().unwrap_or_default().to_owned()
    }

    /// Waits until it was restored once more than before, and rests.
    pub fn restored(&self) {
        let before = self.count("snapshot failed, the job does not compute");
        wait_until("the restored job", || {
            self.count("ckpt-run: restored ") == before
        });
    }

    /// Has calls fail: of the job's processes (`fail`), or of ours (`caller-fail`).
    pub fn rule(&self, file: &str, rule: &str) {
        fs::write(self.gpu.folder().join(file), rule).expect("written");
    }

    /// The next so many of these calls fail.
    pub fn fail_next(&self, file: &str, call: &str, times: usize) {
        self.answer_next(file, call, times, 999);
    }

    /// The next so many of these calls do nothing but answer this.
    pub fn answer_next(&self, file: &str, call: &str, times: usize, code: i32) {
        for number in 0..times {
            self.rule(&format!("token-{call}-{number}"), "");
        }
        self.rule(file, &format!("{call}:token:{code}"));
    }

    /// How many of them have not failed yet.
    pub fn left(&self, call: &str) -> usize {
        let prefix = format!("token-{call}-");
        let entries = fs::read_dir(self.gpu.folder()).expect("the GPUs' folder");
        entries
            .flatten()
            .filter(|entry| entry.file_name().to_string_lossy().starts_with(&prefix))
            .count()
    }

    /// Whether somebody is in this call, and hangs.
    pub fn hangs(&self, call: &str) -> bool {
        self.gpu.folder().join(format!("hangs-{call}")).exists()
    }

    /// No call fails or hangs any more.
    pub fn mend(&self) {
        for file in ["fail", "hang", "caller-fail", "caller-hang"] {
            let _ = fs::remove_file(self.gpu.folder().join(file));
        }
    }

    pub fn used(&self) -> [u64; 2] {
        [0, 1].map(|device| self.gpu.used_bytes(device))
    }

    pub fn go(&self) {
        self.place.go();
    }

    /// Lets the job go on to its end, which must be that of a run that nobody touched.
    pub fn ends_as_ever(mut self) {
        ends_as(&self.place, &mut self.run, uninterrupted());
        self.gpu.assert_free("at its end");
    }
}

/// A supervised command in a place.
pub fn begin(
    place: &Place,
    gpu: &FakeGpu,
    memory: &str,
    words: &[&str],
    variables: &[(&str, &str)],
) -> Run {
    let config = format!(
        "[cuda]\nmemory = \"{memory}\"\n[snapshot]\nlock_timeout = \"2s\"\n[restart]\nbackoff = \"10ms\"\n"
    );
    fs::write(place.file("config"), config).expect("written");
    let mut command = place.command(&["--interval", "never", "--config", "config", "--"]);
    command.args(words);
    let mut wrapped = gpu.wrap(&command);
    wrapped.envs(variables.iter().copied());
    place.spawn(wrapped, |_| {})
}

/// What [`JOB`] prints when nobody touches it.
pub fn uninterrupted() -> &'static str {
    static OUTPUT: OnceLock<String> = OnceLock::new();
    OUTPUT.get_or_init(|| untouched(&gpu(), &JOB[FREE..]))
}
