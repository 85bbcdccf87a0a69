//! Supervisor started by a test.

use std::fs;
use std::path::PathBuf;
use std::process::{Child, ChildStdin, Command};
use std::time::Instant;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::outcome::{LIMIT, POLL, code};
use super::process_tree::{descendants, inner_pid, job_of, wait_until_gone};

/// Running supervisor, killed on drop.
pub struct Run {
    child: Child,
    err: PathBuf,
}

impl Run {
    /// Starts the command; `err` is the file of its messages.
    pub fn spawn(mut command: Command, err: PathBuf) -> Self {
        Self {
            child: command.spawn().expect("ckpt-run starts"),
            err,
        }
    }

    pub fn pid(&self) -> i32 {
        i32::try_from(self.child.id()).expect("a pid")
    }

    pub fn signal(&self, signal: Signal) {
        kill(Pid::from_raw(self.pid()), signal).expect("the supervisor runs");
    }

    /// Kills the supervisor and waits until all processes of its run have exited. Returns its exit code.
    pub fn kill_supervisor(&mut self) -> i32 {
        let everything = descendants(self.pid());
        self.signal(Signal::SIGKILL);
        let code = self.wait();
        wait_until_gone(&everything);
        code
    }

    /// Returns the host pid of the job's first process.
    pub fn job(&self) -> i32 {
        job_of(self.pid())
    }

    /// Returns the name of the job's first process in messages: by its pid in the job's namespace.
    pub fn job_named(&self) -> String {
        let inner = inner_pid(self.job()).expect("the job runs");
        format!("process {inner}")
    }

    /// Kills the job's first process and waits until it has exited.
    pub fn crash(&self) {
        let job = self.job();
        kill(Pid::from_raw(job), Signal::SIGKILL).expect("the job runs");
        wait_until_gone(&[job]);
    }

    /// Waits for the supervisor's end; returns its exit code, 128+n for a signal.
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

    pub fn stdin(&mut self) -> ChildStdin {
        self.child.stdin.take().expect("a piped stdin")
    }
}

impl Drop for Run {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
