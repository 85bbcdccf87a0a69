//! Supervised job on fake GPUs, and the operations of tests on both.

use std::ffi::{OsStr, OsString};
use std::fs;
use std::sync::OnceLock;

use crate::harness::fake_gpu::{self, FakeGpu, ends_as, untouched};
use crate::harness::{Place, Run, stderr, wait_until};

/// Job that runs long enough for the test's actions; it waits at step 20 for a file `go`.
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
/// Index in [`JOB`] of the first argument after those that make it wait.
const FREE: usize = 2;

/// Run of [`JOB`].
pub struct Scene {
    pub place: Place,
    pub gpu: FakeGpu,
    pub run: Run,
}

/// Creates GPUs with room for a shadow.
pub fn gpu() -> FakeGpu {
    FakeGpu::with(2, 3072)
}

impl Scene {
    /// Starts the job with a value of `cuda.memory`.
    pub fn start(memory: &str) -> Self {
        Self::with(gpu(), memory, &JOB, &[])
    }

    /// Starts the job on GPUs that compute no fingerprints: every snapshot copies all memory.
    pub fn copying(memory: &str) -> Self {
        let without = [("FAKE_CUDA_CALLER_FAIL", "cuModuleLoadData")];
        Self::with(gpu(), memory, &JOB, &without)
    }

    pub fn with(gpu: FakeGpu, memory: &str, job: &[&str], variables: &[(&str, &str)]) -> Self {
        let place = Place::new();
        let run = begin(&place, &gpu, memory, &words(job), variables);
        Self { place, gpu, run }
    }

    /// Starts the job and lets it reach its wait at step 20.
    pub fn at_rest(memory: &str) -> Self {
        let scene = Self::start(memory);
        scene.rests();
        scene
    }

    pub fn rests(&self) {
        self.place.wait_for("out", "\n20 ");
    }

    /// Returns the messages so far.
    pub fn said(&self) -> String {
        self.place.text("err")
    }

    /// Counts the occurrences of a text in the messages.
    pub fn count(&self, text: &str) -> usize {
        self.said().matches(text).count()
    }

    /// Takes a snapshot that fails without effect on the job; returns the reason.
    pub fn refused(&self) -> String {
        let output = self.place.verb(&["snapshot"]);
        let error = stderr(&output);
        assert_eq!(output.status.code(), Some(125), "{error}{}", self.said());
        error
    }

    /// Takes a snapshot whose memory stays on the GPU.
    pub fn resident_snapshot(&self) {
        let before = self.count(" release ");
        self.place.snapshot();
        assert_eq!(self.count(" release "), before + 1, "{}", self.said());
    }

    /// Takes a snapshot by the driver alone; returns the last given reason.
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

    /// Waits for one more restore, and for the job's wait.
    pub fn restored(&self) {
        let before = self.count("snapshot failed; the job may be damaged");
        wait_until("the restored job", || {
            self.count("ckpt-run: restored ") == before
        });
    }

    /// Makes calls fail, in the job's processes (`fail`) or in ckpt-run's (`caller-fail`).
    pub fn rule(&self, file: &str, rule: &str) {
        fs::write(self.gpu.folder().join(file), rule).expect("written");
    }

    /// Makes the next calls fail.
    pub fn fail_next(&self, file: &str, call: &str, times: usize) {
        self.answer_next(file, call, times, 999);
    }

    /// Makes the next calls return this code without effect.
    pub fn answer_next(&self, file: &str, call: &str, times: usize, code: i32) {
        for number in 0..times {
            self.rule(&format!("token-{call}-{number}"), "");
        }
        self.rule(file, &format!("{call}:token:{code}"));
    }

    /// Returns the number of calls that have not failed yet.
    pub fn left(&self, call: &str) -> usize {
        let prefix = format!("token-{call}-");
        let entries = fs::read_dir(self.gpu.folder()).expect("the GPUs' folder");
        entries
            .flatten()
            .filter(|entry| entry.file_name().to_string_lossy().starts_with(&prefix))
            .count()
    }

    /// Returns true if a process hangs in this call.
    pub fn hangs(&self, call: &str) -> bool {
        self.gpu.folder().join(format!("hangs-{call}")).exists()
    }

    /// Removes all faults.
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

    /// Lets the job run to its end, which must equal that of an undisturbed run.
    pub fn ends_as_ever(mut self) {
        ends_as(&self.place, &mut self.run, uninterrupted());
        self.gpu.assert_free("at its end");
    }
}

/// Returns the job's command.
pub fn words(job: &[&str]) -> Vec<OsString> {
    let mut words = vec![fake_gpu::job().into_os_string()];
    words.extend(job.iter().map(OsString::from));
    words
}

/// Starts a supervised command in a place.
pub fn begin(
    place: &Place,
    gpu: &FakeGpu,
    memory: &str,
    words: &[impl AsRef<OsStr>],
    variables: &[(&str, &str)],
) -> Run {
    let config = format!(
        "[cuda]\nmemory = \"{memory}\"\n[snapshot]\nlock_timeout = \"2s\"\n[restart]\nbackoff = \"10ms\"\n"
    );
    // Changed while no supervisor runs, it would be a file of an unknown program.
    if !place.file("config").exists() {
        fs::write(place.file("config"), config).expect("written");
    }
    let mut command = place.command(&["--interval", "never", "--config", "config", "--"]);
    command.args(words);
    let mut wrapped = gpu.wrap(&command);
    wrapped.envs(variables.iter().copied());
    place.spawn(wrapped, |_| {})
}

/// Returns the output of an undisturbed [`JOB`].
pub fn uninterrupted() -> &'static str {
    static OUTPUT: OnceLock<String> = OnceLock::new();
    OUTPUT.get_or_init(|| untouched(&gpu(), &JOB[FREE..]))
}
