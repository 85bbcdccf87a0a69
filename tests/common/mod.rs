//! What the end-to-end tests share: a run of the real `ckpt-run` on the real CRIU, in a folder of its own.
#![allow(dead_code, reason = "each test binary uses a part")]

use std::fs::{self, File};
use std::io::Read;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Output, Stdio};
use std::time::{Duration, Instant};

use ckpt_run::criu::{Criu, Search};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tempfile::TempDir;

pub mod script;
use script::write_script;

/// Longest wait for anything; a machine with two busy cores needs some of it.
pub const LIMIT: Duration = Duration::from_secs(180);

/// Whether the end-to-end tests can run here; says aloud why not.
pub fn can_run() -> bool {
    let root = nix::unistd::geteuid().is_root();
    if !root {
        eprintln!("SKIPPED: end-to-end tests need root");
    }
    root
}

/// A folder with a store, and the runs in it.
pub struct Place {
    folder: TempDir,
}

impl Place {
    pub fn new() -> Self {
        Self {
            folder: tempfile::tempdir().expect("a temporary folder"),
        }
    }

    pub fn path(&self) -> &Path {
        self.folder.path()
    }

    pub fn file(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub fn text(&self, name: &str) -> String {
        fs::read_to_string(self.file(name)).unwrap_or_default()
    }

    /// `ckpt-run` with these arguments, in this folder, with a clean configuration.
    pub fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_ckpt-run"));
        command
            .args(arguments)
            .current_dir(self.path())
            .env("XDG_CONFIG_HOME", self.path())
            .env_remove("CKPT_RUN_STORE");
        command
    }

    /// Runs a verb to its end.
    pub fn verb(&self, arguments: &[&str]) -> Output {
        self.command(arguments)
            .stdin(Stdio::null())
            .output()
            .expect("ckpt-run starts")
    }

    /// Starts a supervised job with stdout in `out` and the supervisor's messages in `err`; both are appended to.
    /// Without a job, `options` are a verb that knows one.
    pub fn start(&self, options: &[&str], job: &[&str]) -> Run {
        self.start_with(options, job, |_| {})
    }

    pub fn start_with(
        &self,
        options: &[&str],
        job: &[&str],
        change: impl FnOnce(&mut Command),
    ) -> Run {
        let mut command = self.command(options);
        if !job.is_empty() {
            command.arg("--").args(job);
        }
        self.spawn(command, change)
    }

    /// Starts a command that is, or becomes, a supervisor; its streams go where those of `start` do.
    pub fn spawn(&self, mut command: Command, change: impl FnOnce(&mut Command)) -> Run {
        let append = |name| {
            File::options()
                .create(true)
                .append(true)
                .open(self.file(name))
                .expect("a log")
        };
        command
            .stdin(Stdio::null())
            .stdout(append("out"))
            .stderr(append("err"));
        change(&mut command);
        Run {
            child: command.spawn().expect("ckpt-run starts"),
            err: self.file("err"),
        }
    }

    /// A Python job: `script` is written to a file and run with `python3 -u`.
    pub fn start_python(&self, options: &[&str], script: &str) -> Run {
        fs::write(self.file("job.py"), script).expect("the script is written");
        self.start(options, &["python3", "-u", "job.py"])
    }

    /// Asks for a snapshot; the image's id.
    pub fn snapshot(&self) -> String {
        let output = self.verb(&["snapshot"]);
        assert!(
            output.status.success(),
            "snapshot failed: {}\n{}",
            String::from_utf8_lossy(&output.stderr),
            self.text("err")
        );
        String::from_utf8(output.stdout)
            .expect("an id")
            .trim()
            .to_owned()
    }

    /// Lets a job go on that waits for a file `go`.
    pub fn go(&self) {
        fs::write(self.file("go"), "").expect("written");
    }

    /// `ckpt-run list --json`.
    pub fn images(&self) -> Vec<serde_json::Value> {
        let output = self.verb(&["list", "--json"]);
        serde_json::from_slice(&output.stdout).unwrap_or_default()
    }

    /// Waits until a file of the folder holds `text`.
    pub fn wait_for(&self, name: &str, text: &str) {
        wait_until(
            &format!(
                "{name} to hold {text:?}; it holds {:?}; err: {}",
                self.text(name),
                self.text("err")
            ),
            || self.text(name).contains(text),
        );
    }
}

/// Host pid of the first process of a supervisor's job, below the root of its tree: of pid 1's children in the sandbox
/// that with the lowest of the pids that are not left to CRIU. In a container the supervisor may be a pid 1, too.
pub fn job_of(supervisor: i32) -> i32 {
    let mut found = None;
    wait_until("the job's process", || {
        let inside = |pid: &i32| inner_pid(*pid).filter(|inner| *inner >= 300);
        let init = descendants(supervisor)
            .into_iter()
            .rfind(|pid| inner_pid(*pid) == Some(1));
        let root = init.and_then(|init| {
            let candidates = children(init).into_iter();
            candidates
                .filter(|pid| inside(pid).is_some())
                .min_by_key(inside)
        });
        found = root.and_then(|root| children(root).first().copied());
        found.is_some()
    });
    found.expect("found above")
}

/// A supervisor that runs. Killed when dropped.
pub struct Run {
    child: Child,
    err: PathBuf,
}

impl Run {
    pub fn pid(&self) -> i32 {
        i32::try_from(self.child.id()).expect("a pid")
    }

    pub fn signal(&self, signal: Signal) {
        kill(Pid::from_raw(self.pid()), signal).expect("the supervisor runs");
    }

    /// Host pid of the job's own first process.
    pub fn job(&self) -> i32 {
        job_of(self.pid())
    }

    /// How messages name the job's own first process: by its pid as the job sees it.
    pub fn job_named(&self) -> String {
        let inner = inner_pid(self.job()).expect("the job runs");
        format!("process {inner}")
    }

    /// Kills the job's first process and waits until it is gone.
    pub fn crash(&self) {
        let job = self.job();
        kill(Pid::from_raw(job), Signal::SIGKILL).expect("the job runs");
        wait_until("the job's end", || {
            !Path::new(&format!("/proc/{job}")).exists()
        });
    }

    /// Waits for the supervisor's end; its exit code, 128+n for a signal.
    pub fn wait(&mut self) -> i32 {
        let begun = Instant::now();
        loop {
            if let Some(status) = self.child.try_wait().expect("a child") {
                return code(status);
            }
            assert!(
                begun.elapsed() < LIMIT * 3,
                "the run does not end: {}",
                fs::read_to_string(&self.err).unwrap_or_default()
            );
            std::thread::sleep(POLL);
        }
    }

    pub fn has_ended(&mut self) -> bool {
        self.child.try_wait().expect("a child").is_some()
    }

    pub fn stdin(&mut self) -> std::process::ChildStdin {
        self.child.stdin.take().expect("a piped stdin")
    }

    pub fn stdout(&mut self) -> std::process::ChildStdout {
        self.child.stdout.take().expect("a piped stdout")
    }
}

impl Drop for Run {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A program in CRIU's place: a shell script in which `CRIU` is the real one, and `HERE` the folder.
pub fn criu_script(folder: &Path, script: &str) -> PathBuf {
    let prefix = Path::new(env!("CARGO_MANIFEST_DIR")).join(".criu");
    let explicit = prefix.exists().then_some(prefix);
    let found = Criu::find(&Search::new(explicit)).expect("a CRIU");
    let quoted = |word: &Path| format!("'{}'", word.to_str().expect("text"));
    let words: Vec<String> = found
        .argv()
        .iter()
        .map(|word| quoted(word.as_ref()))
        .collect();
    let script = script.replace("CRIU", &words.join(" "));
    let script = script.replace("HERE", &quoted(folder));
    let program = folder.join("criu");
    write_script(&program, &format!("#!/bin/sh\n{script}\n"));
    program
}

/// Time between two looks at a condition.
const POLL: Duration = Duration::from_millis(10);

/// Looks at a condition until it holds; fails aloud after [`LIMIT`].
pub fn wait_until(what: &str, mut holds: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !holds() {
        assert!(begun.elapsed() < LIMIT, "waited too long for {what}");
        std::thread::sleep(POLL);
    }
}

pub fn code(status: ExitStatus) -> i32 {
    status
        .code()
        .unwrap_or_else(|| 128 + status.signal().unwrap_or(0))
}

/// All descendants of a process, by /proc.
pub fn descendants(pid: i32) -> Vec<i32> {
    let mut found = vec![];
    let mut open = vec![pid];
    while let Some(next) = open.pop() {
        let children = children(next);
        found.extend(&children);
        open.extend(children);
    }
    found
}

fn children(pid: i32) -> Vec<i32> {
    let tasks = fs::read_dir(format!("/proc/{pid}/task"));
    let lists = tasks.into_iter().flatten().flatten().map(|task| {
        // A thread that has ended has none.
        fs::read_to_string(task.path().join("children")).unwrap_or_default()
    });
    let words = lists.collect::<Vec<_>>().join(" ");
    words
        .split_whitespace()
        .filter_map(|word| word.parse().ok())
        .collect()
}

/// The pid of a process inside its own PID namespace.
pub fn inner_pid(pid: i32) -> Option<i32> {
    let mut status = String::new();
    File::open(format!("/proc/{pid}/status"))
        .and_then(|mut file| file.read_to_string(&mut status))
        .ok()?;
    let line = status.lines().find(|line| line.starts_with("NSpid:"))?;
    line.split_whitespace().last()?.parse().ok()
}

/// A test that fails shows what CRIU said.
impl Drop for Place {
    fn drop(&mut self) {
        if !std::thread::panicking() {
            return;
        }
        for entry in fs::read_dir(self.file(".ckpt-run/logs"))
            .into_iter()
            .flatten()
            .flatten()
        {
            let log = fs::read_to_string(entry.path()).unwrap_or_default();
            let tail = log.len().saturating_sub(LOG_TAIL_BYTES);
            let shown = String::from_utf8_lossy(&log.as_bytes()[tail..]).into_owned();
            eprintln!("--- {}\n{shown}", entry.path().display());
        }
    }
}

/// The end of a CRIU log that says why.
const LOG_TAIL_BYTES: usize = 3000;
