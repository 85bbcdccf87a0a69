//! Processes for tests on a real GPU: one that counts on it, and one without CUDA.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, ChildStdout, Command, Stdio};

/// Memory of the job: enough to see the driver's copy, and small enough for any GPU.
const JOB_GIB: &str = "0.5";
/// Number of steps that no job of a test reaches.
const ENDLESS: &str = "1000000000";

/// Process of `examples/counter.cu`, killed on drop.
pub struct Counter {
    child: Child,
    lines: std::io::Lines<BufReader<ChildStdout>>,
}

impl Counter {
    /// Starts the process; `None` after printing the reason for skipping the test.
    pub fn start(folder: &Path) -> Option<Self> {
        let program = folder.join("counter");
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("examples/counter.cu");
        if !program.exists() {
            let path = std::env::var("PATH").unwrap_or_default();
            let built = Command::new("nvcc")
                .env("PATH", format!("{path}:/usr/local/cuda/bin"))
                .args(["-O2", "-o"])
                .args([&program, &source])
                .status();
            match built {
                Ok(status) if status.success() => {}
                Ok(status) => panic!("nvcc cannot build the job: {status}"),
                Err(error) => {
                    eprintln!("SKIPPED: no nvcc to build the job with ({error})");
                    return None;
                }
            }
        }
        let mut child = Command::new(program)
            .args([JOB_GIB, ENDLESS, "10"])
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let stdout = child.stdout.take().unwrap();
        let mut counter = Self {
            child,
            lines: BufReader::new(stdout).lines(),
        };
        counter.line();
        Some(counter)
    }

    pub fn pid(&self) -> i32 {
        i32::try_from(self.child.id()).unwrap()
    }

    /// Waits for the next line; fails the test if the job exits.
    pub fn line(&mut self) -> String {
        self.lines.next().expect("the job ended").unwrap()
    }

    /// Reads lines until the job is at `step` and returns the checksum there.
    pub fn at_step(&mut self, step: u64) -> String {
        loop {
            let line = self.line();
            let (at, checksum) = line.split_once(' ').unwrap();
            if at.parse() == Ok(step) {
                return checksum.to_owned();
            }
        }
    }
}

impl Drop for Counter {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Process without CUDA, killed on drop. It is not the test's own process, which uses the driver.
pub struct Plain {
    child: Child,
}

impl Plain {
    pub fn start() -> Self {
        let child = Command::new("cat").stdin(Stdio::piped()).spawn().unwrap();
        Self { child }
    }

    pub fn pid(&self) -> i32 {
        i32::try_from(self.child.id()).unwrap()
    }
}

impl Drop for Plain {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
